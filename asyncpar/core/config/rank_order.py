"""The layout of a world's ranks along named axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from asyncpar.errors import UsageError

AXES = ("tp", "cp", "ep", "dp", "pp")
"""Axes that an order may name without giving them a size: tensor, context, expert, data and pipeline parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """Axes of a world with their sizes; the first one has adjacent ranks as neighbours."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, order: str, sizes: Mapping[str, int]) -> RankOrder:
        """Read an order such as ``"tp-cp-dp-pp"``, fastest axis first (the spelling of Megatron-LM).

        Every axis of ``sizes`` must occur; another one of ``AXES`` has size 1.
        """
        if not isinstance(order, str):
            raise UsageError(f"order: expected axis names joined by '-', got {order!r}")
        names = order.split("-")
        if len(set(names)) != len(names) or any(not name.isalpha() for name in names):
            raise UsageError(f"order: expected different axis names joined by '-', got {order!r}")
        missing = [name for name in sizes if name not in names]
        if missing:
            raise UsageError(f"order: expected every axis of {'-'.join(sizes)}, got {order!r} without {missing[0]}")
        for name in names:
            if name not in sizes and name not in AXES:
                raise UsageError(
                    f"order: expected axes among {', '.join(dict.fromkeys((*sizes, *AXES)))}, got {name!r} in {order!r}"
                )
        for name, size in sizes.items():
            if size < 1:
                raise UsageError(f"{name}_size: expected a positive number of ranks, got {size}")
        return cls(axes=tuple((name, sizes.get(name, 1)) for name in names))

    def __str__(self) -> str:
        """Axes of several ranks, fastest first; equal texts mean equal layouts."""
        return " x ".join(f"{name} {size}" for name, size in self.axes if size > 1) or "one rank"

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of ``rank`` along each axis."""
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank: expected 0..{self.world_size - 1}, got {rank}")
        place: dict[str, int] = {}
        for name, size in self.axes:
            rank, place[name] = divmod(rank, size)
        return place

    def rank_at(self, place: Mapping[str, int]) -> int:
        """Return the rank at ``place``; axes it leaves out count as 0."""
        rank, stride = 0, 1
        for name, size in self.axes:
            at = place.get(name, 0)
            if not 0 <= at < size:
                raise UsageError(f"{name}: expected a coordinate 0..{size - 1}, got {at}")
            rank += at * stride
            stride *= size
        return rank

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` along ``axis`` only, itself included, in order of that axis."""
        place = self.coordinates(rank)
        return tuple(self.rank_at({**place, axis: at}) for at in range(self._size(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups along ``axis``, in order of their first rank."""
        size, stride = self._size(axis), self._stride(axis)
        return tuple(
            tuple(range(first, first + size * stride, stride))
            for block in range(0, self.world_size, size * stride)
            for first in range(block, block + stride)
        )

    def blocks(self, axes: Collection[str]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ along ``axes`` only, each ascending, in order of their first rank."""
        for axis in axes:
            self._size(axis)
        blocks: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            blocks.setdefault(tuple(at for name, at in place.items() if name not in axes), []).append(rank)
        return tuple(map(tuple, blocks.values()))

    def _stride(self, axis: str) -> int:
        """Return the distance between the ranks of neighbours along ``axis``."""
        names = [name for name, _ in self.axes]
        return math.prod(size for _, size in self.axes[: names.index(axis)])

    def _size(self, axis: str) -> int:
        for name, size in self.axes:
            if name == axis:
                return size
        raise UsageError(f"axis: expected one of {', '.join(name for name, _ in self.axes)}, got {axis!r}")
