"""The exchange of updates between ranks that do not wait for each other.

Theory of operation.  Every rank sends each of its updates to every other, in order, and keeps receiving, so no sender
ever waits for a receiver, and nothing can deadlock.  For each peer one task sends, one receives updates, and one
receives notices (that the peer settles, or has failed).  Memory is bounded on both ends: updates that a slow peer has
not taken yet are merged into one, and so are updates that have arrived until the trainer takes them.  The clock decides
when a step may begin.  Each update of P bytes costs a rank (ranks - 1) P on the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.standing import stand_for_array
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.errors import AsyncparError, PeerCancelled, PeerTimeout, UsageError
from asyncpar.parallel.clock import (
    AnnounceSettling,
    Begin,
    Event,
    PeerSettling,
    PeerStepped,
    Settled,
    SettleWanted,
    StalenessClock,
    StepDone,
    StepUnwanted,
    StepWanted,
)
from asyncpar.parallel.update import AsyncUpdate, UpdateLayout, merged

_UPDATES = 0
_NOTICES = 1
_FAILED = -1
_FAREWELL_SECONDS = 1.0


class UpdateExchange:
    """Sends the updates of this rank and collects those of others.

    ``communicator`` is used for nothing else.  Use ``start`` and ``close`` from the loop that runs the rank.  If a peer
    is lost or has failed, every call raises that error.
    """

    def __init__(self, communicator: Communicator, layout: UpdateLayout, clock: StalenessClock) -> None:
        self._communicator = communicator
        self._layout = layout
        self._clock = clock
        self._peers = [rank for rank in range(communicator.size) if rank != communicator.rank]
        self._unsent: dict[int, AsyncUpdate] = {}
        self._has_unsent = {peer: asyncio.Event() for peer in self._peers}
        self._notices: asyncio.Queue[int] = asyncio.Queue()
        self._arrived: AsyncUpdate | None = None
        self._arrived_turn = asyncio.Lock()
        self._awaited: asyncio.Future[None] | None = None
        self._progress = asyncio.Event()
        self._failure: BaseException | None = None
        self._owner: asyncio.Task[None] | None = None
        self.waited = 0.0
        """Seconds for which this rank has waited for slower ones."""

    async def start(self) -> None:
        """Start receiving."""
        self._owner = asyncio.create_task(self._serve(), name="update exchange")

    async def close(self, *, failed: bool) -> None:
        """Stop.  With ``failed`` others are notified that this rank is out, at once and without waiting for them."""
        if self._owner is None:
            return
        if failed:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_SECONDS):
                    await asyncio.gather(*self._notices_to_all(_FAILED), return_exceptions=True)
        owner, self._owner = self._owner, None
        owner.cancel()
        await asyncio.wait({owner})

    # -- for the trainer ---------------------------------------------------------------------------------------------

    async def begin_step(self) -> None:
        """Wait until this rank may begin its next step.

        Raises ``PeerTimeout``, naming the slowest rank, when no rank makes progress for the communicator's timeout.
        """
        try:
            await self._ask(StepWanted())
        except BaseException:
            self._handle(StepUnwanted())
            raise

    async def settle(self) -> None:
        """Wait until every update of every rank has arrived; all ranks call it, after any number of steps each.

        If cancelled, it leaves the exchange unusable, since others rely on this rank.
        """
        try:
            await self._ask(SettleWanted())
        except BaseException as error:
            self._failure = self._failure or AsyncparError(
                f"settle: given up before all had made the same progress ({error!r})"
            )
            raise

    async def take_arrived(self) -> AsyncUpdate | None:
        """Return the sum of all updates that have arrived since the last call; None if there are none."""
        self._check()
        async with self._arrived_turn:
            arrived, self._arrived = self._arrived, None
        return arrived

    def publish(self, update: AsyncUpdate) -> None:
        """Send ``update``, which must not change any more, as the next step of this rank.  Does not wait."""
        self._check()
        self._handle(StepDone())
        update.step = self._clock.steps
        for peer in self._peers:
            earlier = self._unsent.get(peer)
            self._unsent[peer] = update if earlier is None else merged(earlier, update)
            self._has_unsent[peer].set()

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _ask(self, event: Event) -> None:
        """Pass ``event`` to the clock and wait for its answer."""
        self._check()
        self._awaited = asyncio.get_running_loop().create_future()
        try:
            self._handle(event)
            while not self._awaited.done():
                await self._wait_for_progress(self._awaited)
            self._awaited.result()
        finally:
            self._awaited = None

    async def _wait_for_progress(self, awaited: asyncio.Future[Any]) -> None:
        self._progress.clear()
        moved: asyncio.Future[Any] = asyncio.ensure_future(self._progress.wait())
        try:
            limit = self._communicator.timeout
            await asyncio.wait({awaited, moved}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
        if not awaited.done() and not self._progress.is_set():
            slowest = self._clock.slowest()
            raise PeerTimeout(
                f"rank {self._communicator.rank}: waited {limit} s for an update of rank {slowest}, which is "
                f"{self._clock.staleness()} steps behind",
                rank=slowest,
                operation="step",
                cause="it makes no progress",
            )

    def _handle(self, event: Event) -> None:
        """Feed the clock and obey its commands."""
        for command in self._clock.handle(event, asyncio.get_running_loop().time()):
            match command:
                case Begin(waited):
                    self.waited += waited
                    self._answer()
                case Settled():
                    self._answer()
                case AnnounceSettling(steps):
                    self._notices.put_nowait(steps)
        self._progress.set()

    def _answer(self) -> None:
        assert self._awaited is not None, "the clock answers what was asked"
        if not self._awaited.done():
            self._awaited.set_result(None)

    def _check(self) -> None:
        if self._owner is None:
            raise UsageError("update exchange: it is not running")
        if self._failure is not None:
            raise self._failure

    async def _serve(self) -> None:
        """Run the tasks of all peers; keep the error that ended them for the trainer."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_notices())
                for peer in self._peers:
                    tasks.create_task(self._send_updates(peer))
                    tasks.create_task(self._receive_updates(peer))
                    tasks.create_task(self._receive_notices(peer))
        except BaseExceptionGroup as group:
            errors = sorted(group.exceptions, key=lambda error: isinstance(error, PeerCancelled))
            self._failure = errors[0]
            if self._awaited is not None and not self._awaited.done():
                self._awaited.set_exception(self._failure)

    async def _send_updates(self, peer: int) -> None:
        while True:
            await self._has_unsent[peer].wait()
            self._has_unsent[peer].clear()
            update = self._unsent.pop(peer)
            await self._communicator.send(update.bytes, peer, tag=_UPDATES)

    async def _receive_updates(self, peer: int) -> None:
        received = AsyncUpdate(self._layout)
        while True:
            try:
                await stand_for_array(self._communicator, peer, out=received.bytes, tag=_UPDATES)
            except PeerTimeout:  # no rank owes an update; a rank that needs one reports it
                continue
            async with self._arrived_turn:
                if self._arrived is None:
                    self._arrived = AsyncUpdate(self._layout)
                await off_loop(partial(self._arrived.add, received), nbytes=received.nbytes)
            self._handle(PeerStepped(peer, received.step))

    async def _send_notices(self) -> None:
        while True:
            await asyncio.gather(*self._notices_to_all(await self._notices.get()))

    def _notices_to_all(self, notice: int) -> list[Coroutine[Any, Any, None]]:
        """Return coroutines that send to each peer the step after which this rank settles, or ``_FAILED``."""
        content = np.array([notice], np.int64)
        return [self._communicator.send(content, peer, tag=_NOTICES) for peer in self._peers]

    async def _receive_notices(self, peer: int) -> None:
        notice = np.zeros(1, np.int64)
        while True:
            try:
                await stand_for_array(self._communicator, peer, out=notice, tag=_NOTICES)
            except PeerTimeout:  # there may be none
                continue
            if notice[0] == _FAILED:
                me = self._communicator.rank
                raise PeerCancelled(
                    f"rank {me}: rank {peer} has failed and exchanges no more updates",
                    rank=self._communicator.ranks[peer],
                    operation="step",
                    cause="it has failed",
                )
            self._handle(PeerSettling(peer, int(notice[0])))
