"""The tuner finds a good choice on links of many kinds, within its budget, and alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from random import Random
from statistics import median

import numpy as np
import pytest

from asyncpar.collectives.algorithms.catalog import ARENA
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.cost import CostModel
from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import UsageError
from asyncpar.gradsync.tuned_steps import seconds_waited
from asyncpar.gradsync.tuning import Choice, Space, Tuner, TuningConfig, tuned_sizes
from asyncpar.gradsync.tuning_space import StepModel
from asyncpar.net.transport.lane_kinds import SHM, TCP

SIZES = (64 << 10, 1 << 20, 8 << 20, 64 << 20)
"""Bytes of all gradients of a step."""

FOUR_HOSTS: Hosts = ((0,), (1,), (2,), (3,))
LINKS: dict[str, tuple[Hosts, LaneCosts, LaneCosts, bool]] = {
    "shared memory": (((0, 1, 2, 3),), SHM.costs, SHM.costs, True),
    "loopback": (FOUR_HOSTS, *(LaneCosts(latency=60e-6, bandwidth=1.5e9),) * 2, False),
    "1 Gbit/s": (FOUR_HOSTS, *(LaneCosts(latency=150e-6, bandwidth=117e6),) * 2, False),
    "100 Mbit/s": (FOUR_HOSTS, *(LaneCosts(latency=300e-6, bandwidth=11.7e6),) * 2, False),
    "two hosts of two": (((0, 1), (2, 3)), LaneCosts(latency=150e-6, bandwidth=117e6), SHM.costs, True),
}
MESSAGES = frozenset({"ring", "halving", "doubling", "tree", "hierarchical", "hierarchical-tree"})


def buckets_of(payload: int) -> Callable[[float], tuple[int, ...]]:
    """Return what cuts ``payload`` bytes into buckets, at most 16."""

    def sizes(bucket_size_mb: float) -> tuple[int, ...]:
        count = min(max(1, round(payload / (bucket_size_mb * (1 << 20)))), 16)
        return (payload // count,) * count

    return sizes


class PretendedLink:
    """Steps over a link that differs from the prediction of the model: some algorithms are better, others worse."""

    def __init__(self, kind: str, payload: int, *, seed: int, noise: float = 0.02) -> None:
        hosts, lane, local, has_arena = LINKS[kind]
        shared = len(hosts) < 4
        known = CostModel(size=4, hosts=hosts, lane=TCP.costs, local=TCP.costs, has_arenas=has_arena)
        self.believed = StepModel(known, buckets_of(payload), has_arena=has_arena and len(hosts) == 1)
        real = CostModel(size=4, hosts=hosts, lane=lane, local=local, has_arenas=has_arena)
        self._real = StepModel(real, buckets_of(payload), has_arena=has_arena and len(hosts) == 1)
        self._lane = lane
        self._dice = Random(seed)
        self._noise = noise
        names = real.candidates("all_reduce", arena=shared and len(hosts) == 1)
        self._factors = {name: self._dice.uniform(0.9, 1.15) for name in names}
        self.space = Space(
            bucket_sizes_mb=tuned_sizes(25.0, (1.0, 4.0, 100.0), buckets_of(payload)),
            algorithms=tuple(names),
            segments=("", "256k", "2m"),
            with_messages=MESSAGES,
        )

    def seconds(self, choice: Choice) -> float:
        """Return the true time of a step."""
        return self._real.predict(choice) * self._factors[choice.algorithm]

    def step(self, choice: Choice) -> float:
        """Return the time that one step takes, noise and all."""
        return self.seconds(choice) * (1.0 + self._dice.random() * self._noise)

    def learn(self) -> None:
        """Let the model know the lanes, as operations do."""
        self.believed.learn(latency=self._lane.latency, bandwidth=self._lane.bandwidth)

    @property
    def quickest(self) -> float:
        """The time of a step with the best of all choices."""
        space = self.space
        choices = product(space.bucket_sizes_mb, space.algorithms, space.segments)
        return min(
            self.seconds(Choice(size, name, segment if name != ARENA else "")) for size, name, segment in choices
        )


def run(link: PretendedLink, *, steps: int = 50, budget: float = 0.01, hidden: float = 0.0) -> Tuner:
    tuner = Tuner(link.space, link.believed.predict, budget=budget)
    for _ in range(steps):
        waited = link.step(tuner.choice)
        link.learn()
        tuner.observe(waited, waited + hidden)
    return tuner


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("payload", SIZES)
@pytest.mark.parametrize("kind", LINKS)
def test_after_fifty_steps_the_choice_is_within_a_tenth_of_the_best_one(kind: str, payload: int, seed: int) -> None:
    link = PretendedLink(kind, payload, seed=seed)
    tuner = run(link)
    assert link.seconds(tuner.best) <= 1.1 * link.quickest, tuner.table()


@pytest.mark.parametrize("kind", LINKS)
def test_trials_cost_no_more_than_the_budget(kind: str) -> None:
    for seed in range(3):
        link = PretendedLink(kind, SIZES[1], seed=seed)
        tuner = run(link, steps=1000)
        dearest = max(map(link.seconds, tuner._records)) - link.quickest  # noqa: SLF001  # what the table has rounded
        assert tuner.lost <= 0.01 * tuner.elapsed + 2 * dearest, tuner.table()


def test_links_that_are_opened_in_a_trial_do_not_end_it() -> None:
    tuner = Tuner(SPACE, lambda choice: 0.9 if choice.algorithm == "ring" else 1.0, budget=0.05)
    taken: list[Choice] = []
    for _ in range(200):
        seconds = 0.8 if tuner.choice.algorithm == "tree" else 1.0
        seconds *= 1.0 if tuner.choice in (SPACE.first, *taken) else 2.0
        taken.append(tuner.choice)
        tuner.observe(seconds, seconds)
    assert tuner.best.algorithm == "tree"
    assert tuner.lost > 0.5, "what is new was paid for"
    others = [choice for choice in taken if choice != SPACE.first]
    assert others[0] in (Choice(25.0, "halving"), Choice(25.0, "tree")), "algorithms come first"


def test_ranks_that_hear_the_same_choose_the_same() -> None:
    link = PretendedLink("two hosts of two", SIZES[2], seed=3)
    ranks = [Tuner(link.space, link.believed.predict, budget=0.05) for _ in range(3)]
    for _ in range(200):
        assert len({tuner.choice for tuner in ranks}) == 1
        waited = link.step(ranks[0].choice)
        for tuner in ranks:
            tuner.observe(waited, waited + 0.001)
    assert len({tuner.table() for tuner in ranks}) == 1


SPACE = Space(
    bucket_sizes_mb=(25.0, 4.0), algorithms=("ring", "halving", "tree"), segments=("", "256k"), with_messages=MESSAGES
)


def feed(tuner: Tuner, seconds: Callable[[Choice], float], *, steps: int, whole: float = 0.0) -> list[Choice]:
    """Take steps that last ``seconds``; return the choices they were taken with."""
    taken = []
    for _ in range(steps):
        taken.append(tuner.choice)
        tuner.observe(seconds(tuner.choice), max(seconds(tuner.choice), whole))
    return taken


def test_what_is_predicted_to_be_far_slower_is_never_tried() -> None:
    tuner = Tuner(SPACE, lambda choice: 5.0 if choice.algorithm == "tree" else 1.0, budget=0.5)
    taken = feed(tuner, lambda _: 1.0, steps=500)
    assert {choice.algorithm for choice in taken} == {"ring", "halving"}


def test_a_trial_that_turns_out_slow_ends_trials_for_a_while() -> None:
    tuner = Tuner(SPACE, lambda _: 1.0, budget=0.01)
    taken = feed(tuner, lambda choice: 1.0 if choice == SPACE.first else 3.0, steps=100)
    assert 1 <= sum(choice != SPACE.first for choice in taken) <= 2, "two seconds are those of 200 steps"
    assert tuner.best == SPACE.first


def test_one_lucky_step_does_not_make_a_choice_the_best_one_for_long() -> None:
    tuner = Tuner(SPACE, lambda _: 1.0, budget=0.2)
    lucky = {Choice(25.0, "halving"): [0.5]}

    def seconds(choice: Choice) -> float:
        return 1.0 if choice == SPACE.first else 1.2

    for _ in range(60):
        times = lucky.get(tuner.choice, [])
        tuner.observe(*[times[0] if times else seconds(tuner.choice)] * 2)
        del times[:1]
    assert not lucky[Choice(25.0, "halving")], "it was tried"
    assert tuner.best == SPACE.first


@pytest.mark.parametrize("unlucky", [1, 2])
def test_unlucky_steps_do_not_end_the_trial_of_a_better_choice(unlucky: int) -> None:
    tuner = Tuner(SPACE, lambda choice: 0.9 if choice.algorithm == "tree" else 1.0, budget=0.1)
    trials = 0
    for _ in range(60):
        is_better, is_new = tuner.choice == Choice(25.0, "tree"), trials == 0
        trials += is_better
        delayed = is_better and (is_new or trials <= 1 + unlucky)
        tuner.observe(*[(0.8 if is_better else 1.0) * (1.5 if delayed else 1.0)] * 2)
    assert tuner.best == Choice(25.0, "tree"), tuner.table()


def test_a_slower_choice_is_tried_three_times_at_most() -> None:
    tuner = Tuner(SPACE, lambda _: 1.0, budget=0.5)
    taken = feed(tuner, lambda choice: 1.0 if choice == SPACE.first else 1.05, steps=190)
    counts = {choice: taken.count(choice) for choice in set(taken) - {SPACE.first}}
    assert counts.pop(Choice(4.0, "ring")) == 6, "one that does not count before each"
    assert set(counts.values()) == {4}, "one that does not count, and three that do"


def test_nothing_is_tried_where_communication_is_hidden() -> None:
    tuner = Tuner(SPACE, lambda _: 1.0, budget=0.5)
    assert set(feed(tuner, lambda _: 0.001, steps=100, whole=1.0)) == {SPACE.first}


def test_a_link_that_changes_is_noticed_in_time() -> None:
    tuner = Tuner(SPACE, lambda _: 1.0, budget=0.05)
    feed(tuner, lambda choice: {"ring": 1.0, "halving": 1.2, "tree": 1.3}[choice.algorithm], steps=300)
    assert tuner.best.algorithm == "ring"
    feed(tuner, lambda choice: {"ring": 1.0, "halving": 0.6, "tree": 1.3}[choice.algorithm], steps=600)
    assert tuner.best.algorithm == "halving"


def test_the_first_step_with_new_buffers_does_not_count_and_is_paid_for() -> None:
    space = Space(bucket_sizes_mb=(25.0, 4.0), algorithms=("ring",))
    tuner = Tuner(space, lambda _: 1.0, budget=0.5)
    before, is_new = tuner.choice, False
    for _ in range(20):
        is_new, before = tuner.choice.bucket_size_mb != before.bucket_size_mb, tuner.choice
        seconds = 0.8 if tuner.choice.bucket_size_mb == 4.0 else 1.0
        tuner.observe(seconds + is_new, seconds + is_new)
    assert tuner.best.bucket_size_mb == 4.0
    assert tuner.lost == pytest.approx(0.8)
    assert "4m@ring*" in tuner.table()
    assert "0.8 s lost by trials in 20 steps" in tuner.table()


def test_sizes_that_make_the_same_buckets_are_one() -> None:
    plans: dict[float, Sequence[int]] = {25.0: (5,), 1.0: (2, 3), 4.0: (5,), 100.0: (5,)}
    assert tuned_sizes(25.0, (1.0, 4.0, 100.0), plans.__getitem__) == (25.0, 1.0)


def test_steps_without_gradients_have_a_time_too() -> None:
    known = CostModel(size=4, hosts=FOUR_HOSTS, lane=TCP.costs, local=TCP.costs)
    predicted = StepModel(known, lambda _: (), has_arena=False)
    assert predicted.predict(Choice(25.0)) > 0.0


def test_what_was_measured_changes_predictions() -> None:
    known = CostModel(size=4, hosts=FOUR_HOSTS, lane=TCP.costs, local=TCP.costs)
    predicted = StepModel(known, buckets_of(1 << 20), has_arena=False)
    ring, doubling = Choice(25.0, "ring"), Choice(25.0, "doubling")
    assert predicted.predict(ring) < predicted.predict(doubling)
    predicted.learn(latency=0.01, bandwidth=None)
    assert predicted.predict(ring) > predicted.predict(doubling)
    assert median([predicted.predict(Choice(25.0)), predicted.predict(doubling)]) <= predicted.predict(ring)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"budget": 0.0}, "budget: expected a part of the time of steps"),
        ({"budget": 0.6}, "budget: expected a part"),
        ({"bucket_sizes_mb": (1.0, -1.0)}, "bucket_sizes_mb: expected positive numbers of MiB"),
        ({"bucket_sizes_mb": (float("inf"),)}, "bucket_sizes_mb: expected positive"),
        ({"segments": ("3m",)}, "segments: expected sizes such as 256k, 4k to 2m, got '3m'"),
        ({"segments": ("",)}, "segments: expected sizes"),
        ({"pin": "ring"}, "pin: expected 25m, @ring, or 25m@ring/256k, got 'ring'"),
        ({"pin": "0m"}, "pin: expected 25m"),
        ({"pin": "25m@ring/9g"}, "pin: '25m@ring/9g': algorithm: expected messages of 4k to 2m"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        TuningConfig(**settings)  # type: ignore[arg-type]
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("pin", "size", "algorithm"),
    [
        ("", None, None),
        ("4m", 4.0, None),
        ("0.5m@tree", 0.5, "tree"),
        ("@hierarchical-tree/64k", None, "hierarchical-tree/64k"),
    ],
)
def test_a_pin_says_one_of_both_or_both(pin: str, size: float | None, algorithm: str | None) -> None:
    config = TuningConfig(pin=pin)
    assert (config.pinned_size, config.pinned_algorithm) == (size, algorithm)


@pytest.mark.parametrize(
    ("hosts", "offset", "expected"),
    [
        (((0, 1, 2, 3),), 0.0, 11.2 - 10.6),
        (((0, 1), (2, 3)), 4000.0, 10.5 - 10.1),
        (((0,), (1,), (2,), (3,)), 4000.0, 10.8 - 10.6),
    ],
)
def test_a_step_is_waited_for_until_the_last_rank_of_a_host_has_it(
    hosts: Hosts, offset: float, expected: float
) -> None:
    clocks = np.array([0.0, 0.0, offset, offset])
    since = clocks + np.array([10.0, 10.1, 10.6, 10.3])
    ends = clocks + np.array([10.5, 10.4, 10.8, 11.2])
    assert seconds_waited(ends - since, ends, hosts) == pytest.approx(expected)


def test_clocks_that_differ_make_no_absurd_wait() -> None:
    waits, ends = np.array([0.5, 0.2]), np.array([7e6, 3.0])
    assert 0.2 <= seconds_waited(waits, ends, ((0, 1),)) <= 0.5
    assert 0.2 <= seconds_waited(waits, ends[::-1], ((0, 1),)) <= 0.5
