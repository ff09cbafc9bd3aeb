"""A bucket of gradients as DistributedDataParallel hands it to its hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncpar.codecs import Values
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import array_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBucket:
    """``buffer`` holds the gradients of ``parameters`` one after another, and is to hold their mean over ranks.

    ``index`` counts the buckets of a backward pass from 0 up to the one that ``is_last``.
    """

    index: int
    is_last: bool
    buffer: torch.Tensor
    parameters: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, bucket: dist.GradBucket) -> GivenBucket:
        """Return what there is to know of ``bucket``, which must not be kept itself."""
        if not isinstance(bucket, dist.GradBucket):
            raise UsageError(
                "gradient_hook: expected a bucket of DistributedDataParallel, got "
                f"{type(bucket).__name__}; FSDP and others have hooks of another kind"
            )
        buffer = bucket.buffer().detach()
        if buffer.is_sparse:
            raise UsageError(
                "gradient_hook: expected dense gradients, got sparse ones; use Embedding(sparse=False), or no hook"
            )
        return cls(
            index=bucket.index(),
            is_last=bucket.is_last(),
            buffer=buffer,
            parameters=tuple(bucket.parameters()),
        )

    @property
    def array(self) -> NDArray[Any]:
        """The gradients in their own memory and dtype."""
        return array_of(self.buffer, "gradients")

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    def check(self) -> None:
        """Raise ``UsageError`` for gradients that cannot be reduced here."""
        if not self.buffer.dtype.is_floating_point:
            raise UsageError(f"gradient_hook: expected gradients of a floating dtype, got {self.buffer.dtype}")
        array = self.array
        count = sum(parameter.numel() for parameter in self.parameters)
        if array.shape != (count,) or not array.flags.c_contiguous:
            raise UsageError(f"gradient_hook: expected a bucket of {count} values in a row, got {list(array.shape)}")

    def read_into(self, out: Values) -> None:
        """Copy the gradients as float32; what is beyond its range becomes infinite."""
        torch.from_numpy(out).copy_(self.buffer)

    def write(self, values: Values) -> None:
        """Replace the gradients."""
        self.buffer.copy_(torch.from_numpy(values))

    def add(self, place: slice, values: Values) -> None:
        """Add ``values`` to the gradients in ``place``."""
        self.buffer[place].add_(torch.from_numpy(values))

    def scale(self, factor: float) -> None:
        """Multiply the gradients, with torch's rounding."""
        self.buffer.mul_(factor)

    def fill(self, value: float) -> None:
        self.buffer.fill_(value)
