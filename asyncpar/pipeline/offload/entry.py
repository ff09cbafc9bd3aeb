"""The values that a memory manager holds, and figures of their memory and disk."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncpar.core.tables import bytes_text, html_table, text_table
from asyncpar.pipeline.offload.packing import Array, Skeleton, owners_in

Key: TypeAlias = tuple[int, int]
"""Chunk and micro-batch."""


@dataclass(slots=True, kw_only=True)
class OnDisk:
    """The place of a value's memory on disk."""

    skeleton: Skeleton
    start: int
    checksum: int


@dataclass(slots=True, kw_only=True, eq=False)
class OffloadEntry:
    """A value in memory, or on disk, or on its way (``moving``) between the two."""

    key: Key
    value: Any
    needed: int
    owners: tuple[Array, ...]
    is_wanted: bool = False
    """Whether it stays in memory from now on."""
    is_freed: bool = False
    on_disk: OnDisk | None = None
    moving: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, key: Key, value: Any, needed: int) -> OffloadEntry:
        return cls(key=key, value=value, needed=needed, owners=owners_in(value))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it currently takes."""
        return sum(owner.nbytes for owner in self.owners)

    @property
    def can_move_out(self) -> bool:
        return not self.is_wanted and self.moving is None and self.on_disk is None and bool(self.owners)

    def must_stay(self) -> bool:
        """Return whether a copy on disk has become useless."""
        return self.is_wanted or self.is_freed


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A number of transfers, and their bytes."""

    count: int = 0
    nbytes: int = 0

    def plus(self, nbytes: int) -> Volume:
        """Return the volume with one more transfer."""
        return Volume(count=self.count + 1, nbytes=self.nbytes + nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsageStats:
    """Measured figures, in bytes of the arrays themselves, shared memory counted once.

    ``current_bytes`` and ``peak_bytes`` are in memory, ``current_count`` and ``peak_count`` held anywhere (in flight);
    ``offloaded`` was written to disk and ``restored`` read back from there; ``retrieved`` was requested, wherever it
    was.
    """

    current_bytes: int
    peak_bytes: int
    current_count: int
    peak_count: int
    stored: Volume
    retrieved: Volume
    offloaded: Volume
    restored: Volume

    def __str__(self) -> str:
        """Return a table of values and bytes, with units."""
        return text_table(self._rows(), left=1)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str, str]]:
        volumes = [(name, getattr(self, name)) for name in ("stored", "retrieved", "offloaded", "restored")]
        return [
            ("values of micro-batches", "count", "size"),
            ("now", f"{self.current_count:,}", bytes_text(self.current_bytes)),
            ("at the peak", f"{self.peak_count:,}", bytes_text(self.peak_bytes)),
            *((name, f"{volume.count:,}", bytes_text(volume.nbytes)) for name, volume in volumes),
        ]
