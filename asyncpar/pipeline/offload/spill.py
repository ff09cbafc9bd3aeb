"""A file for data that do not stay in memory."""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from asyncpar.net.arena.heap import FreeRanges
from asyncpar.pipeline.errors import OffloadError
from asyncpar.pipeline.offload.packing import Array

_CAPACITY: Final = 1 << 60
_GRANULARITY: Final = 4096
_AT_ONCE: Final = 1 << 26


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
        self._ranges = FreeRanges(capacity=_CAPACITY, granularity=_GRANULARITY)
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
                    count = os.pwrite(self._file, rest[:_AT_ONCE], start)
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
                    count = os.preadv(self._file, [rest[:_AT_ONCE]], start)
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
