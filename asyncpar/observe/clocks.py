"""Alignment of the clocks of ranks by the operations that they have in common.  Pure.

Theory of operation.  No rank ends a barrier before the last one has begun it, and no message arrives before it was
sent.  Each such pair of times bounds the offset between two clocks from one side; the bounds of all operations in the
rings leave an interval, whose width is the shortest recorded round trip.  The offset is its middle, and half its width
the uncertainty; with three or more clocks, an offset is the middle of the interval left by earlier ones.  Any offsets
within all bounds keep every effect after its cause, so no arrow of a trace points backwards, whichever of them are the
true ones.  Ranks of one host have one clock.  Where two hosts have nothing in common, the time of day decides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.observe.image import Event, RankImage

SYNCHRONIZING: Final = frozenset({"all_reduce", "all_reduce_many", "all_gather", "barrier", "all_to_all", "split"})
"""Operations that no rank ends before all have begun."""

_UNKNOWN: Final = 1.0
"""Seconds of uncertainty if only the time of day is known."""


class ClockOffset(NamedTuple):
    """Seconds to add to the times of a rank to get those of the reference, and the uncertainty."""

    seconds: float
    uncertainty: float


@dataclass(frozen=True, slots=True)
class ClockAlignment:
    """The ``offsets`` of all ranks' clocks from that of the lowest rank."""

    offsets: Mapping[int, ClockOffset]
    _clock_of: Mapping[int, int]
    _most: list[list[float]]

    def uncertainty(self, source: int, sink: int) -> float:
        """Return the seconds by which the interval from a time of ``source`` to one of ``sink`` may be overestimated.

        It is 0.0 if they have one clock.
        """
        clock, another = self._clock_of[source], self._clock_of[sink]
        if clock == another:
            return 0.0
        back = self._most[another][clock]
        width = self._most[clock][another] + back
        if math.isinf(width):
            return _UNKNOWN
        if width < 0.0:  # the clocks drift apart: no offset is within both bounds
            return -width / 2
        return self.offsets[sink].seconds - self.offsets[source].seconds + back


def align_clocks(images: Mapping[int, RankImage]) -> ClockAlignment:
    """Return, for each rank, the offset of its clock from that of the lowest rank."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(images):
        ranks_of[images[rank].identity.clock_domain or f"of rank {rank}"].append(rank)
    clocks = {domain: number for number, domain in enumerate(ranks_of)}
    clock_of = {rank: clocks[domain] for domain, ranks in ranks_of.items() for rank in ranks}
    most = _bounds(images, clock_of, len(clocks))
    walls = [images[ranks[0]].wall(0.0) for ranks in ranks_of.values()]
    offsets: list[ClockOffset] = []
    for clock in range(len(clocks)):
        offsets.append(_choose(clock, offsets, most, walls[clock] - walls[0]))
    return ClockAlignment({rank: offsets[clock] for rank, clock in clock_of.items()}, clock_of, most)


def _choose(clock: int, chosen: list[ClockOffset], most: list[list[float]], by_wall: float) -> ClockOffset:
    """Return an offset of ``clock`` that is consistent with those ``chosen`` for the clocks before it."""
    if not chosen:
        return ClockOffset(0.0, 0.0)
    high = min(known.seconds + most[other][clock] for other, known in enumerate(chosen))
    low = max(known.seconds - most[clock][other] for other, known in enumerate(chosen))
    seconds = min(max(by_wall, low), high) if math.isinf(high - low) else (low + high) / 2
    off = max(abs(most[0][clock] - seconds), abs(most[clock][0] + seconds))
    return ClockOffset(seconds, _UNKNOWN if math.isinf(off) else off)


def _bounds(images: Mapping[int, RankImage], clock_of: Mapping[int, int], clocks: int) -> list[list[float]]:
    """Return the maximum by which the offset of one clock (second index) may exceed that of another (first)."""
    most = [[0.0 if one == other else math.inf for other in range(clocks)] for one in range(clocks)]
    for cause_rank, cause, effect_rank, effect in _causes(images):
        one, other = clock_of[effect_rank], clock_of[cause_rank]
        if one != other:
            most[one][other] = min(most[one][other], effect - cause)
    for through in range(clocks):
        for one in range(clocks):
            for other in range(clocks):
                most[one][other] = min(most[one][other], most[one][through] + most[through][other])
    return most


def _causes(images: Mapping[int, RankImage]) -> Iterator[tuple[int, float, int, float]]:
    """Yield causes and effects on different ranks: the ranks, and the times by their own clocks."""
    places: dict[tuple[int, int], list[tuple[int, Event]]] = defaultdict(list)
    for rank, image in images.items():
        for event in image.events:
            if event.state is EventState.COMPLETED and event.group:
                places[event.group, event.sequence].append((rank, event))
    for place in places.values():
        for rank, event in place:
            for other_rank, other in place:
                if rank != other_rank and other.ended is not None and _precedes(event, other):
                    is_call = event.kind is EventKind.ASK  # it begins before its endpoint does
                    yield rank, event.created, other_rank, other.created if is_call else other.ended


def _precedes(cause: Event, effect: Event) -> bool:
    """Return whether ``cause`` must have begun before ``effect`` has ended."""
    kinds = (cause.kind, effect.kind)
    if kinds == (EventKind.COLLECTIVE, EventKind.COLLECTIVE):
        return cause.name == effect.name and cause.name in SYNCHRONIZING
    return kinds in (
        (EventKind.SEND, EventKind.RECEIVE),
        (EventKind.ASK, EventKind.HANDLE),
        (EventKind.HANDLE, EventKind.ASK),
    )
