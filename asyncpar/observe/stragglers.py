"""Ranks that are slower than the others, and why; links that are slower than the others.  Pure.

Theory of operation.  In each round (see ``rounds.py``) the *excess* of a rank is its own time less the median of the
others'.  A rank is a straggler if the mean of its excess over ``WINDOW`` rounds is above a tenth of a round, above six
standard errors of that mean (from the median absolute deviation, which single pauses do not change), and not the work
of one round alone.  The cause is the part of its own time in which it differs most.  Blocking the event loop is a cause
only where the others do not: in programs that compute on the loop all do, and the difference is compute.  Where ranks
share processors, one that computes more waits longer for them: what others wait for as much work counts as that work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, NamedTuple

from asyncpar.observe.rounds import Cause, Round

WINDOW: Final = 20
TOLD_ROUNDS: Final = WINDOW + 4
"""Rounds that a rank tells of: ranks are not looked at in the same moment, and rounds that all have are judged."""

LEAST_COMMON: Final = 15
"""Rounds that all ranks must have told of before one is judged."""

LEAST_SHARE: Final = 0.1
STANDARD_ERRORS: Final = 6.0
LEAST_ROUNDS: Final = 3
"""Rounds in which the excess must show: one pause is no habit."""

LEAST_EXCESS: Final = 0.0005
"""Seconds a round, below which nobody cares."""

_NORMAL: Final = 1.4826
"""Standard deviations in a median absolute deviation of normal values."""

SLOW_LINK: Final = 3.0
"""Times the median round trip."""
SLOW_LINK_SECONDS: Final = 0.002
SLOW_RATE: Final = 4.0
"""Times that the links of the other ranks are faster than one that takes no more."""

LEAST_SENDERS: Final = 3
RATE_LOOKS: Final = 8
"""Looks at a link between which its rate is taken."""

LEAST_LOOK_SECONDS: Final = 0.5
"""Seconds between two looks that both count: a job may be looked at by many."""

_UNITS: Final = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0))

LEAST_FULL: Final = 2
"""Looks of those in which a link took no more, before it counts as one that does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that holds up the others by ``excess`` seconds a round, a ``share`` of the round; ``cause`` is why."""

    rank: int
    cause: Cause
    excess: float
    share: float
    rounds: tuple[int, int]
    """The first and the last round that were looked at."""

    def describe(self, host: str = "") -> str:
        """Return a sentence."""
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
        """Return a sentence."""
        one, other = self.ranks
        return (
            f"the link between ranks {one} and {other} is slow: a round trip takes {self.seconds * 1e3:.1f} ms, over "
            f"the other links {self.usual * 1e3:.1f} ms"
        )


def find_straggler(rounds: Mapping[int, Sequence[Round]], *, window: int = WINDOW) -> Straggler | None:
    """Return the worst straggler in the last ``window`` rounds that all ranks have; None if there is none.

    It takes ``LEAST_COMMON`` of them.
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
    """Return that of the mean, as if values were normal; few outliers do not change it."""
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
    """Count waits for a processor that a rank has because it has more to do than the others as that work.

    The others wait ``usual`` seconds for what they do.  The work is that of a cause that is half of it, else compute.
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
    """Return the slowest link if it is far slower than the others; ``round_trips`` are seconds by pair of ranks."""
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
    """A rank whose link takes ``rate`` bytes/s and no more, where ``usual`` is the median of the other ranks'."""

    rank: int
    rate: float
    usual: float

    def describe(self, host: str = "") -> str:
        """Return a sentence."""
        where = f" on {host}" if host else ""
        return (
            f"rank {self.rank}{where} is slow: its link takes {_rate(self.rate)}, those of the other ranks at least "
            f"{_rate(self.usual)}"
        )


def _rate(rate: float) -> str:
    """Return ``2.4 MB/s``, ``1.31 GB/s``: three digits at most, without an exponent."""
    unit, size = next(((unit, size) for unit, size in _UNITS if rate >= 0.9995 * size), _UNITS[-1])
    return f"{rate / size:.3g} {unit}"


class LinkLook(NamedTuple):
    """A look at a link, at ``time``: it had carried ``nbytes`` in ``busy`` seconds, and had more to carry if full."""

    time: float
    nbytes: int
    busy: float
    is_full: bool


class LinkRate(NamedTuple):
    """Bytes/s that a link carries while it has to carry any, which is a ``share`` of the time.

    ``is_full``: it takes no more, else it may be faster.
    """

    rate: float
    is_full: bool = False
    share: float = 0.0


def add_look(looks: Sequence[LinkLook], look: LinkLook) -> list[LinkLook]:
    """Return the last looks, this one among them unless it comes too soon; those at another lane are dropped."""
    if looks and (look.nbytes < looks[-1].nbytes or look.busy < looks[-1].busy):
        looks = []
    if looks and look.time - looks[-1].time < LEAST_LOOK_SECONDS:
        return list(looks)
    return [*looks, look][-RATE_LOOKS - 1 :]


def settle_rate(looks: Sequence[LinkLook]) -> LinkRate | None:
    """Return the rate of a link between the first and the last of ``looks``; None if it had nothing to carry.

    It is that of all bytes in all that time: what a link takes in single moments is far more, or less, where ranks
    share processors.  A link that is full for most of the time is not so in each look.
    """
    if len(looks) < 2 or looks[-1].busy <= looks[0].busy:
        return None
    first, last = looks[0], looks[-1]
    busy = last.busy - first.busy
    full = sum(look.is_full for look in looks[1:])
    return LinkRate(
        rate=(last.nbytes - first.nbytes) / busy,
        is_full=full >= min(LEAST_FULL, len(looks) - 1),
        share=min(1.0, busy / (last.time - first.time)),
    )


def find_slow_sender(rates: Mapping[int, LinkRate]) -> SlowSender | None:
    """Return the rank with the slowest link if it holds up the job; None if there is none.

    ``rates`` are those of the link over which each rank sends most.  The slow one is full, far slower than those of the
    others, and so costs a tenth of the time and more: with the others' rate that would be free.
    """
    if len(rates) < LEAST_SENDERS:
        return None
    rank = min(rates, key=lambda each: rates[each])
    slow = rates[rank]
    usual = median(other.rate for each, other in rates.items() if each != rank)
    if not slow.is_full or slow.rate * SLOW_RATE >= usual or slow.share * (1 - slow.rate / usual) < LEAST_SHARE:
        return None
    return SlowSender(rank=rank, rate=slow.rate, usual=usual)
