"""Ranks that are slow are named with the cause, within 20 rounds; equal ones never are."""

from __future__ import annotations

import random

import pytest

from asyncpar.core.observe.pauses import COLLECTION, TAKEN
from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.observe.image import Event
from asyncpar.observe.rounds import Cause, Round, rounds_of
from asyncpar.observe.stragglers import (
    LEAST_COMMON,
    REPORTED_ROUNDS,
    WINDOW,
    LinkRate,
    LinkSample,
    SlowSender,
    add_sample,
    find_slow_link,
    find_slow_sender,
    find_straggler,
    settle_rate,
)

STEP = 0.05


def normal(dice: random.Random, count: int, *, noise: float = 0.05) -> list[Round]:
    """Rounds of a rank that computes as long as the others, and differs by so much."""
    found = []
    for number in range(count):
        own = STEP * dice.gauss(1.0, noise)
        found.append(Round(number=number, own=own, seconds=STEP * 1.2, parts={Cause.COMPUTE: own}))
    return found


def slower(rounds: list[Round], cause: Cause, extra: float, *, every: int = 1) -> list[Round]:
    """The same rounds, with ``extra`` seconds of ``cause`` in each ``every``-th."""
    found = []
    for each in rounds:
        more = extra if each.number % every == 0 else 0.0
        parts = {**each.parts, cause: each.parts.get(cause, 0.0) + more}
        found.append(Round(number=each.number, own=each.own + more, seconds=each.seconds + more, parts=parts))
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.LINK])
@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_takes_a_fifth_longer_is_named_with_the_cause(size: int, cause: Cause, seed: int) -> None:
    dice = random.Random(seed)
    rounds = {rank: normal(dice, WINDOW) for rank in range(size)}
    culprit = dice.randrange(size)
    rounds[culprit] = slower(rounds[culprit], cause, 0.2 * STEP * 1.2)
    found = find_straggler(rounds)
    assert found is not None
    assert (found.rank, found.cause) == (culprit, cause)
    assert 0.1 < found.share < 0.35
    assert found.rounds == (0, WINDOW - 1)
    assert f"rank {culprit} on host-b is slow" in found.describe("host-b")


def test_pauses_that_come_now_and_then_are_found() -> None:
    dice = random.Random(1)
    rounds = {rank: normal(dice, WINDOW) for rank in range(4)}
    rounds[2] = slower(rounds[2], Cause.COLLECTION, STEP, every=5)
    found = find_straggler(rounds)
    assert found is not None
    assert (found.rank, found.cause) == (2, Cause.COLLECTION)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.15])
@pytest.mark.parametrize("size", [2, 4])
def test_no_alarm_in_a_thousand_rounds_of_equal_ranks(noise: float, size: int) -> None:
    dice = random.Random(size)
    rounds = {rank: normal(dice, 1000, noise=noise) for rank in range(size)}
    for last in range(WINDOW, 1001):
        found = find_straggler({rank: own[last - WINDOW : last] for rank, own in rounds.items()})
        assert found is None, (last, found)


def test_one_long_pause_is_no_habit() -> None:
    dice = random.Random(1)
    rounds = {rank: normal(dice, WINDOW) for rank in range(4)}
    rounds[1] = slower(rounds[1], Cause.COMPUTE, 2.0, every=WINDOW)
    assert find_straggler(rounds) is None


def test_ranks_that_have_reported_too_little_are_not_judged() -> None:
    dice = random.Random(1)
    rounds = {0: normal(dice, WINDOW), 1: slower(normal(dice, WINDOW), Cause.COMPUTE, 1.0)[LEAST_COMMON + 1 :]}
    assert find_straggler(rounds) is None
    assert find_straggler({0: normal(dice, WINDOW)}) is None
    assert find_straggler({}) is None


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("behind", [1, 2, 4])
def test_ranks_that_were_looked_at_at_different_moments_are_judged_by_the_rounds_that_all_have(
    size: int, behind: int
) -> None:
    dice = random.Random(behind)
    rounds = {rank: normal(dice, REPORTED_ROUNDS + 10) for rank in range(size)}
    rounds[1] = slower(rounds[1], Cause.COLLECTION, 0.2 * STEP * 1.2)
    reported = {rank: own[-REPORTED_ROUNDS - behind * (rank == 0) :][:REPORTED_ROUNDS] for rank, own in rounds.items()}
    found = find_straggler(reported)
    assert found is not None
    assert (found.rank, found.cause) == (1, Cause.COLLECTION)


@pytest.mark.parametrize("size", [2, 4])
def test_no_alarm_in_a_thousand_inspections_of_the_fewest_rounds(size: int) -> None:
    dice = random.Random(size)
    rounds = {rank: normal(dice, 1000, noise=0.1) for rank in range(size)}
    for last in range(LEAST_COMMON, 1001):
        assert find_straggler({rank: own[last - LEAST_COMMON : last] for rank, own in rounds.items()}) is None


