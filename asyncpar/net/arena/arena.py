"""The arena as seen by one rank: segments to read and write, doorbells to ring, and the ends of other ranks.

The end of a peer is reported once, as one of two things.  It *left* if its segment says so: it closed its arena, and
everything it had written before is final.  It is *lost* if its segment does not say so and the kernel reports that its
process ended (a pidfd becomes readable, whether or not the process was waited for and even if its number is in use
again) or that no process can read its doorbell any more.  Messages that it sent before are delivered first.  Its memory
stays mapped here in either case, so that readers do not fault.  Ranks of this process are not watched: they end with
it.

Doorbells.  Each rank has a pipe, into which its peers write messages of 24 bytes.  A rank that has made progress stores
it in its own segment and then, if a peer sleeps (or always, where memory is not polled), writes a message into the
peer's pipe.  24 bytes are far below PIPE_BUF, so the kernel never mixes or tears messages, and a reader that reads
multiples of 24 gets whole ones in the order in which each sender wrote.

Memory order.  Writing to and reading from a pipe take the same lock of the kernel (``pipe->mutex``): releasing it after
the write and acquiring it for the read order everything the writer stored before its write before everything the reader
loads after its read, on every processor.  So everything stored before ``ring`` is visible to a rank that has read the
message.  Without the message there is no such order except on x86, whose stores become visible in program order and
whose loads are not reordered (TSO; Intel SDM 3A, 10.2): only there may progress words be polled.

A full pipe.  With polling, a message only means "look again": a full pipe makes the reader wake and look anyway, so the
message may be dropped.  Without polling the message *is* the progress, so it is kept, in order, until the pipe is
writable.  Neither blocks.  A message that announces a departure may be dropped, too; so a rank that reads as many as
``FULL_BATCH`` messages at once must check which ranks have left.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from asyncpar.errors import ArenaFull, UsageError
from asyncpar.net.arena.buffers import Buffers
from asyncpar.net.arena.segment import Segment
from asyncpar.net.transport.shared import SharedMemory

DoorbellMessage = tuple[int, int, int]
"""The sender (world rank), the group, and the progress word."""

LEAVING = 2**64 - 1
"""The group number in the message of a rank that leaves."""

FULL_BATCH = 128
"""Fewer messages than this at once mean that the pipe was not full: the smallest pipe, one page, holds 170."""

_MESSAGE = struct.Struct("<QQQ")
_READ_BYTES = 2730 * _MESSAGE.size
"""More than a pipe of the default size, 64 KiB of pages that hold 170 messages each, can contain."""


class Doorbell:
    """The pipe of this rank.  Peers get ``write_end``; it stays open here, so that reading never reaches the end."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def read(self) -> list[DoorbellMessage]:
        """Return the waiting messages, oldest first; possibly none."""
        try:
            return list(_MESSAGE.iter_unpack(os.read(self.read_end, _READ_BYTES)))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Close the pipe.  Idempotent."""
        for descriptor in (self.read_end, self.write_end):
            if descriptor >= 0:
                os.close(descriptor)
        self.read_end = self.write_end = -1


class Bell:
    """The write end of a peer's doorbell; takes ownership of ``descriptor``, the write end of its pipe.

    ``keeps`` makes it keep, in order, messages for which the pipe has no room.  ``on_broken`` is called once, inside
    ``ring`` or later, when the pipe has no reader any more.
    """

    def __init__(self, descriptor: int, *, keeps: bool, on_broken: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._keeps = keeps
        self._on_broken = on_broken
        self._waiting: deque[bytes] = deque()

    def ring(self, rank: int, group: int, word: int) -> None:
        """Send a message; never blocks."""
        message = _MESSAGE.pack(rank, group, word)
        if self._waiting:
            self._waiting.append(message)
        elif not self._write(message) and self._keeps and self._descriptor >= 0:
            self._waiting.append(message)
            self._loop.add_writer(self._descriptor, self._continue)

    def ring_last(self, rank: int) -> None:
        """Announce that ``rank`` leaves, after as many waiting messages as the pipe takes; then ``close``.

        If the pipe does not take the announcement either, it is full, so the reader gets a full batch and checks which
        ranks have left.
        """
        self._continue()
        self._write(_MESSAGE.pack(rank, LEAVING, 0))
        self.close()

    def close(self) -> None:
        """Drop waiting messages and close the pipe.  Idempotent."""
        if self._waiting:
            self._waiting.clear()
            self._loop.remove_writer(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write(self, message: bytes) -> bool:
        """Return whether the pipe took the message."""
        if self._descriptor < 0:
            return False
        try:
            os.write(self._descriptor, message)
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self.close()
            self._on_broken()
            return False
        return True

    def _continue(self) -> None:
        """Write waiting messages, now that the pipe is writable."""
        while self._waiting and self._write(self._waiting[0]):
            self._waiting.popleft()
            if not self._waiting:
                self._loop.remove_writer(self._descriptor)


OnRing = Callable[[list[DoorbellMessage]], None]
"""Receives the messages (rank, group, word) that were read at once."""


class ArenaPeer(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a rank holds for another rank of its host.

    ``segment`` is its memory, ``doorbell`` the write end of its pipe, ``process`` a pidfd of its process, None when
    that is this one.  The arena owns them.
    """

    segment: Segment
    doorbell: int
    process: int | None


