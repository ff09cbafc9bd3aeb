"""The choice of contributors: one decision for all, with ranks that are slow, lost, or propose at the same time."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from asyncpar.collectives.completion.machine import (
    CalledHere,
    ChoiceCommand,
    ChoiceEvent,
    ContributorChoice,
    ContributorSent,
    FailChoice,
    RankLost,
    ReturnChosen,
    SendToRank,
    TimePassed,
)
from tests import soak


@dataclass
class Network:
    """Machines of ``size`` ranks and the messages between them, in simulated time; links keep their order."""

    size: int
    seed: int = 0
    slowest: float = 0.01
    now: float = 0.0
    outcomes: dict[int, tuple[int, ...] | FailChoice] = field(default_factory=dict)
    decided: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        ranks = tuple(range(self.size))
        self.machines = {rank: ContributorChoice(me=rank, ranks=ranks, lost=()) for rank in ranks}
        self.dead: set[int] = set()
        self.busy: dict[int, float] = {}
        """Until when the event loops of ranks do nothing."""
        self.queue: list[tuple[float, int, int, ChoiceEvent]] = []
        self.counter = 0
        self.looks: set[tuple[int, float]] = set()
        self.last: dict[tuple[int, int], float] = {}

    def at(self, time: float, rank: int, event: ChoiceEvent) -> None:
        self.counter += 1
        heapq.heappush(self.queue, (time, self.counter, rank, event))

    def call(self, rank: int, time: float, *, need: int, wait: float = 0.0, timeout: float = 30.0) -> None:
        self.at(time, rank, CalledHere("all_reduce", need, wait, timeout))

    def kill(self, rank: int) -> None:
        """Let ``rank`` die now; the others learn of it after all it has said."""
        self.dead.add(rank)
        for other in self.machines:
            if other != rank:
                time = max(self.now + self.random.uniform(0, self.slowest), self.last.get((rank, other), 0.0))
                self.at(time, other, RankLost(rank))

    def run(self, *, until: float = 100.0, kills: dict[int, int] | None = None) -> None:
        """Run till nothing happens any more; ``kills`` says after how many events ranks die."""
        kills = dict(kills or {})
        events = 0
        while self.queue and self.queue[0][0] <= until:
            self.now, _, rank, event = heapq.heappop(self.queue)
            if rank in self.dead:
                continue
            if self.busy.get(rank, 0.0) > self.now:
                self.at(self.busy[rank], rank, event)
                continue
            events += 1
            self._do(rank, self.machines[rank].handle(event, now=self.now))
            for victim, after in list(kills.items()):
                if events >= after:
                    del kills[victim]
                    self.kill(victim)

    def _do(self, rank: int, commands: list[ChoiceCommand]) -> None:
        for command in commands:
            match command:
                case SendToRank(other, message):
                    time = max(self.now + self.random.uniform(0, self.slowest), self.last.get((rank, other), 0.0))
                    self.last[rank, other] = time
                    self.at(time, other, ContributorSent(rank, message))
                case ReturnChosen(chosen):
                    self.decided[rank] = chosen.contributors
                case FailChoice():
                    self.outcomes.setdefault(rank, command)
        machine = self.machines[rank]
        if machine.chosen is not None and machine.call is not None:
            self.outcomes.setdefault(rank, machine.chosen.contributors)
        due = machine.next_look(self.now)
        if due < 1e9 and (rank, due) not in self.looks:
            self.looks.add((rank, due))
            self.at(due, rank, TimePassed())


def test_all_that_are_there_contribute() -> None:
    network = Network(4)
    for rank in range(4):
        network.call(rank, 0.0, need=4)
    network.run()
    assert network.outcomes == dict.fromkeys(range(4), (0, 1, 2, 3))


@pytest.mark.parametrize("slow", range(4))
def test_a_quorum_goes_on_without_any_one_rank_and_that_learns_of_it(slow: int) -> None:
    network = Network(4)
    for rank in range(4):
        network.call(rank, 5.0 if rank == slow else 0.0, need=3)
    network.run()
    three = tuple(rank for rank in range(4) if rank != slow)
    assert network.outcomes[three[0]] == three
    assert network.decided == dict.fromkeys(range(4), three)


@pytest.mark.parametrize("stopped", range(4))
def test_it_needs_no_answer_of_a_rank_whose_loop_is_stopped(stopped: int) -> None:
    network = Network(4)
    network.busy[stopped] = 50.0
    for rank in range(4):
        network.call(rank, 0.0, need=3)
    network.run(until=10.0)
    three = tuple(rank for rank in range(4) if rank != stopped)
    assert [network.outcomes.get(rank) for rank in three] == [three] * 3


def test_a_deadline_takes_those_that_are_there_then() -> None:
    network = Network(5)
    for rank, time in enumerate((0.0, 0.1, 0.15, 3.0, 9.0)):
        network.call(rank, time, need=1, wait=0.2)
    network.run()
    assert set(network.decided.values()) == {(0, 1, 2)}


def test_if_all_are_there_no_deadline_is_waited_for() -> None:
    network = Network(3)
    for rank in range(3):
        network.call(rank, 0.0, need=1, wait=20.0)
    network.run(until=1.0)
    assert set(network.decided.values()) == {(0, 1, 2)}


def test_a_policy_that_cannot_be_met_fails_on_every_rank_that_has_called() -> None:
    network = Network(4)
    for rank in (0, 1, 2):
        network.call(rank, 0.0, need=4)
    network.run(kills={3: 2})
    assert [outcome.fault for outcome in network.outcomes.values() if isinstance(outcome, FailChoice)] == ["lost"] * 3
    assert {outcome.rank for outcome in network.outcomes.values() if isinstance(outcome, FailChoice)} == {3}


def test_no_majority_fails_and_half_of_the_ranks_are_one_with_the_first() -> None:
    for dead, left in (((2, 3), (0, 1)), ((0, 1), (2, 3))):
        network = Network(4)
        for rank in dead:
            network.kill(rank)
        for rank in left:
            network.call(rank, 1.0, need=2)
        network.run()
        if 0 in left:
            assert [network.outcomes[rank] for rank in left] == [left] * 2
        else:
            outcomes = [network.outcomes[rank] for rank in left]
            assert [one.fault for one in outcomes if isinstance(one, FailChoice)] == ["lost"] * 2


def test_a_rank_that_waits_for_too_long_names_who_is_missing() -> None:
    network = Network(3)
    for rank in (0, 2):
        network.call(rank, 0.0, need=3, timeout=4.0)
    network.run()
    assert [network.outcomes[rank] for rank in (0, 2)] == [
        FailChoice("timeout", 1, "nothing was decided within 4.0 s")
    ] * 2


def test_ranks_that_call_different_things_fail() -> None:
    network = Network(2)
    network.call(0, 0.0, need=2)
    network.at(0.0, 1, CalledHere("all_reduce of another shape", 2, 0.0, None))
    network.run()
    assert [type(outcome) for outcome in network.outcomes.values()] == [FailChoice] * 2


def test_another_rank_decides_when_the_first_dies_in_the_middle() -> None:
    for after in range(1, 30):
        network = Network(4, seed=after)
        for rank in range(4):
            network.call(rank, 0.001 * rank, need=3)
        network.run(kills={0: after})
        decided = {network.decided[rank] for rank in (1, 2, 3) if rank in network.decided}
        assert len(decided) == 1, after
        assert set(network.outcomes) >= {1, 2, 3}


@pytest.mark.parametrize("block", range(soak.chosen(4, soak=10)))
def test_all_agree_whatever_happens(block: int) -> None:
    """Random sizes, policies, times, stopped loops and deaths: never two decisions, and an end for all that live."""
    for seed in range(block * 30, block * 30 + 30):
        draw = random.Random(seed)
        size = draw.randint(1, 7)
        network = Network(size, seed=seed, slowest=draw.choice((0.001, 0.03, 0.3)))
        need, wait = draw.randint(1, size), draw.choice((0.0, 0.0, 0.05, 1.0))
        for rank in range(size):
            network.call(rank, draw.choice((0.0, 0.0, 0.01, draw.uniform(0, 3))), need=need, wait=wait)
            if draw.random() < 0.2:
                network.busy[rank] = draw.uniform(0, 5)
        victims = draw.sample(range(size), draw.randint(0, (size - 1) // 2)) if draw.random() < 0.5 else []
        network.run(kills={victim: draw.randint(1, 60) for victim in victims})
        assert len(set(network.decided.values())) <= 1, seed
        for chosen in network.decided.values():
            assert len(chosen) >= need, seed
        living = set(range(size)) - network.dead
        assert living <= set(network.outcomes), (seed, network.outcomes)