def test_code_that_blocks_the_loop_is_compute_where_all_do() -> None:
    dice = random.Random(1)
    rounds = {}
    for rank in range(4):
        own = [STEP * (1.3 if rank == 3 else 1.0) * dice.gauss(1, 0.02) for _ in range(WINDOW)]
        rounds[rank] = [
            Round(number=n, own=seconds, seconds=seconds, parts={Cause.BLOCKED: seconds})
            for n, seconds in enumerate(own)
        ]
    found = find_straggler(rounds)
    assert found is not None
    assert (found.rank, found.cause) == (3, Cause.COMPUTE)


def event(kind: EventKind, begin: float, end: float | None, **more: object) -> Event:
    state = EventState.STARTED if end is None else EventState.COMPLETED
    values: dict[str, object] = {"ticket": 0, "kind": kind, "state": state, "created": begin, "ended": end, "name": "x"}
    return Event(**{**values, **more})  # type: ignore[arg-type]


def test_rounds_are_made_of_what_the_ring_says() -> None:
    operation = {"name": "all_reduce", "group": 7}
    events = [
        event(EventKind.COLLECTIVE, 0.0, 1.0, sequence=1, **operation),
        event(EventKind.SPAN, 1.0, 1.2, name="load batch"),
        event(EventKind.SPAN, 1.3, 1.4, name=COLLECTION),
        event(EventKind.SPAN, 1.5, 1.9, name="forward"),
        event(EventKind.SPAN, 2.0, 2.0, name=TAKEN, nbytes=500_000, group=250_000, sequence=1_000_000),
        event(EventKind.COLLECTIVE, 3.0, 3.5, sequence=2, **operation),
        event(EventKind.COLLECTIVE, 3.2, 3.4, sequence=9, name="other", group=8),
        event(EventKind.BLOCKED, 3.7, None, sequence=100_000),
        event(EventKind.COLLECTIVE, 4.0, 4.1, sequence=3, **operation),
        event(EventKind.COLLECTIVE, 5.0, 5.1, sequence=5, **operation),
        event(EventKind.COLLECTIVE, 6.0, None, sequence=6, **operation),
    ]
    first, second = rounds_of(events, 7, 24)
    assert (first.number, first.own, first.seconds) == (2, 2.0, 2.5)
    assert first.parts == pytest.approx({Cause.TAKEN: 0.5, Cause.COLLECTION: 0.1, Cause.INPUT: 0.2, Cause.COMPUTE: 1.2})
    assert (first.ran, first.parts[Cause.TAKEN]) == pytest.approx((0.25, 0.5))
    assert (second.number, second.own) == (3, 0.5)
    assert second.parts == pytest.approx({Cause.BLOCKED: 0.4, Cause.COMPUTE: 0.1})
    assert rounds_of(events, 99, 24) == []


def sharing_processors(dice: random.Random, wait: float, work: float = 0.2 * STEP) -> list[Round]:
    """Rounds of a rank whose thread waits for a processor, so many seconds a round on average, seen once a second.

    It works for so many seconds of a round, and sleeps for the same time in all ranks.
    """
    events, now, sampled_at, waited, ran = [], 0.0, 0.0, 0.0, 0.0
    for number in range(REPORTED_ROUNDS + 1):
        lost = wait * dice.uniform(0.6, 1.4)
        now, waited, ran = now + 0.6 * STEP + work + lost, waited + lost, ran + work
        events.append(event(EventKind.COLLECTIVE, now, now + 0.1 * STEP, name="all_reduce", group=7, sequence=number))
        now += 0.1 * STEP
        if now - sampled_at > 1.0 or number == REPORTED_ROUNDS:
            micros = [int(seconds * 1e6) for seconds in (waited, ran, now - sampled_at)]
            sample = dict(zip(("nbytes", "group", "sequence"), micros, strict=True))
            events.append(event(EventKind.SPAN, now, now, name=TAKEN, **sample))
            sampled_at, waited, ran = now, 0.0, 0.0
    return rounds_of(events, 7, REPORTED_ROUNDS)


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_waits_for_a_processor_is_named_and_ranks_that_share_them_alike_are_not(seed: int) -> None:
    dice = random.Random(seed)
    rounds = {rank: sharing_processors(dice, STEP) for rank in range(4)}  # two ranks on each processor
    assert find_straggler(rounds) is None
    found = find_straggler(rounds | {2: sharing_processors(dice, 4 * STEP)})
    assert found is not None
    assert (found.rank, found.cause) == (2, Cause.TAKEN)
    assert "because of other programs on its processor" in found.describe()


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_waits_longer_for_a_processor_because_it_computes_more_is_slow_by_computing(seed: int) -> None:
    dice = random.Random(seed)
    rounds = {rank: sharing_processors(dice, 0.4 * STEP) for rank in range(4)}
    rounds[1] = sharing_processors(dice, 2.0 * STEP, work=STEP)  # five times the work, and the waits
    found = find_straggler(rounds)
    assert found is not None
    assert (found.rank, found.cause) == (1, Cause.COMPUTE)
    rounds[1] = sharing_processors(dice, 4.0 * STEP)
    found = find_straggler(rounds)
    assert found is not None
    assert (found.rank, found.cause) == (1, Cause.TAKEN), "as much work"


