"""Which part of a whole tensor a rank holds.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """The range ``start`` to ``stop`` along dimension ``dim`` of a tensor that is looked at as ``view_shape``.

    ``view_shape`` is the whole tensor reshaped in C order such that the part is one range; normally it is
    ``global_shape``.  The columns of queries, keys and values side by side, of shape (inputs, 3 outputs), are cut by
    heads through a view of shape (inputs, 3, outputs).  ``local_shape`` is that of the part as its owner holds it.
    """

    global_shape: tuple[int, ...]
    view_shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    local_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if math.prod(self.view_shape) != math.prod(self.global_shape):
            raise UsageError(f"view_shape: expected as many values as {self.global_shape}, got {self.view_shape}")
        if not 0 <= self.dim < max(1, len(self.view_shape)):
            raise UsageError(f"dim: expected a dimension of {self.view_shape}, got {self.dim}")
        length = self.view_shape[self.dim] if self.view_shape else 1
        if not 0 <= self.start <= self.stop <= length:
            raise UsageError(f"start, stop: expected a range within 0..{length}, got {self.start}..{self.stop}")
        if math.prod(self.local_shape) != math.prod(self._part_shape):
            raise UsageError(f"local_shape: expected as many values as {self._part_shape}, got {self.local_shape}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> TensorSlice:
        """Return the slice that is everything."""
        stop = shape[0] if shape else 1
        return cls(global_shape=shape, view_shape=shape, dim=0, start=0, stop=stop, local_shape=shape)

    @classmethod
    def along(cls, shape: tuple[int, ...], dim: int, start: int, stop: int) -> TensorSlice:
        """Return a range along one dimension of a tensor of ``shape``."""
        local = tuple(stop - start if at == dim else length for at, length in enumerate(shape))
        return cls(global_shape=shape, view_shape=shape, dim=dim, start=start, stop=stop, local_shape=local)

    @property
    def is_whole(self) -> bool:
        """Is it everything?"""
        return not self.view_shape or (self.start, self.stop) == (0, self.view_shape[self.dim])

    def cut(self, whole: NDArray[Any]) -> NDArray[Any]:
        """Return a C-contiguous copy of the part."""
        if whole.shape != self.global_shape:
            raise UsageError(f"whole: expected shape {self.global_shape}, got {whole.shape}")
        part: NDArray[Any] = np.ascontiguousarray(self._part_of(whole.reshape(self.view_shape)))
        return np.array(part.reshape(self.local_shape), order="C")

    def put(self, part: NDArray[Any], whole: NDArray[Any]) -> None:
        """Write the part to its place in ``whole``, which must be C-contiguous."""
        if part.shape != self.local_shape:
            raise UsageError(f"part: expected shape {self.local_shape}, got {part.shape}")
        if whole.shape != self.global_shape or not whole.flags.c_contiguous:
            raise UsageError(f"whole: expected a C-contiguous array of shape {self.global_shape}, got {whole.shape}")
        self._part_of(whole.reshape(self.view_shape))[...] = part.reshape(self._part_shape)

    @property
    def _part_shape(self) -> tuple[int, ...]:
        return tuple(self.stop - self.start if at == self.dim else n for at, n in enumerate(self.view_shape))

    def _part_of(self, view: NDArray[Any]) -> NDArray[Any]:
        if not self.view_shape:
            return view
        return view[(slice(None),) * self.dim + (slice(self.start, self.stop),)]
