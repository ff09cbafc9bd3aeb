"""Execution of a plan: post, send, wait, reduce, piece after piece.

Theory of operation.  Up to two pieces are in flight, and their rounds alternate: while this rank waits for and reduces
a message of one piece, messages of the other are in flight.  All waits happen in one coroutine, so an operation has no
tasks of its own.  Pieces go in pairs, round by round, in the same way on all ranks: what a rank waits for lies in an
earlier pair or, within the pair, earlier in a schedule that is proved to terminate, so two concurrent pieces cannot
deadlock.  Receives are posted before the sends of their round, and a round early where memory allows, so that the grant
has reached the sender when it wants to send.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncpar.collectives.arrays import Array, Combine, StagingPool
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import BoundRecv, BoundRound, Plan, Slice
from asyncpar.net.transport.lane import Sending

IN_FLIGHT = 2

_NOTHING = memoryview(bytearray())


class Region(NamedTuple):
    """A flat contiguous array and the same memory as bytes."""

    array: Array
    memory: memoryview


def region_of(array: Array) -> Region:
    """Return the region of a contiguous array."""
    flat = array.reshape(-1)
    return Region(flat, flat.view(np.uint8).data)


class Workspace(Protocol):
    """Lends the regions that a plan refers to."""

    def open(self, piece: int) -> Sequence[Region]:
        """Return the regions for ``piece``, filled with the schedule's input."""
        ...

    def close(self, piece: int, regions: Sequence[Region]) -> None:
        """Take the result of the completed ``piece`` out of the regions."""
        ...


class _Pending(NamedTuple):
    receive: BoundRecv
    future: asyncio.Future[None] | None
    staging: Array | None


class _PieceRun:
    """Progress of one piece through the rounds."""

    __slots__ = ("_combine", "_early", "_index", "_itemsize", "_operation", "_pool", "_receives", "_rounds", "_sends",
                 "piece", "regions")  # fmt: skip

    def __init__(
        self,
        operation: Operation,
        piece: int,
        rounds: tuple[BoundRound, ...],
        regions: Sequence[Region],
        combine: Combine | None,
        pool: StagingPool,
    ) -> None:
        self.piece = piece
        self.regions = regions
        self._operation = operation
        self._rounds = rounds
        self._combine = combine
        self._pool = pool
        self._itemsize = regions[0].array.itemsize if regions else 1
        self._index = 0
        self._early: list[_Pending] = []
        self._receives: list[_Pending] = []
        self._sends: list[tuple[int, Sending, Array | None]] = []

    def start_round(self) -> bool:
        """Post and send the messages of the next round; return False if there is none."""
        if self._index == len(self._rounds):
            return False
        current = self._rounds[self._index]
        self._receives = self._early
        posted = len(self._early)
        for receive in current.receives:
            if not (posted and receive.is_early):
                self._receives.append(self._post(receive))
        for source, target in current.copies:
            self._copy(source, target)
        for send in current.sends:
            self._send(send.peer, send.tag, send.slices)
        self._early = [self._post(receive) for receive in current.early]
        self._index += 1
        return True

    async def finish_round(self) -> None:
        """Wait for the sends and receives of the round, and reduce the received data."""
        operation = self._operation
        operation.steps += 1
        for peer, sending, staging in self._sends:
            await operation.sent(peer, sending)
            if staging is not None:
                self._pool.give_back(staging)
        self._sends.clear()
        for receive, future, staging in self._receives:
            if future is not None:
                await operation.received(receive.peer, receive.tag, future)
            if staging is not None:
                self._land(receive, staging)
        if operation.failure is not None:
            raise operation.failure

    def _post(self, receive: BoundRecv) -> _Pending:
        slices = receive.slices
        staging: Array | None = None
        if not slices:
            buffer = _NOTHING
        elif receive.reduce or len(slices) > 1:
            staging = self._pool.take(receive.count, self.regions[slices[0].region].array.dtype)
            buffer = staging.view(np.uint8).data
        else:
            buffer = self._bytes(*slices[0])
        return _Pending(receive, self._operation.post(receive.peer, receive.tag, buffer), staging)

    def _send(self, peer: int, tag: int, slices: Sequence[Any]) -> None:
        staging: Array | None = None
        if len(slices) == 1:
            payload = self._bytes(*slices[0])
        elif slices:
            parts = [self.regions[region].array[start:stop] for region, start, stop in slices]
            staging = self._pool.take(sum(len(part) for part in parts), parts[0].dtype)
            np.concatenate(parts, out=staging)
            payload = staging.view(np.uint8).data
        else:
            payload = _NOTHING
        sending = self._operation.send(peer, tag, payload)
        if sending is not None:
            self._sends.append((peer, sending, staging))
        elif staging is not None:
            self._pool.give_back(staging)

    def _bytes(self, region: int, start: int, stop: int) -> memoryview:
        return self.regions[region].memory[start * self._itemsize : stop * self._itemsize]

    def _copy(self, source: Sequence[Any], target: Sequence[Any]) -> None:
        for (region, start, stop), (to, first, last) in zip(source, target, strict=True):
            self.regions[to].array[first:last] = self.regions[region].array[start:stop]

    def _land(self, receive: BoundRecv, staging: Array) -> None:
        offset = 0
        combine = self._combine
        for region, start, stop in receive.slices:
            here = self.regions[region].array[start:stop]
            came = staging[offset : offset + stop - start]
            offset += stop - start
            if not receive.reduce:
                here[...] = came
                continue
            assert combine is not None, "a schedule reduces where nothing is to be reduced"
            if receive.is_lower:
                combine(came, here, here)
            else:
                combine(here, came, here)
        self._pool.give_back(staging)


