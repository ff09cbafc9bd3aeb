"""Whole tensors, and the pieces of them that ranks of a layout hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from asyncpar.checkpoint import Piece, Wanted
from asyncpar.core.config.slicing import TensorSlice

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensor:
    """A whole tensor; tensor-parallel ranks cut it along ``dim`` of ``view``, or each have all of it (None)."""

    name: str
    whole: NDArray[Any]
    kind: str = "value"
    dim: int | None = None
    view: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks are ``(d * tp + t) * pp + p``.  With ``zero``, each of ``dp`` holds a range of the flat local part."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: bool = False

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    def parts(self, tensors: Sequence[Tensor], rank: int) -> list[tuple[Tensor, TensorSlice, tuple[int, int]]]:
        """Return what ``rank`` holds: of every ``pp``-th tensor a slice, and of that a flat range."""
        d, t, p = rank // (self.tp * self.pp), rank // self.pp % self.tp, rank % self.pp
        held = []
        for index, tensor in enumerate(tensors):
            if index % self.pp == p:
                part = self.part(tensor, t)
                size = math.prod(part.local_shape)
                flat = cut(size, self.dp, d) if self.zero else (0, size)
                held.append((tensor, part, flat))
        return held

    def part(self, tensor: Tensor, t: int) -> TensorSlice:
        shape = tensor.whole.shape
        if tensor.dim is None:
            return TensorSlice.whole(shape)
        view = tensor.view or shape
        start, stop = cut(view[tensor.dim], self.tp, t)
        local = tuple(stop - start if at == tensor.dim else length for at, length in enumerate(view))
        return TensorSlice(
            global_shape=shape, view_shape=view, dim=tensor.dim, start=start, stop=stop, local_shape=local
        )

    def pieces(self, tensors: Sequence[Tensor], rank: int) -> list[Piece]:
        return [
            Piece(
                name=tensor.name,
                kind=tensor.kind,
                slice=part,
                flat=flat,
                array=part.cut(tensor.whole).reshape(-1)[flat[0] : flat[1]],
            )
            for tensor, part, flat in self.parts(tensors, rank)
        ]

    def wanted(self, tensors: Sequence[Tensor], rank: int) -> list[Wanted]:
        return [
            Wanted(name=tensor.name, kind=tensor.kind, slice=part, flat=flat, dtype=tensor.whole.dtype)
            for tensor, part, flat in self.parts(tensors, rank)
        ]

    def check(self, tensors: Sequence[Tensor], rank: int, arrays: Sequence[NDArray[Any]]) -> None:
        """Assert that ``arrays`` are, bit for bit, what ``rank`` holds."""
        parts = self.parts(tensors, rank)
        assert len(arrays) == len(parts)
        for (tensor, part, flat), array in zip(parts, arrays, strict=True):
            expected = part.cut(tensor.whole)
            if flat != (0, expected.size):
                expected = expected.reshape(-1)[flat[0] : flat[1]]
            assert array.shape == expected.shape, tensor.name
            assert array.dtype == expected.dtype, tensor.name
            assert array.tobytes() == expected.tobytes(), f"{tensor.name} differs on rank {rank}"


def cut(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return a range of ceil chunks: the last ones are shorter, or empty."""
    chunk = -(-length // parts)
    return min(index * chunk, length), min((index + 1) * chunk, length)


def random_bits(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> NDArray[Any]:
    """Return any bits at all, NaN among them."""
    content = np.random.default_rng(seed).bytes(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(content, dtype).reshape(shape)


def small_model(seed: int = 0) -> list[Tensor]:
    """Return tensors of every sort: uneven sizes, a view, a bias that all have, bfloat16, a scalar, an empty one."""
    f32, f64 = np.dtype(np.float32), np.dtype(np.float64)
    return [
        Tensor(name="embedding", whole=random_bits((11, 6), f32, seed), dim=0),
        Tensor(name="project", whole=random_bits((6, 15), f32, seed + 1), dim=2, view=(6, 3, 5)),
        Tensor(name="project", kind="first", whole=random_bits((6, 15), f64, seed + 2), dim=2, view=(6, 3, 5)),
        Tensor(name="bias", whole=random_bits((7,), BFLOAT16, seed + 3)),
        Tensor(name="scale", whole=random_bits((), f64, seed + 4)),
        Tensor(name="nothing", whole=random_bits((0, 3), f32, seed + 5), dim=1),
    ]
