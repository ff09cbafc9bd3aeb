"""All-reduce over hosts that have arenas: up and down in shared memory, across by messages.

Theory of operation.  The payload goes in pieces, each through three stages: *up*, in which the ranks of a host combine
each part of the piece at its carrier; *across*, in which carriers reduce their parts with those of other hosts; and
*down*, in which carriers hand them to everyone.  Across is the very schedule of messages that ranks on hosts without an
arena run, so hosts need not know of each other how they are inside.  Up and down are tasks of the arena, each run as
soon as all ranks of the host are ready for it, in whatever order that comes about (see ``arena.sequencer``): a rank
announces the way up of a piece a little ahead of need, and the way down when its part is there.  So while one piece is
across, the next is on its way up and the one before it on its way down.

It cannot lock itself.  Take the first piece that is not across everywhere.  All before it are, so every rank has
announced, or is about to, its way up and that of the next piece; and what all ranks of a host have announced is gone
through without waiting for messages.  So that piece is up on every host, and its messages, which only wait for each
other, are sent by carriers that at most wait for the next piece to come up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from asyncpar.collectives.algorithms.catalog import carriers_of, is_hierarchical, schedule_across
from asyncpar.collectives.arena_call import MakeProgram
from asyncpar.collectives.arena_group import ArenaGroup
from asyncpar.collectives.arena_parts import Parts, gather_parts, spread_parts
from asyncpar.collectives.arrays import Array, Reduction
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.execute import Region, Workspace, execute
from asyncpar.collectives.hosted import HostedOperation, HostTask
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import SEGMENT_BYTES, AlongBuffer, Plan

_AHEAD: Final = 2
"""Pieces whose way up is announced, counted from the one that is needed next."""

_BEHIND: Final = 2
"""Pieces after which a piece must be down."""

_PIECES: Final = 4
"""Pieces of a payload, as far as they are neither too short nor too long then."""

_LEAST_PIECE: Final = 2 << 20
_MOST_PIECE: Final = 4 << 20
_LEAST_SEGMENT: Final = 16 << 10

MakeWorkspace = Callable[[bool], Workspace]
"""Makes the workspace of a call; it finishes each piece (divides, for means) if told so."""


def all_reduce_layout(
    algorithm: str, *, count: int, chunks: int, itemsize: int, segment: int = SEGMENT_BYTES, is_packed: bool = False
) -> AlongBuffer:
    """Return the layout of an all-reduce: a hierarchical one has shorter pieces, to keep memory and network busy."""
    if is_hierarchical(algorithm):
        piece = min(max(count * itemsize // _PIECES, _LEAST_PIECE), _MOST_PIECE)
        segment = min(max(piece // chunks, _LEAST_SEGMENT), segment)
    return AlongBuffer(count=count, chunks=chunks, itemsize=itemsize, is_packed=is_packed, segment=segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a payload of ``layout`` goes over the arena of this host, and ``across``.

    ``group`` is what the ranks of this host have in the arena; the first ``carriers`` of them carry a part each,
    ``place`` is this one's.  ``phase`` tells routes of one operation apart.
    """

    group: ArenaGroup
    layout: AlongBuffer
    across: Plan
    carriers: int
    place: int
    phase: int

    def parts(self, piece: int) -> tuple[int, int, Parts]:
        """Return which elements of its region ``piece`` is, and its parts by place, counted from its start."""
        chunks = self.layout.place(piece)
        width = len(chunks) // self.carriers
        start = chunks[0].start
        bounds = [
            (chunks[part * width].start - start, chunks[(part + 1) * width - 1].stop - start)
            for part in range(self.carriers)
        ]
        bounds += [(0, 0)] * (len(self.group.ranks) - self.carriers)
        return start, chunks[-1].stop, bounds


def find_route(engine: Engine, algorithm: str, layout: AlongBuffer, *, phase: int = 0) -> Route | None:
    """Return the route of a hierarchical ``algorithm``; None for others, and where this rank's host has no arena."""
    arena = engine.table.arena
    if not is_hierarchical(algorithm) or arena is None:
        return None
    members = next(host for host in engine.hosts if engine.rank in host)
    ranks = tuple(engine.ranks[member] for member in members)
    if not arena.has_all(ranks):
        return None
    schedule = schedule_across(algorithm, rank=engine.rank, hosts=engine.hosts)
    return Route(
        group=arena.group_on_host(ranks),
        layout=layout,
        across=Plan(schedule, layout, rank=engine.rank, ranks=engine.ranks, phase=phase),
        carriers=carriers_of(algorithm, engine.hosts),
        place=members.index(engine.rank),
        phase=phase,
    )


async def run_all_reduce(
    operation: Operation,
    route: Route | None,
    plan: Plan,
    make_workspace: MakeWorkspace,
    reduction: Reduction,
    size: int,
) -> None:
    """All-reduce by ``plan``, or on ``route`` if there is one and its group is not refused."""
    if route is not None:
        assert isinstance(operation, HostedOperation)
        if await operation.opened(route.group):
            relay = _Relay(operation, route, make_workspace(False), reduction, size)
            await execute(operation, route.across, relay, reduction.combine, ready=relay.ready)
            await relay.settle()
            return
    await execute(operation, plan, make_workspace(True), reduction.combine)


class _Relay:
    """The workspace of the way across: it lends pieces that are up, and takes them down.

    The memory itself comes from ``workspace``, which gets a piece back when it is down.
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
        """Return when ``piece`` is up."""
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
        """Return when everything is down."""
        await self._settle(self._route.layout.pieces)

    async def _settle(self, stop: int) -> None:
        """Return when the pieces before ``stop`` are down."""
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
