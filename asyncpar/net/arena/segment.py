"""One rank's shared memory, as seen by its owner or by a peer.

Theory of operation.  A segment is an anonymous memory file (``memfd_create``): it has no name anywhere, so when the
last process that has it open or mapped is gone, however it ended, the kernel frees it.  Nothing is left to clean up.

    offset   bytes
    0        4096      the header: an identity, and a few words for others to read (all of one writer, the owner)
    4096     ...       the rest of the bounded part, for channels; its memory is there from the beginning
    control  ...       the heap: address space as large as this host's memory, whose pages are taken when a buffer is
                       allocated and given back when it is freed

No peer can cause a fault here.  The file is sealed: neither its owner nor a peer can shrink it under a mapping, or take
the seals off, and a peer maps nothing before it has seen the seals and the size.  The memory of the bounded part is
allocated before anyone touches it, so that running out of memory is an error now and no SIGBUS later; the heap does the
same per buffer.  Peers get a descriptor that was opened for reading only: they can neither write nor punch holes, so
every word of a segment has exactly one writer.

Words are read and written through ``memoryview``s of format "Q": one aligned 8-byte load or store each, which no
supported processor tears.  Their order is up to their users (see ``arena``).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import ArenaFull, ProtocolError, UsageError
from asyncpar.net.arena.limits import available_memory

HEADER_BYTES = 4096
"""The offset in a segment at which the channels begin."""

NONCE_BYTES = 32

SLEEPING = 32
"""Index of the header word that states whether this rank sleeps and must be rung (1) or not (0)."""

STATE = 48
"""Index of the header word with the owner's state: ``ALIVE`` or ``LEFT``."""

ALIVE = 0
LEFT = 1
"""The owner left in good order: all that it has written is final."""

_MAGIC = b"apARENA\0"
_LAYOUT = 1
_HEADER = struct.Struct(f"<8sQ48x{NONCE_BYTES}s")
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4
"""F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW (linux/fcntl.h)."""
_MAP_NORESERVE = 0x4000
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23


