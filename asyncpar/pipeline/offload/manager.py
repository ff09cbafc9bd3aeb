"""Storage of saved activations until their backward passes, in memory or on disk."""

from __future__ import annotations

import asyncio
import os
import tempfile
import weakref
import zlib
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.core.config.parallel import MemoryOptimizationStrategy
from asyncpar.errors import UsageError
from asyncpar.net.arena.heap import FreeRanges
from asyncpar.pipeline.errors import OffloadError
from asyncpar.pipeline.offload.entry import Key, MemoryUsageStats, OffloadEntry, OnDisk, Volume
from asyncpar.pipeline.offload.packing import Array, ByteLedger, owners_in, take_apart

_WRITES_AT_ONCE: Final = 2
"""Number of values that may be written to disk at once, if all go there, before storing more has to wait."""

_FILE_CAPACITY: Final = 1 << 60
_FILE_GRANULARITY: Final = 4096
_CHUNK_BYTES: Final = 1 << 26


class MemoryManager:
    """Holds activations by (chunk, micro-batch) from ``store_activation`` to ``free_activation``.

    With the strategy EXTREME all of them go to disk; otherwise those that are needed last, as soon as the next one
    (assumed to be as large as the largest so far) would exceed ``limit`` bytes; ``make_room`` waits until that is done.
    Offloaded values are restored bit for bit.  Files are written and read by a separate thread, so that computing
    continues.  A disk failure raises ``OffloadError`` in the next call; ``clear`` starts over after that.

    Owns that thread, one unnamed file in ``folder`` (default: the system's folder for temporary files), and the tasks
    of values in transit; ``close`` ends all of them.
    """

    def __init__(
        self,
        *,
        strategy: MemoryOptimizationStrategy = MemoryOptimizationStrategy.BASIC,
        limit: int | None = None,
        folder: Path | str | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise UsageError(f"limit: expected a positive number of bytes or None, got {limit!r}")
        self.strategy = MemoryOptimizationStrategy(strategy)
        self.limit = limit
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        if not self._folder.is_dir():
            raise UsageError(f"folder: expected a folder that exists, got {self._folder}")
        self._entries: dict[Key, OffloadEntry] = {}
        self._ledger = ByteLedger()
        self._largest = 0
        self._peak_count = 0
        self._stored = self._retrieved = self._offloaded = self._restored = Volume()
        self._file: SpillFile | None = None
        self._thread = WorkerThread("activations")
        self._moving: set[asyncio.Task[None]] = set()
        self._failure: OffloadError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def stats(self) -> MemoryUsageStats:
        """A snapshot of all figures since construction or ``start_peak``."""
        return MemoryUsageStats(
            current_bytes=self._ledger.current,
            peak_bytes=self._ledger.peak,
            current_count=len(self._entries),
            peak_count=self._peak_count,
            stored=self._stored,
            retrieved=self._retrieved,
            offloaded=self._offloaded,
            restored=self._restored,
        )

    def start_peak(self) -> None:
        """Restart the peaks from the current figures."""
        self._ledger.start_anew()
        self._peak_count = len(self._entries)

    async def make_room(self) -> None:
        """Wait until another value, as large as the largest so far, can be stored; call it before that is computed.

        Also returns when nothing more can be offloaded: a limit below the memory that is needed at once is not kept.
        """
        self._check()
        if self.limit is not None:
            self._move_out_for(self.limit)
            while not self._has_room(self.limit) and self._moving:
                await self._one_moved()
        elif self.strategy is MemoryOptimizationStrategy.EXTREME:
            while len(self._moving) > _WRITES_AT_ONCE:
                await self._one_moved()

    def store_activation(self, key: Key, value: Any, *, needed: int = 0) -> None:
        """Hold ``value``, and start writing values that belong on disk; ``needed`` grows with the time of its use."""
        self._check()
        if key in self._entries:
            raise UsageError(f"key: chunk {key[0]}, micro-batch {key[1]} is stored already; free it first")
        entry = self._entries[key] = OffloadEntry.of(key, value, needed)
        self._ledger.add(entry.owners)
        self._largest = max(self._largest, entry.nbytes)
        self._peak_count = max(self._peak_count, len(self._entries))
        self._stored = self._stored.plus(entry.nbytes)
        if self.strategy is MemoryOptimizationStrategy.EXTREME:
            if entry.can_move_out:
                self._start(entry, self._move_out(entry))
        elif self.limit is not None:
            self._move_out_for(self.limit)

    async def retrieve_activation(self, key: Key) -> Any:
        """Return the stored value; it is in memory, and counted, until it is freed."""
        self._check()
        entry = self._find(key)
        entry.is_wanted = True
        if entry.on_disk is not None and entry.moving is None:
            self._start(entry, self._move_in(entry, entry.on_disk))
        while entry.on_disk is not None and entry.moving is not None:
            await asyncio.wait({entry.moving})
        self._check()
        if entry.is_freed:
            raise UsageError(f"key: chunk {key[0]}, micro-batch {key[1]} was freed while it was retrieved")
        self._retrieved = self._retrieved.plus(entry.nbytes)
        return entry.value

    def read_ahead(self, key: Key) -> None:
        """Start reading ``key`` back if it is on disk and there is room: it will be retrieved soon."""
        entry = self._entries.get(key)
        if entry is None or self._failure is not None:
            return
        if entry.on_disk is None:
            if self.limit is None:
                entry.is_wanted = True  # it need not even go to disk
        elif entry.moving is None:
            room = None if self.limit is None else self.limit - self._ledger.current
            if room is None or entry.on_disk.skeleton.nbytes + self._largest <= room:
                self._start(entry, self._move_in(entry, entry.on_disk))

    def replace_activation(self, key: Key, value: Any) -> None:
        """Hold ``value``, which is small and stays in memory, in place of the retrieved value."""
        entry = self._find(key)
        self._ledger.remove(entry.owners)
        entry.value, entry.owners, entry.is_wanted = value, owners_in(value), True
        self._ledger.add(entry.owners)

    def free_activation(self, key: Key) -> None:
        """Release ``key``."""
        entry = self._find(key)
        del self._entries[key]
        self._ledger.remove(entry.owners)
        entry.is_freed = True
        entry.value, entry.owners = None, ()
        if entry.moving is None:
            self._release(entry)

    async def settle(self) -> None:
        """Wait until no value is in transit to or from disk."""
        while self._moving:
            await asyncio.wait(self._moving)

    def clear(self) -> None:
        """Free everything, and forget a disk failure."""
        for key in list(self._entries):
            self.free_activation(key)
        self._failure = None

    async def close(self) -> None:
        """Free everything, and stop the thread and tasks.  Idempotent."""
        self.clear()
        await self.settle()
        self._thread.close()
        self._thread = WorkerThread("activations")
        if self._file is not None:
            self._file.close()
        self._file = None

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _find(self, key: Key) -> OffloadEntry:
        entry = self._entries.get(key)
        if entry is None:
            raise UsageError(f"key: chunk {key[0]}, micro-batch {key[1]} is not stored")
        return entry

    def _has_room(self, limit: int) -> bool:
        return self._ledger.current + self._largest <= limit

    def _move_out_for(self, limit: int) -> None:
        """Start writing the values needed last, until another value will fit."""
        leaving = sum(entry.nbytes for entry in self._entries.values() if entry.moving and not entry.is_wanted)
        staying = self._ledger.current - leaving
        for entry in sorted(self._entries.values(), key=lambda entry: -entry.needed):
            if staying + self._largest <= limit:
                break
            if entry.can_move_out:
                staying -= entry.nbytes
                self._start(entry, self._move_out(entry))

    async def _one_moved(self) -> None:
        await asyncio.wait(self._moving, return_when=asyncio.FIRST_COMPLETED)
        self._check()

    def _start(self, entry: OffloadEntry, moving: Coroutine[Any, Any, None]) -> None:
        task = entry.moving = asyncio.create_task(moving, name=f"activation {entry.key}")
        self._moving.add(task)
        task.add_done_callback(lambda _: self._moved(entry, task))

    def _moved(self, entry: OffloadEntry, task: asyncio.Task[None]) -> None:
        """Record the end of a move; if it has failed, the next call raises."""
        self._moving.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failure is None and not entry.is_freed:
            self._failure = OffloadError(f"activation of chunk {entry.key[0]}, micro-batch {entry.key[1]}: {error}")
            self._failure.__cause__ = error

    async def _move_out(self, entry: OffloadEntry) -> None:
        """Write the value, and drop it from memory unless it is wanted again by then."""
        if entry.must_stay():  # and may have been changed by now, in another thread
            entry.moving = None
            return
        nbytes = entry.nbytes
        try:
            skeleton, blocks = take_apart(entry.value)
            file = self._opened()
            start = file.reserve(skeleton.nbytes)
            try:
                checksum = await self._thread.run(file.write, start, blocks)
            except BaseException:
                file.release(start)
                raise
            if entry.must_stay():
                file.release(start)
                return
            self._ledger.remove(entry.owners)
            entry.on_disk = OnDisk(skeleton=skeleton, start=start, checksum=checksum)
            entry.value, entry.owners = None, ()
            self._offloaded = self._offloaded.plus(nbytes)
        finally:
            entry.moving = None

    async def _move_in(self, entry: OffloadEntry, place: OnDisk) -> None:
        """Read the value back."""
        try:
            blocks = await self._thread.run(self._opened().read, place.start, place.skeleton.sizes, place.checksum)
            if not entry.is_freed:
                entry.value = place.skeleton.fill(blocks)
                entry.owners = owners_in(entry.value)
                self._ledger.add(entry.owners)
                self._restored = self._restored.plus(place.skeleton.nbytes)
                entry.is_wanted = True
        finally:
            entry.moving = None
            self._release(entry)

    def _release(self, entry: OffloadEntry) -> None:
        if entry.on_disk is not None:
            assert self._file is not None, "what is on disk is in the file"
            self._file.release(entry.on_disk.start)
            entry.on_disk = None

    def _opened(self) -> SpillFile:
        if self._file is None:
            self._file = SpillFile(self._folder)
        return self._file


class SpillFile:
    """Blocks of bytes in an unnamed file, so that nothing is left behind however the process ends.

    ``reserve`` and ``release`` are for the loop, ``write`` and ``read`` for a thread: different ranges may be used
    concurrently.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            number, name = tempfile.mkstemp(prefix="asyncpar-", dir=folder)
            os.unlink(name)
        except OSError as error:
            raise OffloadError(f"folder: expected one where files can be made, got {folder} ({error})") from error
        self._file = number
        self._ranges = FreeRanges(capacity=_FILE_CAPACITY, granularity=_FILE_GRANULARITY)
        self._finalizer = weakref.finalize(self, os.close, number)

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of the file and return its start."""
        start = self._ranges.allocate(max(1, nbytes))
        assert start is not None, "a file has room, if a disk has"
        return start

    def release(self, start: int) -> None:
        """Release a range; nothing may be writing to it."""
        self._ranges.release(start)

    def write(self, start: int, blocks: Sequence[Array]) -> int:
        """Write ``blocks`` one after another and return their checksum.  Raises ``OffloadError``."""
        checksum = 0
        for block in blocks:
            rest = block.data
            while rest:
                try:
                    count = os.pwrite(self._file, rest[:_CHUNK_BYTES], start)
                except OSError as error:
                    raise self._failed("writing", rest, error) from error
                checksum = zlib.crc32(rest[:count], checksum)
                start += count
                rest = rest[count:]
        return checksum

    def read(self, start: int, sizes: Sequence[int], checksum: int) -> list[Array]:
        """Return written blocks.  Raises ``OffloadError`` if they differ from what was written."""
        blocks = [np.empty(size, np.uint8) for size in sizes]
        found = 0
        for block in blocks:
            rest = block.data
            while rest:
                try:
                    count = os.preadv(self._file, [rest[:_CHUNK_BYTES]], start)
                except OSError as error:
                    raise self._failed("reading", rest, error) from error
                if not count:
                    raise OffloadError(f"a file in {self.folder} has ended {len(rest)} bytes too early")
                found = zlib.crc32(rest[:count], found)
                start += count
                rest = rest[count:]
        if found != checksum:
            raise OffloadError(
                f"what was read back from a file in {self.folder} is not what was written: "
                f"expected checksum {checksum:#010x}, got {found:#010x}"
            )
        return blocks

    def close(self) -> None:
        """Close and remove the file.  Idempotent; nothing may be using it."""
        self._finalizer()

    def _failed(self, what: str, rest: memoryview, error: OSError) -> OffloadError:
        return OffloadError(f"{what} {len(rest)} bytes of a file in {self.folder} failed: {error}")
