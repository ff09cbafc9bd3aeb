"""Python objects through torch's object collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.torch.worlds import on_ranks

pytestmark = pytest.mark.process


def thing(rank: int) -> dict[str, object]:
    """Return an object whose size differs from rank to rank."""
    return {"rank": rank, "text": "x" * 1000 * rank, "nested": [None, (rank, 1.5)], "tensor": torch.full((rank,), 2.0)}


def assert_thing(got: object, rank: int) -> None:
    assert isinstance(got, dict)
    expected = thing(rank)
    torch.testing.assert_close(got.pop("tensor"), expected.pop("tensor"))
    assert got == expected


@on_ranks(4)
def test_objects_are_gathered_everywhere() -> None:
    things = [None] * 4
    dist.all_gather_object(things, thing(dist.get_rank()))
    for rank, got in enumerate(things):
        assert_thing(got, rank)


@on_ranks(4)
def test_objects_are_gathered_on_one_rank() -> None:
    mine = dist.get_rank()
    things = [None] * 4 if mine == 3 else None
    dist.gather_object(thing(mine), things, dst=3)
    for rank, got in enumerate(things or []):
        assert_thing(got, rank)


@on_ranks(4)
def test_lists_of_objects_are_broadcast() -> None:
    things: list[object] = [thing(1), "two", 3] if dist.get_rank() == 2 else [None] * 3
    dist.broadcast_object_list(things, src=2)
    assert_thing(things[0], 1)
    assert things[1:] == ["two", 3]


@on_ranks(4)
def test_objects_are_scattered() -> None:
    mine = dist.get_rank()
    got: list[object] = [None]
    dist.scatter_object_list(got, [thing(rank) for rank in range(4)] if mine == 1 else None, src=1)
    assert_thing(got[0], mine)


@on_ranks(2)
@pytest.mark.parametrize("use_batch", [False, True])
def test_lists_of_objects_are_sent(use_batch: bool) -> None:
    if dist.get_rank() == 0:
        dist.send_object_list([thing(2), "last"], dst=1, use_batch=use_batch)
    else:
        things: list[object] = [None, None]
        dist.recv_object_list(things, src=0, use_batch=use_batch)
        assert_thing(things[0], 2)
        assert things[1] == "last"


@on_ranks(4)
def test_objects_travel_in_groups() -> None:
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() > 0:
        things = [None] * 3
        dist.all_gather_object(things, thing(dist.get_rank()), group=group)
        for rank, got in zip((1, 2, 3), things, strict=True):
            assert_thing(got, rank)
        received: list[object] = [dist.get_rank()]
        dist.broadcast_object_list(received, group=group, group_src=2)
        assert received == [3]
