"""All-reduce over hosts that have arenas: up and down in shared memory, across by messages.

Theory of operation.  The payload goes in pieces, each through three stages: *up*, in which the ranks of a host combine
each part of the piece at its leader; *across*, in which leaders reduce their parts with those of other hosts; and
*down*, in which leaders pass them to all ranks.  Across uses the same schedule of messages as ranks on hosts without an
arena, so hosts need not know how other hosts work inside.  Up and down are tasks of the arena, each run as soon as all
ranks of the host are ready for it, in any order (see ``arena.sequencer``): a rank announces the way up of a piece a
little ahead of need, and the way down when its part has arrived.  So while one piece is across, the next is on its way
up and the one before it on its way down.

It cannot deadlock.  Take the first piece that is not across everywhere.  All before it are, so every rank has
announced, or is about to announce, its way up and that of the next piece; and tasks that all ranks of a host have
announced run without waiting for messages.  So that piece is up on every host, and its messages, which wait only for
each other, are sent by leaders that at most wait for the next piece to come up.

``gather_parts`` and ``spread_parts`` work in place on a flat array that is the same length on all ranks.  ``parts`` are
its parts by the place of the rank that carries them; ranks that carry none have an empty one.  Both are streams in the
sense of ``programs``: the slot has two halves, chunk ``c`` uses half ``c & 1``, and a rank that writes chunk ``c`` has
waited for the ``c - 1`` of all others, which was posted after reading ``c - 2``.  Inputs in the heap are read in place,
although their owners work on them meanwhile: an owner writes only to its own part while others read all but that, and
only to the others' parts while others read its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from asyncpar.collectives.algorithms.catalog import is_hierarchical
from asyncpar.collectives.arrays import Array, Reduction
from asyncpar.collectives.execute import Region, Workspace, execute
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import SEGMENT_BYTES, AlongBuffer, Plan
from asyncpar.collectives.shared_memory import programs
from asyncpar.collectives.shared_memory.call import HostedOperation, HostTask, MakeProgram
from asyncpar.collectives.shared_memory.group import ArenaGroup
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program

_AHEAD: Final = 2
"""Number of pieces whose way up is announced, counted from the one that is needed next."""

_BEHIND: Final = 2
"""Number of pieces after which a piece must be down."""

_PIECES: Final = 4
"""Number of pieces of a payload, as long as they are neither too short nor too long."""

_LEAST_PIECE: Final = 2 << 20
_MOST_PIECE: Final = 4 << 20
_LEAST_SEGMENT: Final = 16 << 10

MakeWorkspace = Callable[[bool], Workspace]
"""Makes the workspace of a call; if asked to, it finishes each piece (divides, for means)."""


def all_reduce_layout(
    algorithm: str, *, count: int, chunks: int, itemsize: int, segment: int = SEGMENT_BYTES, is_packed: bool = False
) -> AlongBuffer:
    """Return the layout of an all-reduce; hierarchical ones have shorter pieces, to keep memory and network busy."""
    if is_hierarchical(algorithm):
        piece = min(max(count * itemsize // _PIECES, _LEAST_PIECE), _MOST_PIECE)
        segment = min(max(piece // chunks, _LEAST_SEGMENT), segment)
    return AlongBuffer(count=count, chunks=chunks, itemsize=itemsize, is_packed=is_packed, segment=segment)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The way of a payload of ``layout`` through the arena of this host, and ``across``.

    ``group`` is the arena group of this host's ranks; the first ``leaders`` of them carry a part each, and ``place`` is
    the index of this rank.  ``phase`` distinguishes routes of one operation.
    """

    group: ArenaGroup
    layout: AlongBuffer
    across: Plan
    leaders: int
    place: int
    phase: int

    def parts(self, piece: int) -> tuple[int, int, Parts]:
        """Return the range of elements of ``piece`` in its region, and its parts by place, counted from its start."""
        chunks = self.layout.place(piece)
        width = len(chunks) // self.leaders
        start = chunks[0].start
        bounds = [
            (chunks[part * width].start - start, chunks[(part + 1) * width - 1].stop - start)
            for part in range(self.leaders)
        ]
        bounds += [(0, 0)] * (len(self.group.ranks) - self.leaders)
        return start, chunks[-1].stop, bounds


async def run_all_reduce(
    operation: Operation,
    route: Route,
    plan: Plan,
    make_workspace: MakeWorkspace,
    reduction: Reduction,
    size: int,
) -> None:
    """All-reduce on ``route``, or by ``plan`` if the group of the route is refused."""
    assert isinstance(operation, HostedOperation)
    if await operation.opened(route.group):
        relay = _Relay(operation, route, make_workspace(False), reduction, size)
        await execute(operation, route.across, relay, reduction.combine, ready=relay.ready)
        await relay.settle()
    else:
        await execute(operation, plan, make_workspace(True), reduction.combine)


