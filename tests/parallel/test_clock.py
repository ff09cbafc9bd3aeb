"""Ranks may begin a step in the right order, decided without a loop."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.errors import UsageError
from asyncpar.parallel.clock import (
    AnnounceSettling,
    Begin,
    Event,
    PeerSettling,
    PeerStepped,
    Settled,
    SettleWanted,
    StalenessClock,
    StepDone,
    StepUnwanted,
    StepWanted,
)


def make_clock(bound: int | None, *, rank: int = 0, size: int = 3) -> StalenessClock:
    return StalenessClock(rank=rank, size=size, max_staleness=bound)


def test_a_rank_waits_for_the_slowest_and_is_told_for_how_long() -> None:
    clock = make_clock(1)
    assert clock.handle(StepWanted(), 0.0) == [Begin(0.0)]
    assert clock.handle(StepDone(), 1.0) == []
    assert clock.handle(StepWanted(), 1.0) == [Begin(0.0)]
    assert clock.handle(StepDone(), 2.0) == []
    assert clock.handle(StepWanted(), 2.0) == []
    assert clock.handle(PeerStepped(1, 1), 5.0) == []
    assert (clock.slowest(), clock.staleness()) == (2, 2)
    assert clock.handle(PeerStepped(2, 1), 6.5) == [Begin(4.5)]


def test_with_bound_zero_all_run_the_same_step() -> None:
    clock = make_clock(0, size=2)
    assert clock.handle(StepWanted(), 0.0) == [Begin(0.0)]
    clock.handle(StepDone(), 0.0)
    assert clock.handle(StepWanted(), 0.0) == []
    assert clock.handle(PeerStepped(1, 1), 0.0) == [Begin(0.0)]


def test_without_bound_nobody_waits() -> None:
    clock = make_clock(None)
    for _ in range(100):
        assert clock.handle(StepWanted(), 0.0) == [Begin(0.0)]
        assert clock.handle(StepDone(), 0.0) == []


def test_a_rank_that_settles_holds_nobody_up() -> None:
    clock = make_clock(0, size=2)
    clock.handle(StepWanted(), 0.0)
    clock.handle(StepDone(), 0.0)
    assert clock.handle(StepWanted(), 0.0) == []
    assert clock.handle(PeerSettling(1, 0), 1.0) == [Begin(1.0)]


def test_a_settlement_is_complete_when_all_settle_and_all_updates_are_here() -> None:
    clock = make_clock(None, size=2)
    clock.handle(StepWanted(), 0.0)
    clock.handle(StepDone(), 0.0)
    assert clock.handle(SettleWanted(), 0.0) == [AnnounceSettling(1)]
    assert clock.handle(PeerSettling(1, 2), 0.0) == []
    assert clock.handle(PeerStepped(1, 1), 0.0) == []
    assert clock.handle(PeerStepped(1, 2), 0.0) == [Settled()]


def test_after_a_settlement_all_begin_level() -> None:
    clock = make_clock(0, size=2)
    for _ in range(3):
        clock.handle(PeerStepped(1, 3), 0.0)
    clock.handle(SettleWanted(), 0.0)
    assert clock.handle(PeerSettling(1, 3), 0.0) == [Settled()]
    assert clock.handle(StepWanted(), 0.0) == [Begin(0.0)]
    clock.handle(StepDone(), 0.0)
    assert clock.handle(StepWanted(), 0.0) == []
    assert clock.handle(PeerStepped(1, 4), 0.0) == [Begin(0.0)]


def test_a_world_of_one_settles_at_once() -> None:
    clock = make_clock(0, size=1)
    assert clock.handle(StepWanted(), 0.0) == [Begin(0.0)]
    clock.handle(StepDone(), 0.0)
    assert clock.handle(SettleWanted(), 0.0) == [AnnounceSettling(1), Settled()]


def test_a_wish_can_be_withdrawn() -> None:
    clock = make_clock(0, size=2)
    clock.handle(StepWanted(), 0.0)
    clock.handle(StepDone(), 0.0)
    assert clock.handle(StepWanted(), 0.0) == []
    clock.handle(StepUnwanted(), 0.0)
    assert clock.handle(PeerStepped(1, 1), 0.0) == []
    assert clock.handle(StepWanted(), 0.0) == [Begin(0.0)]


def test_two_wishes_at_once_are_refused() -> None:
    clock = make_clock(0, size=2)
    clock.handle(StepWanted(), 0.0)
    clock.handle(StepDone(), 0.0)
    clock.handle(StepWanted(), 0.0)
    for event in (StepWanted(), SettleWanted()):
        with pytest.raises(UsageError, match="waits to begin a step"):
            clock.handle(event, 0.0)


@pytest.mark.parametrize(("rank", "size", "bound"), [(2, 2, 0), (-1, 2, 0), (0, 2, -1)])
def test_places_and_bounds_out_of_range_are_refused(rank: int, size: int, bound: int) -> None:
    with pytest.raises(UsageError, match=r"expected 0"):
        StalenessClock(rank=rank, size=size, max_staleness=bound)


class World:
    """Ranks that step and settle in any order, with messages that are under way for any time, in order per pair."""

    def __init__(self, size: int, bound: int | None, plan: list[list[int]]) -> None:
        self.size, self.bound = size, bound
        self.clocks = [StalenessClock(rank=rank, size=size, max_staleness=bound) for rank in range(size)]
        self.plan = [deque(counts) for counts in plan]  # steps to make before each settlement
        self.left = [counts.popleft() for counts in self.plan]
        self.state = ["idle"] * size
        self.done = [0] * size  # in this settlement
        self.rounds = [0] * size
        self.under_way: dict[tuple[int, int], deque[Event]] = {
            (a, b): deque() for a in range(size) for b in range(size) if a != b
        }

    def running(self, rank: int) -> int:
        """The number of the step that a rank runs, or ran last."""
        return self.done[rank] + (self.state[rank] == "running")

    def moves(self) -> list[tuple[str, int, int]]:
        ready = [("act", rank, rank) for rank in range(self.size) if self.state[rank] in ("idle", "running")]
        return ready + [("deliver", *pair) for pair, events in self.under_way.items() if events]

    def make(self, move: tuple[str, int, int]) -> None:
        what, source, rank = move
        if what == "deliver":
            self.feed(rank, self.under_way[source, rank].popleft())
        elif self.state[rank] == "running":
            self.state[rank] = "idle"
            self.done[rank] += 1
            self.left[rank] -= 1
            self.feed(rank, StepDone())
            self.announce(rank, PeerStepped(rank, self.clocks[rank].steps))
        else:
            self.state[rank] = "waiting" if self.left[rank] else "settling"
            self.feed(rank, StepWanted() if self.left[rank] else SettleWanted())

    def announce(self, rank: int, event: Event) -> None:
        for other in range(self.size):
            if other != rank:
                self.under_way[rank, other].append(event)

    def feed(self, rank: int, event: Event) -> None:
        for command in self.clocks[rank].handle(event, 0.0):
            match command:
                case Begin():
                    assert self.state[rank] == "waiting"
                    self.state[rank] = "running"
                    self.check(rank)
                case AnnounceSettling(steps):
                    self.announce(rank, PeerSettling(rank, steps))
                case Settled():
                    assert self.state[rank] == "settling"
                    self.rounds[rank] += 1
                    self.state[rank] = "settled"
        if all(state == "settled" for state in self.state):
            self.go_on()

    def check(self, rank: int) -> None:
        behind = [r for r in range(self.size) if self.state[r] not in ("settling", "settled")]
        if self.bound is not None:
            slowest = min((self.done[r] + 1 for r in behind if r != rank), default=self.running(rank))
            assert self.running(rank) - slowest <= self.bound

    def go_on(self) -> None:
        """All have settled; between settlements there is a barrier."""
        for rank in range(self.size):
            if self.plan[rank]:
                self.left[rank] = self.plan[rank].popleft()
                self.done[rank], self.state[rank] = 0, "idle"
            else:
                self.state[rank] = "over"


@given(st.data())
def test_nobody_runs_further_ahead_and_everybody_ends(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    bound = data.draw(st.one_of(st.none(), st.integers(0, 3)))
    rounds = data.draw(st.integers(1, 2))
    plan = [data.draw(st.lists(st.integers(0, 5), min_size=rounds, max_size=rounds)) for _ in range(size)]
    world = World(size, bound, plan)
    choices = data.draw(st.randoms(use_true_random=False))
    while moves := world.moves():
        world.make(choices.choice(moves))
    assert world.state == ["over"] * size, "nobody is stuck"
    assert world.rounds == [rounds] * size
    assert [clock.steps for clock in world.clocks] == [sum(counts) for counts in plan]
