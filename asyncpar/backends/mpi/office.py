"""The post office of one rank: all its messages over MPI, handed out and made progress with by the event loop.

Theory of operation.  MPI has no descriptor to wait on and moves data only while it is called, so the loop calls it, at
a ``Pace``.  A turn asks with one matched probe after another what has begun to arrive, from any rank, and begins to
receive it into memory of the office; it then tests the oldest operations of each courier.  No call blocks.  All are
made on the loop's thread, so any level of thread support will do that allows for other threads at all.

The office uses communicators of its own (duplicates), so that nothing of it meets the user's own messages.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from asyncpar.backends.message_connector import Office
from asyncpar.backends.mpi.courier import MESSAGE_BYTES, MessagePool, MpiCourier
from asyncpar.backends.mpi.pace import Pace
from asyncpar.errors import ProtocolError

_MOST_PROBES = 64
"""Most messages of one turn, so that the loop also does other things."""

CLOSE_SECONDS = 1.0


class MpiOffice(Office):
    """The couriers of ``rank`` in a world of ``size``.

    World ranks are dealt out to MPI's processes in turn: rank ``r`` is number ``r // processes`` of those in process
    ``r % processes`` (usually there is one in each).  ``communicators[n]`` carries what is for the ranks of number
    ``n``; who has sent it is told by source and tag.
    """

    def __init__(
        self,
        mpi: Any,
        communicators: Sequence[Any],
        *,
        rank: int,
        size: int,
    ) -> None:
        self._mpi = mpi
        self._communicators = communicators
        self._processes: int = communicators[0].Get_size()
        self._size = size
        self._rank = rank
        self._inbound = communicators[rank // self._processes]
        self._meet: Callable[[int], None] | None = None
        self._leave: Callable[[int], None] | None = None
        self._couriers: dict[int, MpiCourier] = {}
        self._pool = MessagePool()
        self._loop = asyncio.get_running_loop()
        self._pace = Pace(self._loop.time())
        self._handle: asyncio.Handle | None = None
        self._is_napping = False
        self._is_backed_up = False
        self._is_open = False
        self._status = mpi.Status()

    def open(self, *, meet: Callable[[int], None], leave: Callable[[int], None]) -> None:
        self._meet, self._leave = meet, leave
        self._is_open = True
        self._wake()

    def courier(self, rank: int) -> MpiCourier:
        courier = self._couriers.get(rank)
        if courier is None:
            courier = MpiCourier(send=partial(self._send, rank), pool=self._pool, wake=self._wake)
            self._couriers[rank] = courier
        return courier

    @property
    def is_through(self) -> bool:
        """Has everything left that was posted, and everything come that ever will?"""
        return len(self._couriers) == self._size - 1 and all(
            courier.has_peer_ended and not courier.is_moving for courier in self._couriers.values()
        )

    async def close(self) -> None:
        """See ``Office.close``.  What MPI has not finished by then keeps its memory for as long as MPI lives."""
        for rank in range(self._size):
            if rank != self._rank:
                self.courier(rank).end()
                self.courier(rank).stop()
        deadline = self._loop.time() + CLOSE_SECONDS
        while self._is_open and not self.is_through and self._loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0)
        self._is_open = False
        if self._handle is not None:
            self._handle.cancel()
        unfinished = [each for courier in self._couriers.values() for each in courier.unfinished()]
        if unfinished:
            self._mpi.COMM_WORLD.Set_attr(self._mpi.Comm.Create_keyval(nopython=False), unfinished)

    def break_off(self, cause: str) -> None:
        """Nothing can be sent or received any more."""
        for courier in list(self._couriers.values()):
            courier.break_off(cause)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _send(self, rank: int, message: memoryview) -> Any:
        """Begin to send; where MPI cannot, the next turn tells so."""
        communicator = self._communicators[rank // self._processes]
        try:
            return communicator.Isend([message, self._mpi.BYTE], rank % self._processes, self._rank // self._processes)
        except self._mpi.Exception as error:
            self._loop.call_soon(self._fail, error)
            return self._mpi.REQUEST_NULL

    def _fail(self, error: Exception) -> None:
        self._is_open = False
        self.break_off(f"MPI failed: {error}")

    def _wake(self) -> None:
        """Something was posted: look now, and keep looking for a while."""
        self._pace.moved(self._loop.time())
        if self._is_open and (self._handle is None or self._is_napping):
            if self._handle is not None:
                self._handle.cancel()
            self._is_napping = False
            self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._handle = None
        self._is_napping = False
        has_moved = False
        try:
            has_moved = self._move()
        except (self._mpi.Exception, ProtocolError) as error:
            self._fail(error)
        finally:
            if self._is_open and self._handle is None:
                self._plan(has_moved)

    def _plan(self, has_moved: bool) -> None:
        """Arrange for the next turn."""
        now = self._loop.time()
        if has_moved:
            self._pace.moved(now)
        nap = self._pace.nap(now)
        self._is_napping = nap > 0
        if self._is_napping:
            self._handle = self._loop.call_later(nap, self._turn)
            return
        if not has_moved and hasattr(os, "sched_yield"):
            os.sched_yield()  # where ranks share a core, the one that is waited for may need it
        self._handle = self._loop.call_soon(self._turn)

    def _move(self) -> bool:
        """Make progress with everything; True if there was any."""
        has_moved = not self._is_backed_up and self._probe()
        self._is_backed_up = False
        for courier in list(self._couriers.values()):
            if courier.is_moving:
                has_moved = courier.progress() or has_moved
            self._is_backed_up = self._is_backed_up or courier.is_backed_up
        return has_moved

    def _probe(self) -> bool:
        """Begin to receive what has come; True if there was any."""
        mpi, status = self._mpi, self._status
        for count in range(_MOST_PROBES):
            probed = self._inbound.Improbe(mpi.ANY_SOURCE, mpi.ANY_TAG, status)
            if probed is None:
                return count > 0
            length: int = status.Get_count(mpi.BYTE)
            sender: int = status.Get_tag() * self._processes + status.Get_source()
            if length > MESSAGE_BYTES or sender >= self._size:
                raise ProtocolError(f"a message of {length} bytes came from rank {sender} of {self._size}")
            message = self._pool.take(length)
            request = probed.Irecv([message, mpi.BYTE])
            if sender not in self._couriers:
                greet = self._meet if length else self._leave
                assert greet is not None
                greet(sender)
            self.courier(sender).take(request, message)
        return True
