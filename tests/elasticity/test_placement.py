"""Parts of a state have two holders, on two hosts where there are, and get there from a rank that has them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from asyncpar.elasticity.placement import PartPlacement, by_portion, mirror_of, plan_moves
from asyncpar.elasticity.portions import Portions

LAYOUTS: list[tuple[tuple[int, ...], ...]] = [
    ((0,),),
    ((0, 1),),
    ((0, 1, 2),),
    ((0, 1), (2, 3)),
    ((0, 1), (2,)),
    ((0,), (1,), (2,), (3,)),
    ((0, 2), (1, 3)),
    ((0, 1, 2), (3,)),
]


def ranks(hosts: Sequence[Sequence[int]]) -> list[int]:
    return sorted(itertools.chain(*hosts))


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_a_mirror_is_another_rank_and_on_another_host_if_there_is_one(hosts: Sequence[Sequence[int]]) -> None:
    host = {rank: number for number, group in enumerate(hosts) for rank in group}
    for rank in ranks(hosts):
        mirror = mirror_of(rank, hosts)
        if len(host) == 1:
            assert mirror is None
        else:
            assert mirror is not None
            assert mirror != rank
            assert len(hosts) == 1 or host[mirror] != host[rank]


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_owner_of_a_part_has_its_portion(hosts: Sequence[Sequence[int]], count: int) -> None:
    placement, portions = by_portion(count, hosts), Portions(count, len(ranks(hosts)))
    for rank in ranks(hosts):
        assert placement.owned(rank) == tuple(portions.of(rank))
        assert placement.held(rank) == set(placement.owned(rank)) | set(placement.mirrored(rank))
    assert placement.held(99) == frozenset()


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_after_the_loss_of_any_rank_all_parts_come_to_their_holders(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> None:
    """The survivors are the first ranks of the next world; the rest are newcomers, who have nothing."""
    count = 8
    old, new, size = by_portion(count, before), by_portion(count, after), len(ranks(after))
    for lost in ranks(before):
        survivors = [rank for rank in ranks(before) if rank != lost][:size]
        holders = [old.held(rank) for rank in survivors] + [frozenset[int]()] * (size - len(survivors))
        if len(survivors) < len(ranks(before)) - 1 or not survivors:
            continue  # more than one was lost
        moves, gone = plan_moves(holders, new)
        assert gone == ()
        have = [set(parts) for parts in holders]
        for move in moves:
            assert move.part in holders[move.source]
            assert move.part not in holders[move.dest]
            have[move.dest].add(move.part)
        for rank in range(size):
            assert new.held(rank) <= have[rank]


def test_what_nobody_has_is_named_and_senders_share_the_work() -> None:
    placement = PartPlacement((0, 0, 0, 0), (1, 1, 1, 1))
    both = frozenset(range(3))
    moves, lost = plan_moves([frozenset(), frozenset(), both, both], placement)
    assert lost == (3,)
    assert sorted(move.source for move in moves) == [2, 2, 2, 3, 3, 3]
