"""Dumps of operations in the format of torch's flight recorder (2.10), from the images of all ranks.  Pure.

Torch's analyzer (``torchfrtrace``) matches entries of one group by their sequence, and treats entries that it does not
find as missing.  So a dump is made for all ranks at once: operations that some rank of the group has overwritten are
left out, record numbers begin with 0 on all ranks, messages of each direction between two ranks are a group of their
own, as are operations that are matched by name, and whatever the format cannot express (roots, reductions) is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

from asyncpar.core.observe.records import UNBOUND, EventKind, EventState
from asyncpar.observe.clocks import align_clocks
from asyncpar.observe.image import Event, RankImage

VERSION: Final = "2.10"

_NAMES: Final = {
    "all_reduce_many": "allreduce_coalesced",
    "broadcast_object": "broadcast",
    "all_gather_object": "all_gather_v",
    "gather_object": "gather",
    "scatter_object": "scatter",
    "numbers": "barrier",
    "nothing": "barrier",
    "calibrate": "barrier",
    "all_to_all_v": "all_to_all",
}
_KNOWN: Final = frozenset(
    {
        *("all_reduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_v", "broadcast", "gather"),
        *("all_gather", "all_gather_v", "scatter", "all_to_all", "barrier", "split"),
    }
)
"""Names that the analyzer accepts; every other operation is shown as a barrier."""

_DTYPES: Final = {
    "float16": "Half",
    "float32": "Float",
    "float64": "Double",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
_STATES: Final = {EventState.CALLED: "scheduled", EventState.STARTED: "started"}
Sizes = list[list[int]]


class _DumpPlace(NamedTuple):
    """The place of an operation in a group of the dump."""

    group: str
    ranks: tuple[int, ...]
    description: str
    sequence: int


def torch_dumps(images: Mapping[int, RankImage]) -> dict[int, dict[str, Any]]:
    """Return, for each rank, the equivalent of torch's flight recorder dump, to be pickled as ``<prefix><rank>``."""
    offsets = align_clocks(images).offsets
    entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in images}
    groups: dict[int, dict[str, dict[str, str]]] = {rank: {} for rank in images}
    for place, calls in _places(images):
        states = {_STATES.get(event.state, "completed") for event in calls.values()}
        shared = None if len(states) == 1 or set(place.ranks) - set(calls) else "started"
        for rank, event in calls.items():
            ranks = str(list(place.ranks))
            groups[rank][place.group] = {"name": place.group, "desc": place.description, "ranks": ranks}
            wall = images[min(images)].wall(0.0) + offsets[rank].seconds
            entries[rank].append(_entry(place, rank, event, wall, shared))
    return {rank: _dump(groups[rank], sorted(entries[rank], key=_created)) for rank in images}


