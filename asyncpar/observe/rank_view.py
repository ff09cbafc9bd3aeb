"""Answers of this rank to observers: its summary and its stacks, made in the observer's thread.

State that belongs to the event loop is only read.  Reading a dictionary that changes meanwhile is repeated.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.collectives.ledger import world_number
from asyncpar.collectives.operation import Group, Operation
from asyncpar.collectives.shared_memory.group import ArenaHost
from asyncpar.collectives.table import OperationTable
from asyncpar.core.observe.pauses import PauseRecorder
from asyncpar.core.observe.recorder import NO_TICKET, current_recorder
from asyncpar.core.observe.reported import reported
from asyncpar.core.observe.whereabouts import describe_program, place_of, user_place
from asyncpar.net.transport.link import Link
from asyncpar.net.transport.links import Links
from asyncpar.observe.actor_view import view_actors
from asyncpar.observe.durations import OperationTimes
from asyncpar.observe.figures import Predict, figures_of
from asyncpar.observe.image import Event, read_image
from asyncpar.observe.pipeline_runs import PipelineSummary, summarize_pipeline
from asyncpar.observe.rounds import Round, join_rounds, rounds_of
from asyncpar.observe.service import provide
from asyncpar.observe.stack_views import ProcessStacks
from asyncpar.observe.stacks import capture_tasks, capture_threads
from asyncpar.observe.stragglers import REPORTED_ROUNDS, LinkRate, LinkSample, add_sample, settle_rate
from asyncpar.observe.summary import (
    MOST_LINKS,
    MOST_OPERATIONS,
    BlockedSummary,
    GradientSummary,
    LinkSummary,
    OperationSummary,
    ProgressSummary,
    RankSummary,
    RoundSummary,
    pack,
)

BLOCKED_SECONDS: Final = 0.5
"""Seconds without an answer after which a loop counts as blocked in a summary."""

_LATEST: Final = 128
"""Number of events that are inspected, and of steps and pauses besides: enough for the reported rounds."""

_NOTE_BYTES: Final = 4088
_PAGE: Final = mmap.PAGESIZE
_TRIES: Final = 5

Part = Callable[[], Mapping[str, Any]]
_parts: list[Part] = []


def add_summary_part(part: Part) -> Callable[[], None]:
    """Let ``part`` set fields of each summary (``values``, ``progress``); return a callback that ends this."""
    _parts.append(part)
    return lambda: _parts.remove(part)


@dataclass
class _LoopPulse:
    """Measures the time that the event loop of a node takes to answer."""

    loop: asyncio.AbstractEventLoop
    thread: int
    asked_at: float | None = None
    lag: float = 0.0

    def measure(self) -> float:
        """Return the lag as far as it is known, and ask again."""
        now = time.monotonic()
        if self.asked_at is not None:
            self.lag = now - self.asked_at
            return self.lag
        lag, self.asked_at = self.lag, now
        self.lag = 0.0
        try:
            if not self.loop.is_running():
                raise RuntimeError
            self.loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # it is closed, or its thread runs it only on demand
            self.asked_at = None
        return lag

    def _answer(self) -> None:
        if self.asked_at is not None:
            self.lag, self.asked_at = time.monotonic() - self.asked_at, None


@dataclass
class NodeParts:
    """The observed parts of a node of this process."""

    links: Links
    actors: ActorSystem
    arena: ArenaHost | None
    loop: asyncio.AbstractEventLoop
    predict: Predict | None = None
    rounds: list[Round] = field(default_factory=list)
    """The last rounds, of this inspection and earlier ones."""
    samples: dict[int, list[LinkSample]] = field(default_factory=dict)
    """By peer: the last samples of the link."""


@dataclass
class NodeView(NodeParts):
    """A node of this process, for the observer's thread; made on the node's loop."""

    pulse: _LoopPulse = field(init=False)
    pauses: PauseRecorder = field(init=False)
    times: OperationTimes = field(init=False)

    def __post_init__(self) -> None:
        self.pulse = _LoopPulse(self.loop, threading.get_ident())
        recorder = self.links.recorder
        self.pauses = PauseRecorder(recorder)
        self.times = OperationTimes(recorder.mask + 1, recorder.first)


_nodes: list[NodeView] = []


def watch_node(
    links: Links, actors: ActorSystem, arena: ArenaHost | None, predict: Predict | None = None
) -> Callable[[], None]:
    """Start reporting on a node; return a callback that ends this.

    ``predict`` estimates the seconds of operations of all ranks.
    """
    view = NodeView(links, actors, arena, asyncio.get_running_loop(), predict)
    view.pauses.start()
    _nodes.append(view)

    def forget() -> None:
        view.pauses.stop()
        _nodes.remove(view)

    return forget


class _GcClock:
    """Sums the time spent in garbage collections."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._begun = now
        else:
            self.seconds += now - self._begun


