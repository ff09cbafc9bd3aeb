"""The way of one bucket through its phases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVarTuple

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError
from asyncpar.gradsync import phases
from asyncpar.gradsync.buffers import BucketBuffers

Args = TypeVarTuple("Args")

INLINE_BYTES = 1 << 18
"""Up to here a phase is over in less time than handing it to a thread would take."""


class ThreadTurns:
    """Who may use a thread: ``sending`` phases come before a bucket's first message, ``receiving`` ones after it.

    Of each kind a few run at a time, in the order in which they asked.  Buckets that are ready together would otherwise
    all be encoded together, and the wire would be idle until the first of them is done, which is almost when the last
    one is.
    """

    def __init__(self, *, threads: int) -> None:
        self.sending = asyncio.Semaphore(threads)
        self.receiving = asyncio.Semaphore(threads)


@dataclass(slots=True, kw_only=True)
class BucketFlow:
    """One bucket in one step.

    ``turns`` are shared by the flows of a step.  ``key`` is the same on all ranks.  Whatever happens, a flow that was
    run or given up has begun each of its collectives exactly once; so the uses of a key agree between ranks even after
    a step that failed on some.
    """

    buffers: BucketBuffers
    parameters: phases.Parameters
    communicator: Communicator
    key: str
    turns: ThreadTurns
    algorithm: str | None = None
    begun: int = 0
    """How many collectives of this flow have begun."""

    async def run(self) -> None:
        """Reduce the bucket over all ranks.

        Afterwards ``buffers.flat`` holds the mean, or with a codec that is not summable the sum; gradients are not
        written to.
        """
        buffers, turns = self.buffers, self.turns
        if buffers.codec.is_summable:
            await self._off_loop(turns.sending, phases.pack, buffers, self.parameters)
            await self._begin(self._reduce)
            await self._off_loop(turns.receiving, phases.check_finite, buffers)
            return
        await self._off_loop(turns.sending, phases.pack_and_encode, buffers, self.parameters)
        await self._begin(self._exchange_shards)
        await self._off_loop(turns.receiving, phases.sum_owned, buffers, self.communicator.rank)
        await self._begin(self._gather_sums)
        await self._off_loop(turns.receiving, phases.decode, buffers)

    async def give_up(self) -> None:
        """Tell ranks that wait, or will wait, for this bucket that it will not come.  Waits for nobody.

        Collectives that have not begun are begun and cancelled, which aborts them everywhere; should one be over before
        that, what it carried is marked as spoiled.
        """
        phases.spoil(self.buffers)
        summable = self.buffers.codec.is_summable
        collectives = [self._reduce] if summable else [self._exchange_shards, self._gather_sums]
        for collective in collectives[self.begun :]:
            with suppress(TimeoutError, AsyncparError):
                async with asyncio.timeout(0):
                    await self._begin(collective)

    async def _begin(self, collective: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.begun += 1
        await collective()

    async def _reduce(self) -> None:
        await self.communicator.all_reduce(self.buffers.flat, op="mean", algorithm=self.algorithm, key=self.key)

    async def _exchange_shards(self) -> None:
        buffers = self.buffers
        await self.communicator.all_to_all(buffers.outgoing, out=buffers.incoming, key=f"{self.key}/shards")

    async def _gather_sums(self) -> None:
        buffers = self.buffers
        await self.communicator.all_gather(buffers.reduced, out=buffers.incoming, key=f"{self.key}/sums")

    async def _off_loop(self, turn: asyncio.Semaphore, phase: Callable[[*Args], None], *args: *Args) -> None:
        """Run a phase, in a thread when it would hold up the loop.

        A cancelled caller still waits for the thread (milliseconds), because the next step uses the same buffers.
        """
        if self.buffers.flat.nbytes <= INLINE_BYTES:
            phase(*args)
            return
        async with turn:
            running = asyncio.get_running_loop().run_in_executor(None, phase, *args)
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait({running})
                running.exception()
                raise
