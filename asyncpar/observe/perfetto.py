"""Encoders of a timeline: Perfetto's own format (protobuf), and Chrome's JSON.  Pure.

Only the few fields that are needed are encoded, by hand.  A trace is a sequence of packets in time order: a truncated
file has everything before the cut.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from asyncpar.observe.timeline import TRACKS, EventSlice, Timeline

_PACKET, _TIMESTAMP, _SEQUENCE, _EVENT, _DESCRIPTOR = 1, 8, 10, 11, 60
_UUID, _NAME, _PROCESS, _THREAD, _PARENT = 1, 2, 3, 4, 5
_EVENT_TYPE, _EVENT_TRACK, _EVENT_NAME, _CATEGORY, _ANNOTATION, _FLOW, _FLOW_END = 9, 11, 23, 22, 4, 47, 48
_BEGIN, _END, _INSTANT = 1, 2, 3
_LANES: Final = 1024
_THREADS: Final = 16 * _LANES
_ORDER: Final = {track: number for number, track in enumerate(dict.fromkeys(TRACKS.values()))}


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode("utf-8", "replace"))


def _fixed64(field: int, number: int) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<Q", number)


def encode_perfetto(timeline: Timeline) -> bytes:
    """Encode the timeline as a Perfetto trace; times are in nanoseconds from its begin."""
    return b"".join(_bytes(_PACKET, packet) for packet in _packets(timeline))


def _packets(timeline: Timeline) -> Iterator[bytes]:
    for rank, name in sorted(timeline.ranks.items()):
        process = _number(1, rank + 1) + _text(6, _process_name(timeline, rank, name))
        yield _descriptor(_number(_UUID, _process(rank)) + _bytes(_PROCESS, process))
    for rank, track, lane in sorted({(one.rank, one.track, one.lane) for one in timeline.slices}, key=_place):
        name = track if not lane else f"{track} {lane + 1}"
        thread = _number(1, rank + 1) + _number(2, _thread_id(rank, track, lane)) + _text(5, name)
        yield _descriptor(
            _number(_UUID, _thread(rank, track, lane)) + _number(_PARENT, _process(rank)) + _bytes(_THREAD, thread)
        )
    for _, _, packet in sorted(_events(timeline), key=lambda event: event[:2]):
        yield packet


def _events(timeline: Timeline) -> Iterator[tuple[int, bool, bytes]]:
    """Yield the packets of slices and arrows with their times; those at the end of an arrow come after its begin."""
    start = min((one.begun for one in timeline.slices), default=0.0)
    for one in timeline.slices:
        where = _number(_EVENT_TRACK, _thread(one.rank, one.track, one.lane))
        notes = b"".join(_annotation(name, fact) for name, fact in one.facts.items())
        about = _text(_CATEGORY, one.track) + _text(_EVENT_NAME, one.name) + notes
        yield _event(one.begun - start, _number(_EVENT_TYPE, _BEGIN) + where + about)
        if not one.is_open:
            yield _event(one.ended - start, _number(_EVENT_TYPE, _END) + where)
    for arrow in timeline.arrows:
        for one, at, field in ((arrow.source, arrow.begun, _FLOW), (arrow.sink, arrow.ended, _FLOW_END)):
            where = _number(_EVENT_TRACK, _thread(one.rank, one.track, one.lane))
            mark = _number(_EVENT_TYPE, _INSTANT) + where + _text(_EVENT_NAME, "message")
            yield _event(at - start, mark + _fixed64(field, arrow.number), is_last=field == _FLOW_END)


def _process_name(timeline: Timeline, rank: int, name: str) -> str:
    """Return the name of a rank, with the uncertainty of its clock."""
    offset = timeline.offsets[rank]
    return f"{name}, clock +-{1e6 * offset.uncertainty:.0f} us" if offset.uncertainty else name


def _place(where: tuple[int, str, int]) -> tuple[int, int, int]:
    rank, track, lane = where
    return rank, _ORDER[track], lane


def _process(rank: int) -> int:
    return (rank + 1) << 32


def _thread(rank: int, track: str, lane: int) -> int:
    return _process(rank) + _thread_id(rank, track, lane)


def _thread_id(rank: int, track: str, lane: int) -> int:
    return (rank + 1) * _THREADS + _ORDER[track] * _LANES + min(lane, _LANES - 1)


def _descriptor(content: bytes) -> bytes:
    return _number(_SEQUENCE, 1) + _bytes(_DESCRIPTOR, content)


def _event(seconds: float, content: bytes, *, is_last: bool = False) -> tuple[int, bool, bytes]:
    at = max(0, round(1e9 * seconds))
    return at, is_last, _number(_TIMESTAMP, at) + _number(_SEQUENCE, 1) + _bytes(_EVENT, content)


def _annotation(name: str, fact: str | int) -> bytes:
    value = _number(4, fact) if isinstance(fact, int) else _text(6, fact)
    return _bytes(_ANNOTATION, _text(10, name) + value)


def encode_chrome(timeline: Timeline) -> bytes:
    """Encode the timeline as Chrome's JSON, which Perfetto and other viewers read; times are in microseconds."""
    start = min((one.begun for one in timeline.slices), default=0.0)
    events: list[dict[str, Any]] = [*_names(timeline), *(_complete(one, start) for one in timeline.slices)]
    for arrow in timeline.arrows:
        common = {"cat": "message", "name": "message", "id": arrow.number}
        for phase, one, at in (("s", arrow.source, arrow.begun), ("f", arrow.sink, arrow.ended)):
            where = {"pid": one.rank, "tid": _thread_id(one.rank, one.track, one.lane)}
            events.append({"ph": phase, "bp": "e", "ts": 1e6 * (at - start), **common, **where})
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _complete(one: EventSlice, start: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": one.rank,
        "tid": _thread_id(one.rank, one.track, one.lane),
        "name": one.name,
        "cat": one.track,
        "ts": 1e6 * (one.begun - start),
        "dur": 1e6 * (one.ended - one.begun),
        "args": one.facts,
    }


def _names(timeline: Timeline) -> Iterable[dict[str, Any]]:
    for rank, name in sorted(timeline.ranks.items()):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": _process_name(timeline, rank, name)}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for rank, track, lane in sorted({(one.rank, one.track, one.lane) for one in timeline.slices}, key=_place):
        tid = _thread_id(rank, track, lane)
        name = track if not lane else f"{track} {lane + 1}"
        yield {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}}