_gc_clock = _GcClock()


def provide_process() -> None:
    """Provide the answers of this process that the agent of a launched rank asks for."""
    gc.callbacks.append(_gc_clock)
    provide("summary", lambda: pack(make_summary()))
    provide("stacks", lambda: pack(make_stacks()))
    provide("image", _snapshot)
    provide("pipeline", lambda: pack(make_pipeline_runs()))


def _snapshot() -> bytes:
    recorder = current_recorder()
    return b"" if recorder is None else recorder.snapshot()


def make_pipeline_runs() -> PipelineSummary:
    """Return the last runs of a pipeline in which this process took part."""
    return summarize_pipeline(read_image(_snapshot()))


def make_stacks() -> ProcessStacks:
    """Return the stacks of this process."""
    tasks, more = (), 0
    for view in _nodes[-1:]:
        tasks, more = _retry(lambda view=view: capture_tasks(view.pulse.loop))  # type: ignore[misc]
    return ProcessStacks(
        pid=os.getpid(), rank=_rank(), time=time.time(), threads=capture_threads(), tasks=tasks, more_tasks=more
    )


def make_summary() -> RankSummary:
    """Return the summary of this process's rank, and leave it in the ring."""
    view = _nodes[-1] if _nodes else None
    fields: dict[str, Any] = {"rank": _rank(), "time": time.time(), **_of_program(), **_of_process()}
    if view is not None:
        fields |= _retry(lambda: _of_view(view))
    fields["doing"] = "" if view is None else _retry(lambda: describe_program(view.pulse.loop))
    fields["user_site"] = next((one.site for one in fields.get("operations", ()) if one.site and one.is_awaited), "")
    fields["user_site"] = fields["user_site"] or fields["doing"].rpartition(" at ")[2]
    for part in _parts:
        fields |= part()
    summary = RankSummary(**fields)
    _leave_note(summary)
    return summary


def summarize_node(node: NodeParts) -> RankSummary:
    """Return the summary of one of the nodes of this process, requested on its loop."""
    is_virtual = getattr(node.loop, "clock_domain", None) is not None
    fields = _of_program() | ({} if is_virtual else _of_process()) | _of_node(node, node.links.recorder.snapshot())
    site = next((one.site for one in (*fields["operations"], *fields["asks"]) if one.site), "")
    return RankSummary(user_site=site, **fields)


def _of_program() -> dict[str, Any]:
    """Return the fields that the program of this process has reported."""
    gradients = None if reported.gradients is None else GradientSummary(*reported.gradients)
    return {"pid": os.getpid(), "values": reported.values, "progress": _progress(), "gradients": gradients}


def _of_process() -> dict[str, Any]:
    return {
        "cpu": time.process_time(),
        "rss": _resident_bytes(),
        "gc": _gc_clock.seconds,
        "stolen": _stolen_seconds(),
    }


def _progress() -> ProgressSummary | None:
    if reported.progress is None:
        return None
    description, completed, total = reported.progress
    return ProgressSummary(description=description, completed=completed, total=total, fields=reported.figures)


def _of_view(view: NodeView) -> dict[str, Any]:
    """Return the fields that the observer's thread reads from a node."""
    view.pauses.sample()
    lag = view.pulse.measure()
    ring = view.links.recorder.snapshot()
    fields = _of_node(view, ring) | {"loop_lag": lag, "blocked": _blocked(view, lag)}
    fields["durations"] = view.times.add(ring)
    del fields["time"]  # the process has its own
    return fields


def _of_node(view: NodeParts, ring: bytes) -> dict[str, Any]:
    links, world = view.links, view.links.world
    image = read_image(ring, latest=_LATEST)
    events = image.events
    operations, more = _operations(view, events)
    lanes = {"messages": links.bytes_sent}
    if view.arena is not None:
        lanes["arena"] = view.arena.bytes_shown
    return {
        "rank": links.rank,
        "time": image.wall(links.recorder.clock()),
        "host": world.members[links.rank].host,
        "world_size": world.size,
        "generation": world.generation,
        "phase": "left" if links.is_closing else "member",
        "operations": operations,
        "more_operations": more,
        "operations_done": {"called": sum(_called(group) for group in _groups(view))},
        "bytes_moved": lanes,
        **view_actors(view.actors, links, events),
        "links": _links(view),
        "rounds": _rounds(view, events, world_number(world.generation)),
        "figures": figures_of(events, {group.number: len(group.ranks) for group in _groups(view)}, view.predict),
    }


def _blocked(view: NodeView, lag: float) -> BlockedSummary | None:
    if lag < BLOCKED_SECONDS:
        return None
    frame = sys._current_frames().get(view.pulse.thread)
    if frame is None:
        return None
    task = asyncio.current_task(view.pulse.loop)
    what = "a callback" if task is None else f"task {task.get_name()!r}"
    where = user_place(frame) or place_of(frame)
    return BlockedSummary(what=what, where=where, seconds=lag)


