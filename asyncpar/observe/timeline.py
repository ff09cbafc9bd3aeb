"""One timeline of all ranks: slices in tracks, on one clock, and arrows from sends to receives.  Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from asyncpar.core.observe.records import UNBOUND, EventKind, EventState
from asyncpar.observe.clocks import ClockAlignment, ClockOffset, align_clocks
from asyncpar.observe.image import Event, RankImage

TRACKS: Final = {
    EventKind.STEP: "steps",
    EventKind.SPAN: "program",
    EventKind.COLLECTIVE: "collectives",
    EventKind.SEND: "messages",
    EventKind.RECEIVE: "messages",
    EventKind.BUCKET: "gradients",
    EventKind.PIPELINE: "pipeline",
    EventKind.ASK: "calls",
    EventKind.HANDLE: "actors",
    EventKind.CHECKPOINT: "checkpoint",
    EventKind.WORLD: "world",
    EventKind.BLOCKED: "blocked loop",
}
"""The track of each kind of event, in display order."""

_ROUNDING: Final = 1e-6
"""Seconds by which an arrow may be shorter than its clocks are certain: the shortest are exactly that long."""

_ARROWS: Final = ((EventKind.SEND, EventKind.RECEIVE), (EventKind.ASK, EventKind.HANDLE))


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSlice:
    """A stretch of a rank's time, in seconds of the timeline's clock; slices of one ``lane`` of a track nest.

    ``ended`` is the last time at which it was seen if it ``is_open``.
    """

    rank: int
    track: str
    lane: int
    name: str
    begun: float
    ended: float
    is_open: bool
    event: Event

    @property
    def facts(self) -> dict[str, str | int]:
        """Further facts about it, by name."""
        event, is_bucket = self.event, self.event.kind is EventKind.BUCKET
        facts: dict[str, str | int | None] = {
            "call": None if is_bucket else event.text or None,
            "codec" if is_bucket else "algorithm": event.algorithm or None,
            "bytes": event.nbytes or None,
            "own time": f"{event.own * 1e3:.1f} ms" if event.own else None,
            "peer": event.peer,
            "at": None if event.site is None else str(event.site),
            "state": None if event.state is EventState.COMPLETED else event.state.name.lower(),
        }
        return {name: fact for name, fact in facts.items() if fact is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A message or a call: from the begin of ``source`` to the end of ``sink``, or to its begin for a call."""

    number: int
    source: EventSlice
    sink: EventSlice

    @property
    def begun(self) -> float:
        return self.source.begun

    @property
    def ended(self) -> float:
        return self.sink.begun if self.sink.event.kind is EventKind.HANDLE else self.sink.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All slices in the order of their begins, and the arrows.

    ``left_out`` arrows are missing: as far as the clocks of their ranks are known, they may point backwards.  Times are
    by the clock of the lowest rank; ``offsets`` are the seconds added to those of the others.
    """

    slices: tuple[EventSlice, ...]
    arrows: tuple[Arrow, ...]
    ranks: Mapping[int, str]
    offsets: Mapping[int, ClockOffset]
    left_out: int = 0


def merge_images(older: RankImage | None, newer: RankImage) -> RankImage:
    """Return the events of both images of a rank; if both have one, the newer image's.

    Events that neither has, because others took their places meanwhile, are counted as ``lost``.
    """
    if older is None or older.identity.generation != newer.identity.generation:
        return newer
    events = {event.ticket: event for event in (*older.events, *newer.events)}
    ordered = tuple(events[ticket] for ticket in sorted(events))
    return replace(newer, events=ordered, groups=older.groups | newer.groups, lost=older.lost + _lost(older, newer))


def _lost(older: RankImage, newer: RankImage) -> int:
    """Return the number of events that began after ``older`` and were overwritten before ``newer``."""
    if not older.events or not newer.events:
        return 0
    capacity = newer.capacity
    missed = range(older.events[-1].ticket + 1, newer.events[-1].ticket + 1 - capacity)
    lost = len(missed)
    for event in newer.events:
        if event.ticket >= missed.stop:
            break
        laps = max(0, -(-(missed.start - event.ticket) // capacity))  # it was pending, and its place was skipped
        lost -= len(range(event.ticket + laps * capacity, missed.stop, capacity))
    return lost


def make_timeline(images: Mapping[int, RankImage]) -> Timeline:
    """Put the images of all ranks on one clock."""
    clocks = align_clocks(images)
    slices: list[EventSlice] = []
    for rank, image in images.items():
        slices += _slices(rank, image, clocks.offsets[rank].seconds)
    slices.sort(key=lambda slice_: (slice_.begun, -slice_.ended, slice_.rank))
    arrows, left_out = _arrows(slices, clocks)
    names = {
        rank: f"rank {rank}" + (f" ({image.identity.host})" if image.identity.host else "")
        for rank, image in images.items()
    }
    return Timeline(slices=tuple(slices), arrows=tuple(arrows), ranks=names, offsets=clocks.offsets, left_out=left_out)


def cut_timeline(timeline: Timeline, begun: float, ended: float) -> Timeline:
    """Return the timeline from ``begun`` to ``ended`` by its own clock; slices that reach beyond are cut there.

    An open slice goes on to ``ended``, as does one that ended later, which is then open.  Arrows stay if both ends do.
    """
    kept: dict[int, EventSlice] = {}
    for slice_ in timeline.slices:
        is_open = slice_.is_open or slice_.ended > ended
        if slice_.begun <= ended and (is_open or slice_.ended >= begun):
            last = ended if is_open else slice_.ended
            kept[id(slice_)] = replace(slice_, begun=max(slice_.begun, begun), ended=last, is_open=is_open)
    arrows = [
        replace(arrow, source=kept[id(arrow.source)], sink=kept[id(arrow.sink)])
        for arrow in timeline.arrows
        if id(arrow.source) in kept and id(arrow.sink) in kept and arrow.ended <= ended
    ]
    slices = sorted(kept.values(), key=lambda slice_: (slice_.begun, -slice_.ended, slice_.rank))
    return replace(timeline, slices=tuple(slices), arrows=tuple(arrows))


def _slices(rank: int, image: RankImage, offset: float) -> Iterable[EventSlice]:
    lanes: dict[str, list[list[float]]] = defaultdict(list)
    for event in sorted(image.events, key=lambda event: (event.created, -(event.ended or image.last_at))):
        ended = max(event.created, image.last_at) if event.ended is None else event.ended
        track = TRACKS[event.kind]
        yield EventSlice(
            rank=rank,
            track=track,
            lane=_lane(lanes[track], event.created, ended),
            name=event.label,
            begun=event.created + offset,
            ended=ended + offset,
            is_open=event.ended is None,
            event=event,
        )


def _lane(lanes: list[list[float]], begun: float, ended: float) -> int:
    """Return the first lane in which a slice is within another, or after all; each has the ends of its open slices."""
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= begun:
            ends.pop()
        if not ends or ended <= ends[-1]:
            ends.append(ended)
            return number
    lanes.append([ended])
    return len(lanes) - 1


def _arrows(slices: Iterable[EventSlice], clocks: ClockAlignment) -> tuple[list[Arrow], int]:
    """Return the arrows that point forwards as far as the clocks are known, and the number of others."""
    ends: dict[tuple[EventKind, int, int], EventSlice] = {}
    for found in slices:
        if found.event.group and found.event.sequence != UNBOUND:
            ends[found.event.kind, found.event.group, found.event.sequence] = found
    arrows: list[Arrow] = []
    left_out = 0
    for (kind, group, sequence), source in ends.items():
        sink = next((ends.get((into, group, sequence)) for out, into in _ARROWS if out is kind), None)
        if sink is None or (sink.is_open and sink.event.kind is not EventKind.HANDLE):
            continue
        arrow = Arrow(number=len(arrows) + 1, source=source, sink=sink)
        least = max(0.0, clocks.uncertainty(source.rank, sink.rank) - _ROUNDING)
        if arrow.ended - arrow.begun < least:
            left_out += 1
        else:
            arrows.append(arrow)
    return arrows, left_out


def print_timeline(timeline: Timeline, *, decimals: int = 3) -> str:
    """Format the timeline as text, a line for each slice in the order of their begins: times, rank, name, outcome.

    In virtual time it is the same in every run.
    """
    start = min((one.begun for one in timeline.slices), default=0.0)
    lines = []
    for one in sorted(timeline.slices, key=lambda one: (one.begun, one.rank, one.event.ticket)):
        end = "..." if one.is_open else f"{one.ended - start:.{decimals}f}"
        about = ", ".join(f"{name} {fact}" for name, fact in one.facts.items() if name in ("bytes", "state"))
        lines.append(
            f"{one.begun - start:.{decimals}f}-{end}  rank {one.rank}  {one.name}" + (f"  ({about})" if about else "")
        )
    return "\n".join(lines)
