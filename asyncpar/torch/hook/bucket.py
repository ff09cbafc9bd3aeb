"""A bucket of gradients of DistributedDataParallel, and its transfer into and out of a scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncpar.codecs import Values
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.gradsync.groups import Name
from asyncpar.gradsync.plan import Bucket, Slot
from asyncpar.gradsync.schemes import Place, ReductionStep, Scheme
from asyncpar.gradsync.schemes.scheme import all_finite
from asyncpar.torch.arrays import array_of


class HookedBucket:
    """A bucket of gradients with the interface of ``torch.distributed.GradBucket``, which Python cannot create."""

    __slots__ = ("_buffer", "_index", "_is_last", "_parameters", "_views_of")

    def __init__(
        self,
        buffer: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        views_of: Callable[[torch.Tensor], list[torch.Tensor]],
        *,
        index: int,
        is_last: bool,
    ) -> None:
        self._buffer = buffer
        self._parameters = [*parameters]
        self._views_of = views_of
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        """Return the number of the bucket in the order of buckets of a backward pass, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients of the bucket as a vector."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the gradients of the bucket."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of each parameter of the bucket, a view of ``buffer``."""
        return self._views_of(self._buffer)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, in the order of their gradients."""
        return [*self._parameters]

    def is_last(self) -> bool:
        """Return whether it is the last bucket of the backward pass."""
        return self._is_last


@dataclass(frozen=True, slots=True, kw_only=True)
class HookBucket:
    """``buffer`` holds the concatenated gradients of ``parameters``, to be replaced by their mean over ranks.

    ``index`` counts the buckets of a backward pass from 0 up to the one that ``is_last``.  With a ``refusal`` this rank
    does not reduce the bucket, and the others receive the reason; ``buffer`` is not read then.
    """

    index: int
    is_last: bool
    buffer: torch.Tensor
    parameters: tuple[torch.Tensor, ...]
    refusal: BaseException | None = None

    @classmethod
    def of(cls, bucket: dist.GradBucket | HookedBucket) -> HookBucket:
        """Return the contents of ``bucket``, which torch reuses and which must not be kept."""
        if not isinstance(bucket, dist.GradBucket | HookedBucket):
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
        """Copy the gradients as float32; values beyond its range become infinite."""
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


@dataclass(frozen=True, slots=True)
class BucketTransfer:
    """Moves gradients into and out of ``scheme``, in threads; it works in their memory if ``is_lent``."""

    scheme: Scheme
    given: HookBucket
    is_lent: bool
    ranks: int

    def divide(self, owed: Sequence[tuple[Slot, Values]]) -> None:
        """Add ``owed``, residuals of earlier steps, and divide by the number of ranks like torch."""
        for slot, values in owed:
            self.given.add(slice(slot.start, slot.stop), values)
        self.given.scale(1.0 / self.ranks)

    def read(self) -> None:
        """Copy the gradients into the scheme, unless it works in their memory."""
        if not self.is_lent:
            self.given.read_into(self.scheme.payload)

    def write(self) -> None:
        """Set the gradients to the mean, or all to NaN if some are not finite on some rank."""
        if not self.scheme.is_finite:
            self.given.fill(float("nan"))
            return
        factor = self.scheme.factor(self.ranks)
        if factor != 1.0:
            reduced = self.scheme.reduced
            np.multiply(reduced, np.float32(factor), out=reduced)
        if not self.is_lent:
            self.given.write(self.scheme.reduced)


class UncompressedSum(Scheme):
    """The mean without a codec: sums, in the lent memory, gradients that were divided by the number of ranks.

    With ``checks_finite`` it checks whether the result is finite.
    """

    is_mean = True

    def __init__(self, bucket: Bucket, communicator: Communicator, *, checks_finite: bool) -> None:
        super().__init__(bucket, size=communicator.size)
        self._communicator = communicator
        self._checks_finite = checks_finite

    def lend(self, values: NDArray[Any]) -> bool:
        self.flat = self.result = values
        return True

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:  # noqa: ARG002
        if self.size == 1:
            return []
        return [ReductionStep(None, lambda: self._communicator.all_reduce(self.flat, key=f"{key}/exact"))]

    def settle(self) -> None:
        self.is_finite = not self._checks_finite or all_finite(self.flat)