def _groups(view: NodeParts) -> list[Group]:
    table = view.links.operations
    return list(table._groups.values()) if isinstance(table, OperationTable) else []


def _called(group: Group) -> int:
    last = getattr(group.ledger, "last", 0)
    return last if isinstance(last, int) else 0


def _rounds(view: NodeParts, events: Sequence[Event], group: int) -> tuple[RoundSummary, ...]:
    view.rounds = join_rounds(view.rounds, rounds_of(events, group, REPORTED_ROUNDS), REPORTED_ROUNDS)
    return tuple(
        RoundSummary(
            number=one.number,
            own=round(one.own * 1e6),
            micros=round(one.seconds * 1e6),
            parts={cause.value: round(seconds * 1e6) for cause, seconds in one.parts.items()},
            ran=round(one.ran * 1e6),
        )
        for one in view.rounds
    )


def _operations(view: NodeParts, events: Sequence[Event]) -> tuple[tuple[OperationSummary, ...], int]:
    """Return the operations that have waited longest, those for a certain rank first, and the number of others.

    Standing receives do not count, nor do slots for messages that no receive has requested.
    """
    found = [
        operation
        for group in _groups(view)
        for operation in [*list(group.active.values()), *list(group.loose)]
        if operation.failure is None and not operation.is_standing
        if operation.has_started or operation.ticket != NO_TICKET
    ]
    now = view.loop.time()
    sites = {(event.group, event.sequence): event for event in events if not event.is_over}
    found.sort(key=lambda operation: (operation.is_waiting and not operation.waits_for(), operation.progress_at or now))
    views = tuple(_view_operation(operation, now, sites) for operation in found[:MOST_OPERATIONS])
    return views, len(found) - len(views)


def _view_operation(operation: Operation, now: float, sites: Mapping[tuple[int, int], Event]) -> OperationSummary:
    culprit = operation.find_culprit(now)
    event = None if operation.route is None else sites.get((operation.route.number, operation.sequence))
    arrays = [] if event is None else event.arrays
    return OperationSummary(
        label=operation.label,
        kind=operation.name,
        group=operation.home.name,
        sequence=operation.sequence,
        text=operation.description.text[:200],
        dtype=arrays[0][0] if arrays else "",
        bytes=0 if event is None else event.nbytes,
        waits_for=tuple(operation.waits_for()[:MOST_OPERATIONS]),
        culprit=None if culprit is None else culprit.rank,
        seconds=max(0.0, now - operation.progress_at) if operation.has_started else 0.0,
        site="" if event is None or event.site is None else str(event.site),
        is_awaited=operation.has_started,
    )


def _links(view: NodeParts) -> tuple[LinkSummary, ...]:
    known = sorted(view.links._links.copy().items())[:MOST_LINKS]
    return tuple(_link(view, peer, link) for peer, link in known)


def _link(view: NodeParts, peer: int, link: Link) -> LinkSummary:
    found = _rate(view, peer, link)
    return LinkSummary(
        peer=peer,
        lane=view.links.lane_kind(peer),
        bytes=link.bytes_sent,
        rtt=None if link.lane is None else link.lane.round_trip,
        rate=None if found is None else found.rate,
        is_full=found is not None and found.is_full,
        share=0.0 if found is None else found.share,
    )


def _rate(view: NodeParts, peer: int, link: Link) -> LinkRate | None:
    delivery = None if link.lane is None else link.lane.delivery
    if delivery is None:
        return None
    sample = LinkSample(view.links.recorder.clock(), delivery.nbytes, delivery.seconds, delivery.is_full)
    view.samples[peer] = add_sample(view.samples.get(peer, ()), sample)
    return settle_rate(view.samples[peer])


def _rank() -> int:
    if _nodes:
        return _nodes[-1].links.rank
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        import psutil  # takes long to import, and is not needed on Linux

        return int(psutil.Process().memory_info().rss)


def _stolen_seconds() -> float:
    """Return the seconds that the main thread has waited for a processor."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/schedstat", "rb") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def _leave_note(summary: RankSummary) -> None:
    """Leave the summary in the ring, where the agent finds it even if this process was killed."""
    recorder = current_recorder()
    if recorder is None:
        return
    shorter = {"operations": summary.operations[:4], "asks": summary.asks[:2], "links": (), "mailboxes": ()}
    for short in (summary, msgspec.structs.replace(summary, letters=(), **shorter)):
        note = pack(short)
        if len(note) <= _NOTE_BYTES:
            recorder.note(note)
            return


def _retry(read: Callable[[], Any]) -> Any:
    """Return the result of ``read``; retry if the state that it reads changes size meanwhile."""
    for _ in range(_TRIES):
        with suppress(RuntimeError):
            return read()
    return read()
