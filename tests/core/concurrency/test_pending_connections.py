"""Pending connections: the oldest leave when there are too many."""

from __future__ import annotations

import random

from asyncpar.core.concurrency.doorkeeper import PendingConnections


def test_nobody_leaves_while_there_is_room() -> None:
    pending = PendingConnections[int](random.Random(1))
    assert [pending.enter(who, limit=3) for who in range(3)] == [None] * 3
    assert (len(pending), list(pending)) == (3, [0, 1, 2])


def test_one_leaves_for_each_that_is_too_many_and_never_the_newcomer() -> None:
    pending = PendingConnections[int](random.Random(1))
    left = set()
    for who in range(100):
        pushed = pending.enter(who, limit=5)
        assert pushed != who
        left.add(pushed)
        assert len(pending) <= 5
    assert left - {None} == set(range(100)) - set(pending)


def test_who_left_makes_room() -> None:
    pending = PendingConnections[int](random.Random(1))
    for who in range(3):
        pending.enter(who, limit=3)
    pending.leave(1)
    pending.leave(1)
    assert pending.enter(7, limit=3) is None


def test_everybody_has_a_chance_to_outlast_a_flood_of_several_times_the_limit() -> None:
    outlasted = 0
    for seed in range(200):
        pending = PendingConnections[int](random.Random(seed))
        for who in range(4 * 8):
            pending.enter(who, limit=8)
        outlasted += any(who < 8 for who in pending)
    assert outlasted > 0


def test_chance_is_injected_so_that_a_test_can_repeat_it() -> None:
    def pushed(seed: int) -> list[int | None]:
        pending = PendingConnections[int](random.Random(seed))
        return [pending.enter(who, limit=4) for who in range(40)]

    assert pushed(3) == pushed(3)
    assert pushed(3) != pushed(4)