async def execute(
    operation: Operation,
    plan: Plan,
    workspace: Workspace,
    combine: Combine | None = None,
    *,
    ready: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    """Run ``plan`` over the memory of ``workspace``; ``combine`` reduces.

    A piece begins when ``ready(piece)`` returns, which must not wait for messages of other pieces.
    """
    pool = operation.context.pool
    flying: deque[_PieceRun] = deque()
    begun = 0
    while True:
        while begun < plan.pieces and len(flying) < IN_FLIGHT:
            if ready is not None:
                await ready(begun)
            rounds = plan.bound.get(begun) or plan.bind(begun)
            run = _PieceRun(operation, begun, rounds, workspace.open(begun), combine, pool)
            begun += 1
            if run.start_round():
                flying.append(run)
            else:
                workspace.close(run.piece, run.regions)
        if not flying:
            return
        run = flying.popleft()
        await run.finish_round()
        if run.start_round():
            flying.append(run)
        else:
            workspace.close(run.piece, run.regions)


class InPlace:
    """Regions in the caller's own arrays; ``finish(piece)`` is called for each completed piece."""

    __slots__ = ("_finish", "_regions")

    def __init__(self, *arrays: Array, finish: Callable[[int], None] | None = None) -> None:
        self._regions = tuple(region_of(array) for array in arrays)
        self._finish = finish

    def open(self, piece: int) -> Sequence[Region]:  # noqa: ARG002
        return self._regions

    def close(self, piece: int, regions: Sequence[Region]) -> None:  # noqa: ARG002
        if self._finish is not None:
            self._finish(piece)


class Scratch:
    """One scratch region per piece, filled from slices of ``source`` and emptied into slices of ``target``.

    ``fill(piece)`` and ``drain(piece)`` list pairs of slices: of the scratch, and of the array.
    """

    def __init__(
        self,
        *,
        pool: StagingPool,
        dtype: np.dtype[Any],
        length: Callable[[int], int],
        source: Array,
        fill: Callable[[int], Sequence[tuple[Slice, Slice]]],
        target: Array | None = None,
        drain: Callable[[int], Sequence[tuple[Slice, Slice]]] | None = None,
    ) -> None:
        self._pool = pool
        self._dtype = dtype
        self._length = length
        self._source = source
        self._fill = fill
        self._target = target
        self._drain = drain

    def open(self, piece: int) -> Sequence[Region]:
        scratch = self._pool.take(self._length(piece), self._dtype)
        for (_, start, stop), (_, first, last) in self._fill(piece):
            scratch[start:stop] = self._source[first:last]
        return (region_of(scratch),)

    def close(self, piece: int, regions: Sequence[Region]) -> None:
        scratch = regions[0].array
        if self._drain is not None and self._target is not None:
            for (_, start, stop), (_, first, last) in self._drain(piece):
                self._target[first:last] = scratch[start:stop]
        self._pool.give_back(scratch)
