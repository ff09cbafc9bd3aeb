"""Ranks that are slower than the others, with the cause, and links that are slower than the others.  Pure.

Theory of operation.  In each round (see ``rounds.py``) the *excess* of a rank is its own time less the median of the
others'.  A rank is a straggler if the mean of its excess over ``WINDOW`` rounds is above a tenth of a round, above six
standard errors of that mean (from the median absolute deviation, which is robust against single pauses), and not due to
one round alone.  The cause is the part of its own time in which it differs most.  Blocking the event loop is a cause
only if the others do not: in programs that compute on the loop all do, and the difference is compute.  Where ranks
share processors, one that computes more waits longer for them: the time that others wait for as much work counts as
that work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, NamedTuple

from asyncpar.observe.rounds import Cause, Round

WINDOW: Final = 20
REPORTED_ROUNDS: Final = WINDOW + 4
"""Number of rounds that a rank reports: ranks are not sampled at the same moment, and only common rounds are judged."""

LEAST_COMMON: Final = 15
"""Number of rounds that all ranks must have reported before one is judged."""

LEAST_SHARE: Final = 0.1
STANDARD_ERRORS: Final = 6.0
LEAST_ROUNDS: Final = 3
"""Number of rounds in which the excess must show: one pause is not enough."""

LEAST_EXCESS: Final = 0.0005
"""Seconds a round, below which the excess does not matter."""

_NORMAL: Final = 1.4826
"""Standard deviation of normal values, in median absolute deviations."""

SLOW_LINK: Final = 3.0
"""Multiple of the median round trip."""
SLOW_LINK_SECONDS: Final = 0.002
SLOW_RATE: Final = 4.0
"""Factor by which the links of the other ranks are faster than a full one."""

LEAST_SENDERS: Final = 3
RATE_SAMPLES: Final = 8
"""Number of samples of a link over which its rate is taken."""

LEAST_SAMPLE_SECONDS: Final = 0.5
"""Minimum seconds between two samples that both count: many observers may sample a job."""

_UNITS: Final = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0))

LEAST_FULL: Final = 2
"""Number of those samples in which a link was full, before it counts as full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that holds up the others by ``excess`` seconds a round, a ``share`` of the round, because of ``cause``."""

    rank: int
    cause: Cause
    excess: float
    share: float
    rounds: tuple[int, int]
    """The first and the last round that were judged."""

    def describe(self, host: str = "") -> str:
        """Describe it in a sentence."""
        where = f" on {host}" if host else ""
        return (
            f"rank {self.rank}{where} is slow: each of its rounds takes {self.excess * 1e3:.1f} ms ({self.share:.0%}) "
            f"more than those of the others, because of {_IN_WORDS[self.cause]}"
        )


_IN_WORDS: Final = {
    Cause.COMPUTE: "what it computes",
    Cause.INPUT: "its input",
    Cause.BLOCKED: "code that blocks its event loop",
    Cause.COLLECTION: "garbage collection",
    Cause.TAKEN: "other programs on its processor",
    Cause.LINK: "its link",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A link whose round trip takes ``seconds``, where ``usual`` is the median of the others."""

    ranks: tuple[int, int]
    seconds: float
    usual: float

    def describe(self) -> str:
        """Describe it in a sentence."""
        one, other = self.ranks
        return (
            f"the link between ranks {one} and {other} is slow: a round trip takes {self.seconds * 1e3:.1f} ms, over "
            f"the other links {self.usual * 1e3:.1f} ms"
        )


def find_straggler(rounds: Mapping[int, Sequence[Round]], *, window: int = WINDOW) -> Straggler | None:
    """Return the worst straggler in the last ``window`` rounds that all ranks have; None if there is none.

    At least ``LEAST_COMMON`` of them are needed.
    """
    if len(rounds) < 2:
        return None
    common = common_rounds(rounds)[-window:]
    if len(common) < min(window, LEAST_COMMON):
        return None
    by_number = {rank: {each.number: each for each in own} for rank, own in rounds.items()}
    own = {rank: [by_number[rank][number].own for number in common] for rank in by_number}
    length = fmean(median(by_number[rank][number].seconds for rank in by_number) for number in common)
    found = [straggler for rank in by_number if (straggler := _judge(rank, own, by_number, common, length)) is not None]
    return max(found, key=lambda straggler: straggler.excess, default=None)


def common_rounds(rounds: Mapping[int, Sequence[Round]]) -> list[int]:
    """Return the numbers of the rounds that all ranks have."""
    return sorted(set.intersection(*({each.number for each in own} for own in rounds.values()))) if rounds else []