def _created(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["time_created_ns"], entry["collective_seq_id"]


def _dump(groups: dict[str, dict[str, str]], entries: list[dict[str, Any]]) -> dict[str, Any]:
    last: dict[str, dict[str, int]] = {name: dict.fromkeys(_STATUS, -1) for name in groups}
    ids = {name: number for number, name in enumerate(sorted(groups))}
    for number, entry in enumerate(entries):
        name = entry["process_group"][0]
        entry |= {"record_id": number, "op_id": number + 1, "pg_id": ids[name]}
        for status, is_so in zip(_STATUS, (True, entry["state"] != "scheduled", entry["retired"]), strict=True):
            if is_so:
                last[name][status] = max(last[name][status], entry["collective_seq_id"])
    return {
        "version": VERSION,
        "comm_lib_version": "asyncpar",
        "pg_config": groups,
        "pg_status": {str(ids[name]): status for name, status in last.items()},
        "entries": entries,
    }


_STATUS: Final = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")


# -- operations at one place ----------------------------------------------------------------------------------------


def _places(images: Mapping[int, RankImage]) -> Iterable[tuple[_DumpPlace, dict[int, Event]]]:
    """Yield each operation that no rank has overwritten: its place, and the event of each rank that has called it."""
    calls: dict[int, dict[int, dict[int, Event]]] = defaultdict(lambda: defaultdict(dict))
    for rank, image in images.items():
        for event in image.operations:
            if event.group in image.groups:
                calls[event.group][event.sequence][rank] = event
    for group, places in calls.items():
        identity = next(image.groups[group] for image in images.values() if group in image.groups)
        if identity.parent is not None:
            yield from _messages(identity.ranks, identity.name, places)
            continue
        plain = {sequence: found for sequence, found in places.items() if not _any(found).is_keyed}
        keyed = [found for _, found in sorted(places.items()) if _any(found).is_keyed]
        since = _kept_by_all(identity.ranks, images, plain)
        name = f"{identity.name} {group:x}"
        for sequence, found in sorted(plain.items()):
            if sequence >= since:
                yield _DumpPlace(name, identity.ranks, identity.name, sequence), found
        complete = [found for found in keyed if set(found) == set(identity.ranks) & set(images)]
        for number, found in enumerate(complete, 1):
            yield _DumpPlace(f"{name} by name", identity.ranks, f"{identity.name} by name", number), found


def _any(found: Mapping[int, Event]) -> Event:
    return next(iter(found.values()))


def _kept_by_all(
    ranks: Sequence[int], images: Mapping[int, RankImage], places: Mapping[int, Mapping[int, Event]]
) -> int:
    """Return the first sequence number from which on no rank has overwritten an operation of the group."""
    first = dict.fromkeys(ranks, 0)
    for rank in ranks:
        if rank in images and images[rank].overwritten:
            kept = [sequence for sequence, found in places.items() if rank in found and found[rank].is_over]
            first[rank] = min(kept, default=max(places, default=0))
    return max(first.values(), default=0)


def _messages(
    ranks: tuple[int, ...], name: str, places: Mapping[int, dict[int, Event]]
) -> Iterable[tuple[_DumpPlace, dict[int, Event]]]:
    """Yield messages of one direction that both ranks have, and those in flight."""
    source, sink = ranks
    waiting = places.get(UNBOUND, {})
    whole = [found for number, found in sorted(places.items()) if number != UNBOUND]
    shown = [found for found in whole if len(found) == 2 or not _any(found).is_over]
    if waiting:
        shown.append(waiting)
    pair = (min(ranks), max(ranks))
    for number, found in enumerate(shown, 1):
        yield _DumpPlace(f"{source}->{sink} {name}", pair, f"messages {source}->{sink} {name}", number), found


# -- entries ----------------------------------------------------------------------------------------------------------


def _entry(place: _DumpPlace, rank: int, event: Event, wall: float, shared: str | None) -> dict[str, Any]:
    state = shared or _STATES.get(event.state, "completed")
    is_message = event.kind is not EventKind.COLLECTIVE
    name, ins, outs, dtypes = _message(place, event) if is_message else _collective(event, len(place.ranks))
    created = round(1e9 * (event.created + wall))
    ended = None if event.ended is None or state != "completed" else round(1e9 * (event.ended + wall))
    return {
        "process_group": (place.group, place.description),
        "collective_seq_id": place.sequence,
        "p2p_seq_id": place.sequence if is_message else 0,
        "profiling_name": f"gloo:{name}",
        "time_created_ns": created,
        "time_discovered_started_ns": None if state == "scheduled" else created,
        "time_discovered_completed_ns": ended,
        "duration_ms": None if ended is None else (ended - created) / 1e6,
        "input_sizes": ins,
        "input_dtypes": dtypes,
        "output_sizes": outs,
        "output_dtypes": dtypes,
        "state": state,
        "retired": state == "completed",
        "timeout_ms": 0,
        "is_p2p": is_message,
        "thread_id": str(rank),
        "thread_name": "asyncpar",
        "frames": _frames(event),
    }


def _frames(event: Event) -> list[dict[str, str | int]]:
    site = event.site
    return [] if site is None else [{"name": site.function, "filename": site.file, "line": site.line}]


def _message(place: _DumpPlace, event: Event) -> tuple[str, Sizes, Sizes, list[str]]:
    sizes = [[event.nbytes]]
    source, _, sink = place.group.partition(" ")[0].partition("->")
    one, other = place.ranks.index(int(source)), place.ranks.index(int(sink))
    name = f"send {one}->{other}" if event.kind is EventKind.SEND else f"recv {other}<-{one}"
    return name, sizes, sizes, ["Byte"]


def _collective(event: Event, size: int) -> tuple[str, Sizes, Sizes, list[str]]:
    """Return name, sizes of input and output, and dtypes in torch's form."""
    name = _NAMES.get(event.name, event.name)
    if name not in _KNOWN:
        name = "barrier"
    arrays = event.arrays
    dtypes = [_DTYPES.get(dtype, dtype) for dtype, _ in arrays] or ["Float"]
    shapes = [list(shape) or [1] for _, shape in arrays]
    if not shapes or any(-1 in shape for shape in shapes):  # a length that ranks need not share
        shapes = [[1]] * len(dtypes)
    ins, outs = shapes, shapes
    if name in ("all_gather", "gather"):
        outs = [[size, *shape] for shape in shapes]
    if name == "reduce_scatter":
        rows = shapes[0][0]
        if rows % size or not prod(shapes[0]):
            name = "reduce_scatter_v"
        outs = [[-(-rows // size), *shapes[0][1:]]]
    return name, ins, outs, dtypes