@pytest.mark.parametrize("cause", [Cause.COLLECTION, Cause.INPUT, Cause.BLOCKED])
def test_waits_for_a_processor_count_as_the_work_that_waits(cause: Cause) -> None:
    def rounds(work: float) -> list[Round]:
        parts = {Cause.TAKEN: 3 * work, Cause.COMPUTE: 0.01}
        parts |= {cause: work - 0.01} if work > 0.01 else {}
        own = sum(parts.values())
        return [Round(number=number, own=own, seconds=0.2, parts=parts, ran=work) for number in range(WINDOW)]

    found = find_straggler({0: rounds(0.01), 1: rounds(0.03), 2: rounds(0.01)})
    assert found is not None
    assert (found.rank, found.cause) == (1, cause)


def test_a_slow_link_is_named() -> None:
    links = {(0, 1): 0.0001, (0, 2): 0.0102, (1, 2): 0.0002, (1, 3): 0.0001}
    found = find_slow_link(links)
    assert found is not None
    assert found.ranks == (0, 2)
    assert "ranks 0 and 2" in found.describe()
    assert find_slow_link({**links, (0, 2): 0.0009}) is None, "a tenth of a millisecond more is noise"
    assert find_slow_link({(0, 1): 1.0}) is None


def samples(*parts: tuple[float, float, bool]) -> list[LinkSample]:
    """Return samples, a second after another, between which a link carried so many bytes in so many seconds."""
    found = [LinkSample(0.0, 0, 0.0, is_full=False)]
    for time, (nbytes, busy, is_full) in enumerate(parts, 1):
        found = add_sample(
            found, LinkSample(float(time), found[-1].nbytes + int(nbytes), found[-1].busy + busy, is_full)
        )
    return found


def test_the_rate_of_a_link_is_that_of_all_its_busy_time() -> None:
    full, idle, burst = (2.4e6, 1.0, True), (0.0, 0.0, False), (1.2e6, 0.5, False)
    assert settle_rate(samples()) is None
    assert settle_rate(samples(idle, idle)) is None
    assert settle_rate(samples(full)) == (2.4e6, True, 1.0)
    assert settle_rate(samples(burst, burst)) == (2.4e6, False, 0.5)
    assert settle_rate(samples(burst, full, burst, idle)) == (2.4e6, False, 0.5), "full once is not enough"
    assert settle_rate(samples(burst, full, idle, full)) == (2.4e6, True, 0.625)
    assert settle_rate(samples(full, full, *[burst] * 8)) == (2.4e6, False, 0.5), "those are over"
    assert settle_rate(samples((1e9, 0.5, True), (1e9, 1.5, True))) == (1e9, True, 1.0)


def test_samples_too_soon_are_none_and_a_new_lane_begins_anew() -> None:
    before = samples((1e6, 1.0, True))
    assert add_sample(before, LinkSample(1.1, 9_000_000, 1.1, is_full=True)) == before
    new = LinkSample(2.0, 5, 0.1, is_full=False)
    assert add_sample(before, new) == [new]


def test_a_rank_whose_link_takes_far_less_than_the_others_is_found() -> None:
    usual = {0: LinkRate(95e6), 1: LinkRate(90e6, is_full=True), 3: LinkRate(70e6)}
    found = find_slow_sender(usual | {2: LinkRate(2.4e6, is_full=True, share=0.6)})
    assert found is not None
    assert (found.rank, found.rate, found.usual) == (2, 2.4e6, 90e6)
    assert (
        found.describe("b") == "rank 2 on b is slow: its link takes 2.4 MB/s, those of the other ranks at least 90 MB/s"
    )
    for other, why in (
        (LinkRate(2.4e6, is_full=False, share=0.6), "it may only have had little to send"),
        (LinkRate(40e6, is_full=True, share=0.9), "half as fast is not far slower"),
        (LinkRate(2.4e6, is_full=True, share=0.05), "the job hardly waits for it"),
    ):
        assert find_slow_sender(usual | {2: other}) is None, why
    two = {0: LinkRate(90e6), 2: LinkRate(2e6, is_full=True, share=1.0)}
    assert find_slow_sender(two) is None, "who of two is slow cannot be reported"


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1.31e9, "1.31 GB/s"), (999.9e6, "1 GB/s"), (453e6, "453 MB/s"), (2500.0, "2.5 kB/s"), (0.0, "0 B/s")],
)
def test_rates_have_no_exponents(rate: float, text: str) -> None:
    assert (
        SlowSender(rank=0, rate=rate, usual=5e9)
        .describe()
        .endswith(f"takes {text}, those of the other ranks at least 5 GB/s")
    )