def _judge(
    rank: int,
    own: Mapping[int, Sequence[float]],
    by_number: Mapping[int, Mapping[int, Round]],
    common: Sequence[int],
    length: float,
) -> Straggler | None:
    others = [other for other in own if other != rank]
    usual = [median(own[other][place] for other in others) for place in range(len(common))]
    excesses = [mine - theirs for mine, theirs in zip(own[rank], usual, strict=True)]
    excess = fmean(excesses)
    if excess < max(LEAST_EXCESS, LEAST_SHARE * length):
        return None
    if sum(each > LEAST_SHARE * length for each in excesses) < LEAST_ROUNDS:
        return None
    if excess <= STANDARD_ERRORS * _standard_error(excesses):
        return None
    mine = [by_number[rank][number] for number in common]
    theirs = [[by_number[other][number] for number in common] for other in others]
    return Straggler(
        rank=rank,
        cause=_cause(mine, theirs),
        excess=excess,
        share=excess / length if length else math.inf,
        rounds=(common[0], common[-1]),
    )


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, as if values were normal; a few outliers do not change it."""
    middle = median(values)
    return _NORMAL * median(abs(value - middle) for value in values) / math.sqrt(len(values))


def _cause(mine: Sequence[Round], theirs: Sequence[Sequence[Round]]) -> Cause:
    def mean_of(rounds: Sequence[Round], cause: Cause) -> float:
        return fmean(each.parts.get(cause, 0.0) for each in rounds)

    usual = {cause: median(mean_of(rounds, cause) for rounds in theirs) for cause in Cause}
    excess = {cause: mean_of(mine, cause) - usual[cause] for cause in Cause}
    if usual[Cause.BLOCKED] > 0.0:
        excess[Cause.COMPUTE] += excess.pop(Cause.BLOCKED)
    _move_waits(excess, mine, theirs, usual[Cause.TAKEN])
    return max(excess, key=lambda cause: excess[cause])


def _move_waits(
    excess: dict[Cause, float], mine: Sequence[Round], theirs: Sequence[Sequence[Round]], usual: float
) -> None:
    """Count waits for a processor that are due to a rank's additional work as that work.

    The others wait ``usual`` seconds for their own work.  The work is that of a cause that makes up half of it, else
    compute.
    """
    usual_ran = median(fmean(each.ran for each in rounds) for rounds in theirs)
    more = fmean(each.ran for each in mine) - usual_ran
    if more <= 0.0 or usual_ran <= 0.0 or excess[Cause.TAKEN] <= 0.0:
        return
    waits = min(excess[Cause.TAKEN], more * usual / usual_ran)
    causes = [cause for cause in excess if cause not in (Cause.TAKEN, Cause.COMPUTE) and excess[cause] > more / 2]
    work = max((Cause.COMPUTE, *causes), key=lambda cause: excess[cause])
    excess[Cause.TAKEN] -= waits
    excess[work] += waits


def find_slow_link(round_trips: Mapping[tuple[int, int], float]) -> SlowLink | None:
    """Return the slowest link if it is far slower than the others; ``round_trips`` are in seconds by pair of ranks."""
    if len(round_trips) < 3:
        return None
    ranks = max(round_trips, key=lambda pair: round_trips[pair])
    usual = median(seconds for pair, seconds in round_trips.items() if pair != ranks)
    seconds = round_trips[ranks]
    if seconds > SLOW_LINK * usual and seconds - usual > SLOW_LINK_SECONDS:
        return SlowLink(ranks=ranks, seconds=seconds, usual=usual)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSender:
    """A rank whose link is full at ``rate`` bytes/s, where ``usual`` is the median of the other ranks'."""

    rank: int
    rate: float
    usual: float

    def describe(self, host: str = "") -> str:
        """Describe it in a sentence."""
        where = f" on {host}" if host else ""
        return (
            f"rank {self.rank}{where} is slow: its link takes {_rate(self.rate)}, those of the other ranks at least "
            f"{_rate(self.usual)}"
        )


def _rate(rate: float) -> str:
    """Format a rate as ``2.4 MB/s``, ``1.31 GB/s``: at most three digits, without an exponent."""
    unit, size = next(((unit, size) for unit, size in _UNITS if rate >= 0.9995 * size), _UNITS[-1])
    return f"{rate / size:.3g} {unit}"


class LinkSample(NamedTuple):
    """A sample of a link, at ``time``: it had carried ``nbytes`` in ``busy`` seconds, and had more to carry if full."""

    time: float
    nbytes: int
    busy: float
    is_full: bool


class LinkRate(NamedTuple):
    """Bytes/s that a link carries while it has any to carry, which is a ``share`` of the time.

    ``is_full`` means that it accepts no more; otherwise it may be faster.
    """

    rate: float
    is_full: bool = False
    share: float = 0.0


def add_sample(samples: Sequence[LinkSample], sample: LinkSample) -> list[LinkSample]:
    """Return the last samples, including this one unless it comes too soon; those of another lane are dropped."""
    if samples and (sample.nbytes < samples[-1].nbytes or sample.busy < samples[-1].busy):
        samples = []
    if samples and sample.time - samples[-1].time < LEAST_SAMPLE_SECONDS:
        return list(samples)
    return [*samples, sample][-RATE_SAMPLES - 1 :]


def settle_rate(samples: Sequence[LinkSample]) -> LinkRate | None:
    """Return the rate of a link between the first and the last of ``samples``; None if it had nothing to carry.

    It is taken over all bytes and all of the time: the momentary rate of a link is far higher, or lower, where ranks
    share processors.  A link that is full most of the time is not full in every sample.
    """
    if len(samples) < 2 or samples[-1].busy <= samples[0].busy:
        return None
    first, last = samples[0], samples[-1]
    busy = last.busy - first.busy
    full = sum(sample.is_full for sample in samples[1:])
    return LinkRate(
        rate=(last.nbytes - first.nbytes) / busy,
        is_full=full >= min(LEAST_FULL, len(samples) - 1),
        share=min(1.0, busy / (last.time - first.time)),
    )


def find_slow_sender(rates: Mapping[int, LinkRate]) -> SlowSender | None:
    """Return the rank with the slowest link if it holds up the job; None if there is none.

    ``rates`` are those of the link over which each rank sends most.  The slow link is full, far slower than those of
    the others, and costs at least a tenth of the time, which the others' rate would save.
    """
    if len(rates) < LEAST_SENDERS:
        return None
    rank = min(rates, key=lambda each: rates[each])
    slow = rates[rank]
    usual = median(other.rate for each, other in rates.items() if each != rank)
    if not slow.is_full or slow.rate * SLOW_RATE >= usual or slow.share * (1 - slow.rate / usual) < LEAST_SHARE:
        return None
    return SlowSender(rank=rank, rate=slow.rate, usual=usual)