class Segment:
    """The shared memory of one rank.  Made by ``create`` or ``open``.

    ``control`` is the bounded part: writable for the owner, read-only for peers.
    """

    def __init__(self, descriptor: int, *, control_bytes: int, heap_bytes: int, is_owner: bool) -> None:
        self.control_bytes = control_bytes
        self.heap_bytes = heap_bytes
        self.is_owner = is_owner
        self._descriptor = descriptor
        self._heap: mmap.mmap | None = None
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.control = memoryview(self._map(control_bytes, 0, flags))
        self._state = self.words(8 * STATE, 1)

    @classmethod
    def create(
        cls,
        *,
        control_bytes: int,
        heap_bytes: int,
        nonce: bytes,
        room: Callable[[], int] = available_memory,
    ) -> Segment:
        """Create this rank's segment, whose header shows ``nonce``.  Sizes are rounded up to whole pages.

        Raises ``ArenaFull`` if there is no memory for the bounded part, ``OSError`` if the system refuses.
        """
        control_bytes, heap_bytes = round_to_pages(control_bytes), round_to_pages(heap_bytes)
        descriptor = os.memfd_create("asyncpar-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, control_bytes + heap_bytes)
            take_memory(descriptor, 0, control_bytes, room=room)
            _control_file(descriptor, _ADD_SEALS, _SEALS)
            segment = cls(descriptor, control_bytes=control_bytes, heap_bytes=heap_bytes, is_owner=True)
        except BaseException:
            os.close(descriptor)
            raise
        _HEADER.pack_into(segment.control, 0, _MAGIC, _LAYOUT, nonce)
        return segment

    @classmethod
    def open(cls, descriptor: int, *, control_bytes: int, heap_bytes: int, nonce: bytes) -> Segment:
        """Map a peer's segment, and take ownership of ``descriptor`` (close it, too, if this fails).

        Raises ``ProtocolError`` if it differs from its owner's description, or could shrink; ``OSError`` if it cannot
        be mapped.
        """
        try:
            _check_file(descriptor, control_bytes + heap_bytes)
            segment = cls(descriptor, control_bytes=control_bytes, heap_bytes=heap_bytes, is_owner=False)
            shown = _HEADER.unpack_from(segment.control, 0)
            if shown != (_MAGIC, _LAYOUT, nonce):
                raise ProtocolError("a segment does not show what its owner wrote: the memory is not shared")
        except BaseException:
            os.close(descriptor)
            raise
        return segment

    def open_for_peers(self) -> int:
        """Return a new descriptor of this memory that can only be read and mapped for reading.

        Raises ``OSError`` if /proc is not mounted.
        """
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def words(self, offset: int, count: int) -> memoryview:
        """Return ``count`` 64-bit words from byte ``offset``, a multiple of 8, of the bounded part."""
        _check_range("words", offset, 8 * count, self.control_bytes, alignment=8)
        return self.control[offset : offset + 8 * count].cast("Q")

    def array(self, offset: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return a view of ``count`` elements from byte ``offset`` of the bounded part."""
        kind = np.dtype(dtype)
        _check_range("array", offset, count * kind.itemsize, self.control_bytes)
        return np.ndarray((count,), kind, buffer=self.control, offset=offset)

    def heap_array(self, offset: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return a view of ``count`` elements from byte ``offset`` of the heap, which is mapped at the first call.

        Raises ``UsageError`` if that fails, as with a limit on address space (``ulimit -v``).
        """
        kind = np.dtype(dtype)
        _check_range("heap array", offset, count * kind.itemsize, self.heap_bytes)
        return np.ndarray((count,), kind, buffer=self.heap(), offset=offset)

    def heap(self) -> mmap.mmap:
        """Return the mapping of the heap, made at the first call."""
        if self._heap is None:
            if self._descriptor < 0:
                raise UsageError("arena: this segment is closed")
            try:
                self._heap = self._map(self.heap_bytes, self.control_bytes, mmap.MAP_SHARED | _MAP_NORESERVE)
            except OSError as error:
                raise UsageError(
                    f"arena: {self.heap_bytes >> 20} MiB of address space for a heap cannot be had "
                    f"({os_reason(error)}); raise the limit (ulimit -v)"
                ) from error
            self._heap.madvise(_MADV_DONTDUMP)
            if not self.is_owner:
                self._close_descriptor()
        return self._heap

    def take_heap_memory(self, offset: int, size: int, *, room: Callable[[], int] = available_memory) -> None:
        """Back ``size`` bytes of this rank's heap with memory, and map it: a fault per page takes seven times as long.

        Raises ``ArenaFull`` if there is none.
        """
        take_memory(self._descriptor, self.control_bytes + offset, size, room=room)
        with suppress(OSError):  # before Linux 5.14 the first touch does it
            self.heap().madvise(_MADV_POPULATE_WRITE, offset, size)

    @property
    def mappings(self) -> list[mmap.mmap]:
        """The mappings, which last as long as there are views of them."""
        parts = (self.control.obj, self._heap)
        return [part for part in parts if isinstance(part, mmap.mmap)]

    @property
    def has_left(self) -> bool:
        """Whether the owner has left in good order."""
        return self._state[0] == LEFT

    def leave(self) -> None:
        """Mark the segment: its owner, this process, leaves in good order."""
        self._state[0] = LEFT

    def close(self) -> None:
        """Close the file.  Idempotent; memory stays mapped as long as there are views of it, other than its own."""
        self._close_descriptor()
        self._heap = None
        self._state = memoryview(bytearray(self._state.cast("B"))).cast("Q")
        self.control = memoryview(b"")

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _map(self, size: int, offset: int, flags: int) -> mmap.mmap:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.is_owner else 0)
        return mmap.mmap(self._descriptor, size, flags=flags, prot=protection, offset=offset)


def round_to_pages(size: int) -> int:
    """Return ``size`` rounded up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def take_memory(descriptor: int, offset: int, size: int, *, room: Callable[[], int]) -> None:
    """Allocate the pages of a part of a memory file now.  Raises ``ArenaFull`` if there are none.

    The kernel rarely refuses: it would rather kill a process.  So the available memory (``room``) is checked first.
    """
    available = room()
    if size > available:
        raise ArenaFull(f"arena: {_describe(size)} of shared memory needed, {_describe(available)} available")
    try:
        os.posix_fallocate(descriptor, offset, size)
    except OSError as error:
        raise ArenaFull(f"arena: {_describe(size)} of shared memory cannot be had ({os_reason(error)})") from error


def _describe(size: int) -> str:
    return f"{math.ceil(size / 2**20)} MiB"


def _check_range(what: str, offset: int, size: int, limit: int, *, alignment: int = 1) -> None:
    if offset < 0 or size < 0 or offset + size > limit or offset % alignment:
        raise UsageError(
            f"{what}: expected a range within {limit} bytes, at a multiple of {alignment}, got {size} at {offset}"
        )


def _control_file(descriptor: int, command: int, argument: int = 0) -> int:
    import fcntl  # not on every system that this module is imported on

    return fcntl.fcntl(descriptor, command, argument)


def _check_file(descriptor: int, size: int) -> None:
    try:
        seals = _control_file(descriptor, _GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"a segment is no sealed memory file ({os_reason(error)})") from error
    if seals & _SEALS != _SEALS:
        raise ProtocolError("a segment is not sealed against shrinking: it could be pulled away")
    found = os.fstat(descriptor).st_size
    if found != size:
        raise ProtocolError(f"a segment has {found} bytes, its owner announced {size}")
