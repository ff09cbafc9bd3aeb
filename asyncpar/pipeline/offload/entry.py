"""One activation that a memory manager holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncpar.pipeline.offload.arrays import Array, owners_in
from asyncpar.pipeline.offload.packing import Skeleton

Key: TypeAlias = tuple[int, int]
"""Chunk and micro-batch."""


@dataclass(slots=True, kw_only=True)
class OnDisk:
    """Where the memory of a value is."""

    skeleton: Skeleton
    start: int
    checksum: int


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A value in memory, or on disk, or on its way (``moving``) between the two."""

    key: Key
    value: Any
    needed: int
    owners: tuple[Array, ...]
    is_wanted: bool = False
    """It stays in memory from now on."""
    is_freed: bool = False
    on_disk: OnDisk | None = None
    moving: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, key: Key, value: Any, needed: int) -> Entry:
        return cls(key=key, value=value, needed=needed, owners=owners_in(value))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes now."""
        return sum(owner.nbytes for owner in self.owners)

    @property
    def can_move_out(self) -> bool:
        return not self.is_wanted and self.moving is None and self.on_disk is None and bool(self.owners)

    def must_stay(self) -> bool:
        """Is it of no use any more to have it on disk?"""
        return self.is_wanted or self.is_freed