class Arena:
    """The arena of the ranks of one host, as seen by ``rank``.  Made by ``form_arena``; use it on its event loop.

    ``members`` are the world ranks of this host in ascending order, ``segments`` their memory by rank.  ``may_spin``:
    busy waiting is harmless here; ``polls``: progress can be seen by polling memory; otherwise only messages count.
    """

    def __init__(
        self,
        *,
        rank: int,
        segment: Segment,
        doorbell: Doorbell,
        peers: Mapping[int, ArenaPeer],
        may_spin: bool,
        polls: bool,
        on_lost: Callable[[int, str], None],
        on_left: Callable[[int], None],
    ) -> None:
        self.rank = rank
        self.members = tuple(sorted((rank, *peers)))
        self.segments = {member: segment if member == rank else peers[member].segment for member in self.members}
        self.may_spin = may_spin
        self.polls = polls
        self._loop = asyncio.get_running_loop()
        self._doorbell = doorbell
        self._buffers = Buffers(segment)
        self.locate: Callable[[NDArray[Any]], int | None] = self._buffers.locate
        """The heap offset of an array if it is C-contiguous, not empty and in this rank's heap; else None."""
        self._on_lost = on_lost
        self._on_left = on_left
        self._on_ring: OnRing | None = None
        self._is_closed = False
        self._present = set(peers)
        self._processes = {member: peer.process for member, peer in peers.items() if peer.process is not None}
        self._bells = {member: self._bell(member, peer.doorbell) for member, peer in peers.items()}

    @property
    def has_own_process(self) -> bool:
        """Whether no other rank of the host is in this process."""
        return len(self._processes) == len(self.members) - 1

    # -- waking ------------------------------------------------------------------------------------------------------

    @property
    def on_ring(self) -> OnRing | None:
        """The receiver of the messages; set it once.  Until then they wait in the pipe; none is lost."""
        return self._on_ring

    @on_ring.setter
    def on_ring(self, on_ring: OnRing) -> None:
        assert self._on_ring is None, "on_ring is set once"
        self._on_ring = on_ring
        if not self._is_closed:
            watch = getattr(self._loop, "add_bell", self._loop.add_reader)
            watch(self._doorbell.read_end, self._read_messages)

    def ring(self, rank: int, group: int, word: int) -> None:
        """Send the message (this rank, ``group``, ``word``) to ``rank``.  Never blocks; does nothing if it is gone.

        A rank that reads it sees everything that this rank stored before.  Messages to one rank arrive in order and
        once, except that with ``polls`` a message may be dropped if so many wait there that it will wake and look
        anyway.
        """
        bell = self._bells.get(rank)
        if bell is not None:
            bell.ring(self.rank, group, word)

    # -- buffers -----------------------------------------------------------------------------------------------------

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike) -> NDArray[Any]:
        """Return a new C-contiguous array in this rank's heap, which peers can read.  Its content is undefined.

        It is aligned to a page.  Its memory is allocated now, which takes about half a millisecond per MiB, and freed
        when the array and all its views are gone.  Raises ``ArenaFull`` if there is none, ``UsageError`` for a dtype
        that holds objects and after ``close``.
        """
        return self._buffers.empty(shape, dtype)

    def forbid_buffers(self, problem: str) -> None:
        """Make ``empty`` fail, because of ``problem``: a peer could not map the buffers (formation does this)."""
        self._buffers.close(f"arena: no buffers, {problem}")

    # -- beginning and end -------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Report the ends of peers from now on (``form_arena`` does this)."""
        for member, process in self._processes.items():
            self._loop.add_reader(process, self._see_end, member, "its process ended")

    def close(self) -> None:
        """Leave in good order: announce it, wake all peers, and release everything.  Idempotent.

        Memory with live views stays mapped until they are gone.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.segments[self.rank].leave()
        for member, bell in list(self._bells.items()):
            bell.ring_last(self.rank)
            self._forget(member)
        self._present.clear()
        if self._on_ring is not None:
            self._loop.remove_reader(self._doorbell.read_end)
        self._doorbell.close()
        self._buffers.close()
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _bell(self, member: int, descriptor: int) -> Bell:
        def report() -> None:  # not inside ``ring``, whose caller must not be interrupted
            self._loop.call_soon(self._see_end, member, "nobody reads its doorbell any more")

        return Bell(descriptor, keeps=not self.polls, on_broken=report)

    def _read_messages(self) -> None:
        if self._is_closed:
            return
        messages = self._doorbell.read()
        departures = [message[0] for message in messages if message[1] == LEAVING]
        if len(messages) >= FULL_BATCH:  # a departure may have found the pipe full
            departures = sorted(self._present)
        progress = [message for message in messages if message[1] != LEAVING] if departures else messages
        if progress and self._on_ring is not None:
            self._on_ring(progress)
        for member in departures:
            if member in self._present and self.segments[member].has_left:
                self._report_end(member, "")

    def _see_end(self, member: int, cause: str) -> None:
        """Report the end of a peer, after the messages that it sent before."""
        if self._on_ring is not None and member in self._present:
            self._read_messages()
        self._report_end(member, cause)

    def _report_end(self, member: int, cause: str) -> None:
        """Report the end of a peer once: whether it has left or is lost."""
        if member not in self._present:
            return
        self._present.discard(member)
        has_left = self.segments[member].has_left
        self._forget(member)
        if has_left:
            self._on_left(member)
        else:
            self._on_lost(member, cause)

    def _forget(self, member: int) -> None:
        """Stop watching and ringing a peer; its memory stays mapped."""
        self._bells.pop(member).close()
        process = self._processes.pop(member, None)
        if process is not None:
            self._loop.remove_reader(process)
            os.close(process)


class ArenaMemory(SharedMemory):
    """The heaps of ``arena`` as memory for large messages between the ranks of a host."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def mappings(self) -> list[mmap.mmap]:
        """The mappings by this rank of the segments of its host."""
        return [mapping for segment in self._arena.segments.values() for mapping in segment.mappings]

    def allocate(self, size: int) -> tuple[int, memoryview] | None:
        try:
            array = self._arena.empty(size, np.uint8)
        except (ArenaFull, UsageError):  # there is none, or a peer could not map it
            return None
        offset = self._arena.locate(array)
        return None if offset is None else (offset, array.data)

    def can_read(self, rank: int) -> bool:
        segment = self._arena.segments.get(rank)
        if segment is None:
            return False
        try:
            segment.heap()
        except UsageError:  # no room for it in this address space
            return False
        return True

    def is_gone(self, rank: int) -> bool:
        segment = self._arena.segments.get(rank)
        return segment is None or segment.has_left

    def read(self, rank: int, offset: int, size: int) -> memoryview:
        return self._arena.segments[rank].heap_array(offset, size, np.uint8).data
