"""The part of a tensor that a rank holds.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError


def ceil_div(number: int, divisor: int) -> int:
    """Return ``number / divisor``, rounded up."""
    return -(-number // divisor)


def ceil_chunk(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return start and stop of one of ``parts`` ceil chunks of ``count`` values."""
    step = ceil_div(count, parts)
    return min(part * step, count), min((part + 1) * step, count)


def ceil_chunks(count: int, parts: int) -> list[tuple[int, int]]:
    """Return start and stop of each of ``parts`` ceil chunks of ``count`` values; the last may be short or empty.

    Raises ``UsageError`` for less than one part.
    """
    if parts < 1:
        raise UsageError(f"parts: expected 1 or more, got {parts}")
    step = ceil_div(count, parts)
    return [(min(part * step, count), min((part + 1) * step, count)) for part in range(parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """The range ``start`` to ``stop`` along dimension ``dim`` of a tensor viewed as ``view_shape``.

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
        """Return the slice that covers the whole tensor."""
        stop = shape[0] if shape else 1
        return cls(global_shape=shape, view_shape=shape, dim=0, start=0, stop=stop, local_shape=shape)

    @classmethod
    def along(cls, shape: tuple[int, ...], dim: int, start: int, stop: int) -> TensorSlice:
        """Return the slice of a range along one dimension of a tensor of ``shape``."""
        local = tuple(stop - start if at == dim else length for at, length in enumerate(shape))
        return cls(global_shape=shape, view_shape=shape, dim=dim, start=start, stop=stop, local_shape=local)

    @property
    def is_whole(self) -> bool:
        """Whether the slice covers the whole tensor."""
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


def split_layers(num_layers: int, ranks: Sequence[int], given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage, in the order of the model.

    ``ranks[v]`` is the pipeline rank that holds virtual stage ``v``.  ``given`` None: equal numbers.  Otherwise it has
    one number per rank, which the virtual stages there share in parts that differ by one at most, or one per virtual
    stage.  Raises ``UsageError`` unless they add up to ``num_layers`` with at least one in each.
    """
    virtual, stages = len(ranks), len(set(ranks))
    chunks = virtual // stages
    if given is None:
        return _split_evenly(num_layers, stages, chunks)
    if len(given) not in (stages, virtual) or sum(given) != num_layers or min(given) < 1:
        lengths = f"{stages}" if chunks == 1 else f"{stages} or {virtual}"
        raise UsageError(
            f"layers_per_stage: expected {lengths} positive numbers with sum {num_layers}, got {list(given)}"
        )
    if len(given) == virtual:
        return tuple(given)
    if min(given) < chunks:
        raise UsageError(
            f"layers_per_stage: expected at least {chunks} for each rank, which holds {chunks} pieces of the model, "
            f"got {list(given)}"
        )
    shares = [iter(spread_layers(count, chunks)) for count in given]
    return tuple(next(shares[rank]) for rank in ranks)


def spread_layers(num_layers: int, virtual_stages: int) -> tuple[int, ...]:
    """Return numbers of layers that differ by one at most, larger ones first: a split of layers that do not divide.

    Raises ``UsageError`` if there are fewer layers than virtual stages.
    """
    each, rest = divmod(num_layers, virtual_stages)
    if not each:
        raise UsageError(f"num_layers: expected at least {virtual_stages}, one for each stage, got {num_layers}")
    return tuple(each + (stage < rest) for stage in range(virtual_stages))


def _split_evenly(num_layers: int, stages: int, chunks: int) -> tuple[int, ...]:
    virtual = stages * chunks
    of_what = f"pp_size = {stages}" if chunks == 1 else f"pp_size * num_model_chunks = {stages} * {chunks}"
    if num_layers < virtual:
        raise UsageError(f"num_layers: expected at least {of_what}, got {num_layers}")
    each, rest = divmod(num_layers, virtual)
    if rest:
        raise UsageError(
            f"num_layers: expected a multiple of {of_what}, got {num_layers}; give layers_per_stage to split unevenly"
        )
    return (each,) * virtual
