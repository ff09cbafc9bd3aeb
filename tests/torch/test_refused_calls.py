"""A call that is refused on one rank takes its place there, and ends on the others with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncpar.errors import OperationMismatch, PeerCancelled, UsageError
from tests.torch.values import assert_same
from tests.torch.worlds import on_ranks

Call = Callable[[], Any]


def one_is_refused(good: Call, bad: Call, reason: str) -> None:
    """Let rank 1 make a call that is refused because of ``reason``, where rank 0 makes a good one; both go on then."""
    is_refused = dist.get_rank() == 1
    with pytest.raises(
        dist.DistBackendError, match=reason if is_refused else f"refused on rank 1: .*{reason}"
    ) as raised:
        (bad if is_refused else good)()
    assert isinstance(raised.value, UsageError if is_refused else PeerCancelled)
    x = torch.full((3,), 1.0 + dist.get_rank())
    dist.all_reduce(x)
    assert_same(x, torch.full((3,), 3.0))


def cases(count: int) -> list[tuple[Call, Call, str]]:
    """Return good calls, bad ones, and the errors of those."""
    group: Any = dist.group.WORLD
    x, y, pair = torch.ones(count), torch.ones(2 * count), [torch.ones(count), torch.ones(count)]
    ints, far, sparse = torch.ones(count).long(), torch.ones(count, device="meta"), torch.eye(3).to_sparse()
    wide, short = torch.ones(2 * count), torch.ones(max(count // 2, 1))
    uneven = [torch.ones(count), torch.ones(count + 1)]
    return [
        (lambda: dist.all_reduce(x), lambda: dist.all_reduce(far), "got one on meta"),
        (lambda: dist.all_reduce(x), lambda: group.allreduce([3]).wait(), "expected a tensor, got int"),
        (lambda: dist.all_reduce(x), lambda: group.allreduce(pair).wait(), "expected one tensor per rank, got 2"),
        (lambda: dist.all_reduce(x), lambda: group.allreduce(x, op="sum").wait(), "op: expected"),
        (lambda: dist.all_reduce(x), lambda: group.allreduce(x, root=1).wait(), "root: expected no such argument"),
        (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, op=dist.ReduceOp.BAND), "band works on integers"),
        (lambda: dist.all_reduce(sparse), lambda: dist.all_reduce(sparse, dist.ReduceOp.MAX), "expected SUM"),
        (
            lambda: group.allreduce_coalesced(pair).wait(),
            lambda: group.allreduce_coalesced([x, ints]).wait(),
            "expected tensors of one dtype",
        ),
        (lambda: dist.broadcast(x, 0), lambda: dist.broadcast(sparse, 0), "expected a dense tensor"),
        (lambda: dist.broadcast(x, 0), lambda: group.broadcast(x, 5).wait(), "root: .*5"),
        (lambda: dist.reduce(x, 0), lambda: dist.reduce(far, 0), "got one on meta"),
        (lambda: group.barrier().wait(), lambda: group.barrier(root=1).wait(), "root: expected no such argument"),
        (lambda: dist.all_gather([*pair], x), lambda: dist.all_gather([x], x), "expected 2 entries"),
        (lambda: dist.all_gather([*pair], x), lambda: dist.all_gather([x, far], x), "got one on meta"),
        (lambda: dist.all_gather_single(y, x), lambda: dist.all_gather_single(x, x), "expected 2 times"),
        (
            lambda: group.all_gather_single_coalesced([y, y.clone()], pair).wait(),
            lambda: group.all_gather_single_coalesced([y], pair).wait(),
            "expected as many",
        ),
        (
            lambda: group.allgather_coalesced([pair, [*map(torch.clone, pair)]], pair).wait(),
            lambda: group.allgather_coalesced([pair, [ints, x]], pair).wait(),
            "like the tensor of input_list",
        ),
        (
            lambda: dist.gather(x, pair if dist.get_rank() == 0 else None),
            lambda: dist.gather(far, None),
            "got one on meta",
        ),
        (
            lambda: dist.scatter(x, pair if dist.get_rank() == 0 else None),
            lambda: dist.scatter(far, None),
            "got one on meta",
        ),
        (
            lambda: dist.gather(x, pair if dist.get_rank() == 0 else None),
            lambda: group.gather([pair], [x], root=0).wait(),
            "expected none on a rank that is not the root",
        ),
        (
            lambda: dist.scatter(x, pair if dist.get_rank() == 0 else None),
            lambda: group.scatter([x], [pair], root=0).wait(),
            "expected none on a rank that is not the root",
        ),
        (lambda: dist.reduce_scatter(x, pair), lambda: dist.reduce_scatter(x, [x]), "expected 2 tensors"),
        (
            lambda: dist.reduce_scatter(uneven[dist.get_rank()], uneven),
            lambda: dist.reduce_scatter(short, [*uneven]),
            "expected the shape of this rank's entry",
        ),
        (lambda: dist.reduce_scatter_single(x, y), lambda: dist.reduce_scatter_single(x, x), "expected 2 times"),
        (
            lambda: group.reduce_scatter_single_coalesced(pair, [y, wide]).wait(),
            lambda: group.reduce_scatter_single_coalesced(pair, [y, x]).wait(),
            "expected 2 times",
        ),
        (lambda: dist.all_to_all([*pair], pair), lambda: dist.all_to_all([x], [x]), "expected 2 tensors"),
        (
            lambda: dist.all_to_all_single(y, wide),
            lambda: group.alltoall_base(y, wide.long(), [], []).wait(),
            "like input",
        ),
    ]


@on_ranks(2)
@pytest.mark.parametrize("count", [4, 1 << 20])
def test_the_operation_ends_on_the_others_with_the_reason_and_the_next_ones_meet(count: int) -> None:
    for good, bad, reason in cases(count):
        one_is_refused(good, bad, reason)


@on_ranks(2)
def test_works_that_are_under_way_are_not_disturbed() -> None:
    works = [dist.all_reduce(torch.ones(1000), async_op=True)]
    x = torch.ones(3)
    if dist.get_rank() == 1:
        with pytest.raises(UsageError):
            dist.all_gather([x], x)
    else:
        refused = dist.all_gather([x.clone(), x.clone()], x, async_op=True)
    works.append(dist.all_reduce(torch.full((5,), 2.0), async_op=True))
    for work, wanted in zip(works, (2.0, 4.0), strict=True):
        assert work.get_future().wait()[0][0].item() == wanted
    if dist.get_rank() == 0:
        with pytest.raises(PeerCancelled, match=r"refused on rank 1: .*expected 2 entries"):
            refused.wait()


@on_ranks(2)
def test_a_refused_call_in_another_group_takes_its_place_there() -> None:
    pair = dist.new_group([0, 1])
    x = torch.ones(2)
    if dist.get_rank() == 1:
        with pytest.raises(UsageError):
            dist.all_reduce(torch.ones(2, device="meta"), group=pair)
    else:
        with pytest.raises(PeerCancelled, match="refused on rank 1"):
            dist.all_reduce(x.clone(), group=pair)
    for group in (None, pair):
        y = x.clone()
        dist.all_reduce(y, group=group)
        assert_same(y, torch.full((2,), 2.0))


@on_ranks(2)
def test_the_receive_of_a_refused_send_ends_and_the_next_gets_the_next() -> None:
    if dist.get_rank() == 1:
        for bad in (torch.eye(3).to_sparse(), torch.ones(3, device="meta")):
            with pytest.raises(UsageError):
                dist.send(bad, 0)
        dist.send(torch.full((3,), 7.0), 0)
    else:
        for reason in ("expected a dense tensor", "got one on meta"):
            with pytest.raises(PeerCancelled, match=f"refused on rank 1: .*{reason}"):
                dist.recv(torch.zeros(3), 1)
        x = torch.zeros(3)
        dist.recv(x, 1)
        assert_same(x, torch.full((3,), 7.0))


@on_ranks(2)
def test_a_refused_receive_takes_its_message() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(UsageError):
            dist.recv(torch.eye(3).to_sparse(), 1)
        x = torch.zeros(3)
        dist.recv(x, 1)
        assert_same(x, torch.full((3,), 7.0))
    else:
        with pytest.raises(PeerCancelled, match=r"refused on rank 0: .*expected a dense tensor"):
            dist.send(torch.zeros(1 << 20), 0)
        dist.send(torch.full((3,), 7.0), 0)


@on_ranks(2)
def test_several_tensors_that_differ_between_ranks_are_a_mismatch_on_both() -> None:
    group: Any = dist.group.WORLD
    mine = dist.get_rank()
    counts = [2, 4] if mine else [4, 2]
    xs, outs = [torch.ones(count) for count in counts], [torch.ones(2 * count) for count in counts]
    halves = [torch.ones(count // 2) for count in counts]
    uneven = [torch.ones(2), torch.ones(3 + mine)]
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 1).long(), torch.ones(1, 2, 3 + mine), (4, 2, 3 + mine))
    turned = torch.sparse_coo_tensor(
        torch.zeros(1, 1).long(), torch.ones(1, 2 + mine, 3 - mine), (4, 2 + mine, 3 - mine)
    )
    calls: list[Call] = [
        lambda: group.all_gather_single_coalesced(outs, xs).wait(),
        lambda: group.allgather_coalesced([[*map(torch.clone, xs)] for _ in range(2)], xs).wait(),
        lambda: group.reduce_scatter_single_coalesced(halves, xs).wait(),
        lambda: dist.reduce_scatter(uneven[mine].clone(), uneven),
        lambda: dist.all_reduce(sparse),
        lambda: dist.all_reduce(turned),
    ]
    for call in calls:
        with pytest.raises(OperationMismatch):
            call()
    x = torch.ones(3)
    dist.all_reduce(x)
    assert_same(x, torch.full((3,), 2.0))
