"""The progress engine of one rank: all its messages over MPI, delivered and progressed by the event loop.

Theory of operation.  MPI has no descriptor to wait on and moves data only while it is called, so the loop calls it, at
intervals of a ``PollBackoff``.  A turn detects arriving messages of any rank with one matched probe after another, and
begins to receive them into memory of the engine; it then tests the oldest operations of each channel.  No call blocks.
All are made on the loop's thread, so any level of thread support suffices that allows other threads at all.

The engine uses its own communicators (duplicates), so that its messages never meet the user's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from asyncpar.backends.message_lane import ProgressEngine
from asyncpar.backends.mpi.channel import MESSAGE_BYTES, MessagePool, MpiChannel
from asyncpar.errors import ProtocolError

SPIN_SECONDS = 0.003
"""Seconds of polling without pause after something has moved."""

_SHARE = 1 / 8
LONGEST_NAP = 0.005


class PollBackoff:
    """Poll without pause while messages move; after that, sleep for an eighth of the time for which nothing has moved.

    So a late message is delayed by at most another eighth, and at most 5 ms, and an idle rank polls 200 times a second,
    which takes one or two hundredths of a core.
    """

    def __init__(self, now: float) -> None:
        self._moved_at = now

    def moved(self, now: float) -> None:
        """Record that something was sent or has arrived."""
        self._moved_at = now

    def nap(self, now: float) -> float:
        """Return the seconds to sleep before the next poll; 0: none."""
        idle = now - self._moved_at
        return 0.0 if idle < SPIN_SECONDS else min(_SHARE * idle, LONGEST_NAP)


_MOST_PROBES = 64
"""Limit of messages in one turn, so that the loop also does other things."""

CLOSE_SECONDS = 1.0


class MpiProgress(ProgressEngine):
    """The channels of ``rank`` in a world of ``size``.

    World ranks are assigned to MPI's processes in turn: rank ``r`` is number ``r // processes`` of those in process
    ``r % processes`` (usually there is one in each).  ``communicators[n]`` carries messages for the ranks of number
    ``n``; source and tag identify the sender.
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
        self._channels: dict[int, MpiChannel] = {}
        self._pool = MessagePool()
        self._loop = asyncio.get_running_loop()
        self._backoff = PollBackoff(self._loop.time())
        self._handle: asyncio.Handle | None = None
        self._is_napping = False
        self._is_backed_up = False
        self._is_open = False
        self._status = mpi.Status()

    def open(self, *, meet: Callable[[int], None], leave: Callable[[int], None]) -> None:
        self._meet, self._leave = meet, leave
        self._is_open = True
        self._wake()

    def channel(self, rank: int) -> MpiChannel:
        channel = self._channels.get(rank)
        if channel is None:
            channel = MpiChannel(send=partial(self._send, rank), pool=self._pool, wake=self._wake)
            self._channels[rank] = channel
        return channel

    @property
    def is_through(self) -> bool:
        """Whether all posted messages have left and the last message has arrived."""
        return len(self._channels) == self._size - 1 and all(
            channel.has_peer_ended and not channel.is_moving for channel in self._channels.values()
        )

    async def close(self) -> None:
        """See ``ProgressEngine.close``.  Operations that MPI has not finished keep their memory while MPI runs."""
        for rank in range(self._size):
            if rank != self._rank:
                self.channel(rank).end()
                self.channel(rank).stop()
        deadline = self._loop.time() + CLOSE_SECONDS
        while self._is_open and not self.is_through and self._loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0)
        self._is_open = False
        if self._handle is not None:
            self._handle.cancel()
        unfinished = [each for channel in self._channels.values() for each in channel.unfinished()]
        if unfinished:
            self._mpi.COMM_WORLD.Set_attr(self._mpi.Comm.Create_keyval(nopython=False), unfinished)

    def break_off(self, cause: str) -> None:
        """Close all channels for both directions."""
        for channel in list(self._channels.values()):
            channel.break_off(cause)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _send(self, rank: int, message: memoryview) -> Any:
        """Start sending; an error of MPI is raised in the next turn."""
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
        """Poll now, since something was posted, and keep polling for a while."""
        self._backoff.moved(self._loop.time())
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
        """Schedule the next turn."""
        now = self._loop.time()
        if has_moved:
            self._backoff.moved(now)
        nap = self._backoff.nap(now)
        self._is_napping = nap > 0
        if self._is_napping:
            self._handle = self._loop.call_later(nap, self._turn)
            return
        if not has_moved and hasattr(os, "sched_yield"):
            os.sched_yield()  # if ranks share a core, the one that is waited for may need it
        self._handle = self._loop.call_soon(self._turn)

    def _move(self) -> bool:
        """Progress everything; return whether anything moved."""
        has_moved = not self._is_backed_up and self._probe()
        self._is_backed_up = False
        for channel in list(self._channels.values()):
            if channel.is_moving:
                has_moved = channel.progress() or has_moved
            self._is_backed_up = self._is_backed_up or channel.is_backed_up
        return has_moved

    def _probe(self) -> bool:
        """Start receiving messages that have arrived; return whether there were any."""
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
            if sender not in self._channels:
                greet = self._meet if length else self._leave
                assert greet is not None
                greet(sender)
            self.channel(sender).take(request, message)
        return True