class _Relay:
    """The workspace of the stage across: it lends pieces that are up, and takes them down.

    The memory comes from ``workspace``, which gets a piece back when it is down.
    """

    def __init__(
        self, operation: HostedOperation, route: Route, workspace: Workspace, reduction: Reduction, size: int
    ) -> None:
        self._operation = operation
        self._route = route
        self._workspace = workspace
        self._reduction = reduction
        self._size = size
        self._begun = 0
        self._settled = 0
        self._regions: dict[int, Sequence[Region]] = {}
        self._up: dict[int, HostTask] = {}
        self._down: dict[int, HostTask] = {}

    async def ready(self, piece: int) -> None:
        """Wait until ``piece`` is up."""
        await self._settle(piece - _BEHIND)
        for begun in range(self._begun, min(piece + _AHEAD, self._route.layout.pieces)):
            self._regions[begun] = self._workspace.open(begun)
            self._up[begun] = self._begin_up(begun)
            self._begun = begun + 1
        await self._operation.ended(self._up.pop(piece))

    def open(self, piece: int) -> Sequence[Region]:
        return self._regions[piece]

    def close(self, piece: int, regions: Sequence[Region]) -> None:  # noqa: ARG002
        self._down[piece] = self._begin_down(piece)

    async def settle(self) -> None:
        """Wait until everything is down."""
        await self._settle(self._route.layout.pieces)

    async def _settle(self, stop: int) -> None:
        """Wait until the pieces before ``stop`` are down."""
        while self._settled < stop:
            piece = self._settled
            await self._operation.ended(self._down.pop(piece))
            self._workspace.close(piece, self._regions.pop(piece))
            self._settled = piece + 1

    def _begin_up(self, piece: int) -> HostTask:
        x, parts = self._piece(piece)
        low, high = parts[self._route.place]
        shown = (x.size - (high - low)) * x.itemsize
        return self._run("up", piece, x, lambda turn: gather_parts(turn, x, parts, self._reduction), shown)

    def _begin_down(self, piece: int) -> HostTask:
        x, parts = self._piece(piece)
        low, high = parts[self._route.place]
        if low < high:
            self._reduction.finish(x[low:high], self._size)
        return self._run("down", piece, x, lambda turn: spread_parts(turn, x, parts), (high - low) * x.itemsize)

    def _run(self, way: str, piece: int, x: Array, make: MakeProgram, shown: int) -> HostTask:
        route = self._route
        task = HostTask(self._operation, route.group, f"{way} {route.phase} {piece}", make, x, shown=shown)
        self._operation.run(task)
        return task

    def _piece(self, piece: int) -> tuple[Array, Parts]:
        start, stop, parts = self._route.parts(piece)
        return self._regions[piece][0].array[start:stop], parts


Parts = Sequence[tuple[int, int]]


def gather_parts(turn: Turn, x: Array, parts: Parts, reduction: Reduction) -> Program:
    """Combine each part of ``x`` of all ranks, in their order, at the rank that carries it."""
    low, high = parts[turn.channel.place]
    place = turn.channel.place
    flow = programs.flow(turn, parts, x.dtype, is_shared=False)
    scratch = np.empty(min(flow.chunk, high - low) if place > 1 else 0, x.dtype)

    def take(start: int, pieces: Sequence[Array]) -> None:  # noqa: ARG001  # pieces are views into ``x``
        own = pieces[place]
        total = pieces[0]
        for at, piece in enumerate(pieces[1:], start=1):
            target = own if at >= place else scratch[: len(own)]
            reduction.combine(total, piece, target)
            total = target

    yield from programs.exchange(turn, flow, x, take)


def spread_parts(turn: Turn, x: Array, parts: Parts) -> Program:
    """Copy each part of ``x`` from the rank that carries it to all others."""
    channel = turn.channel
    place, others = channel.place, channel.others
    half = channel.slot_bytes // 2 // x.itemsize
    slots = channel.whole(turn.parity, x.dtype)
    is_in_heap = turn.place_in_heap(place) is not None
    chunks = max(1, *(-(-(high - low) // half) for low, high in parts))
    heap: list[int | None] = []
    for chunk in range(chunks):
        base = (chunk & 1) * half
        low, high = _bounds(parts[place], chunk, half)
        if not is_in_heap:
            slots[place][base : base + high - low] = x[low:high]
        turn.post(chunk + 1)
        yield others, chunk + 1
        if chunk == 0:
            heap = turn.places_in_heaps()
        for other in others:
            low, high = _bounds(parts[other], chunk, half)
            where = heap[other]
            if low < high and where is None:
                x[low:high] = slots[other][base : base + high - low]
            elif low < high and where is not None:
                x[low:high] = turn.heap_array(other, where, x.dtype, low, high)
    yield from programs.release_heaps(turn, chunks + 1)


def _bounds(part: tuple[int, int], chunk: int, length: int) -> tuple[int, int]:
    low, high = part
    start = min(low + chunk * length, high)
    return start, min(start + length, high)
