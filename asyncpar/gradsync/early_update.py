"""Updates of parameters within the step: means are handed on as they become known, while the rest is in flight.

Theory of operation.  Schemes report which elements of a bucket are final: one without a codec as its all-reduce
completes them, others when the bucket is decoded.  Nothing is handed on before the block of the step is left, since the
backward pass reads the parameters.  One thread at a time hands on, and it takes everything available, so an update
needs no locks.  Whether the step succeeds is known when all buckets of all ranks are done; if it fails, the update is
undone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.errors import UsageError
from asyncpar.gradsync.config import NonFinitePolicy
from asyncpar.gradsync.layout import BucketLayout
from asyncpar.gradsync.plan import Parameters
from asyncpar.gradsync.schemes import Scheme
from asyncpar.gradsync.schemes.device import DeviceScheme


class EarlyUpdate(Protocol):
    """Updates parameters in a step, for example ``nn.optimizers.EarlyStep``.

    ``take`` gets the ``mean`` of the flat elements ``part`` of the gradient of parameter ``name``, in the gradient's
    dtype, each element once per step, in a thread, one call at a time.  The memory of the mean may be overwritten
    later.  After the last call, ``commit`` or ``undo`` is called once: ``undo``, if the step fails or is skipped, must
    restore everything.
    """

    def take(self, name: str, part: slice, mean: NDArray[Any]) -> None: ...

    def commit(self) -> None: ...

    def undo(self) -> None: ...


class _Range(NamedTuple):
    """Final elements ``start`` to ``stop`` of the result of ``scheme``."""

    scheme: Scheme
    start: int
    stop: int


class UpdateFeed:
    """Hands means to ``update`` in one step of ``flows`` buckets."""

    def __init__(self, update: EarlyUpdate, parameters: Parameters, *, flows: int) -> None:
        self._update = update
        self._parameters = parameters
        self._waiting: deque[_Range] = deque()
        self._flows = flows
        self._is_open = False
        self._is_over = False
        self._news = asyncio.Event()

    def put(self, scheme: Scheme, start: int, stop: int) -> None:
        """Queue final elements of the result of ``scheme``."""
        self._waiting.append(_Range(scheme, start, stop))
        self._news.set()

    def flow_is_over(self) -> None:
        """Count a finished bucket; after the last one nothing more comes."""
        self._flows -= 1
        self._news.set()

    def open(self) -> None:
        """Start handing on: the backward pass of this rank is over."""
        self._is_open = True
        self._news.set()

    async def run(self) -> None:
        """Hand on means as they come, until all have come."""
        while self._flows or self._waiting or not self._is_open:
            self._news.clear()
            if self._is_open and self._waiting:
                ranges = [*self._waiting]
                self._waiting.clear()
                nbytes = sum((one.stop - one.start) * one.scheme.result.itemsize for one in ranges)
                await off_loop(lambda: self._take(ranges), nbytes=nbytes)  # noqa: B023
            else:
                await self._news.wait()

    def commit(self) -> None:
        """End the update: the step has succeeded on all ranks, and nothing is undone from here on."""
        if not self._is_over:
            self._is_over = True
            self._update.commit()

    async def undo(self) -> None:
        """Undo the update, unless it was committed."""
        if not self._is_over:
            self._is_over = True
            await off_loop(self._update.undo, nbytes=self._nbytes)

    @property
    def _nbytes(self) -> int:
        return sum(parameter.grad.nbytes for parameter in self._parameters.values())

    def _take(self, ranges: Sequence[_Range]) -> None:
        for scheme, start, stop in ranges:
            factor = scheme.factor(scheme.size)
            for slot in scheme.bucket.slots:
                low, high = max(start, slot.start), min(stop, slot.stop)
                if low < high:
                    dtype = self._parameters[slot.name].grad.dtype
                    mean = _mean(scheme.result[low:high], factor, dtype)
                    self._update.take(slot.name, slice(low - slot.start, high - slot.start), mean)


def _mean(reduced: NDArray[Any], factor: float, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the final values of a gradient of ``dtype``; see ``layout_cache.unpack``."""
    if factor == 1.0:
        return reduced if reduced.dtype == dtype else reduced.astype(dtype)
    mean = np.empty(reduced.shape, dtype)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        np.multiply(reduced, np.asarray(factor, reduced.dtype), out=mean, casting="same_kind")
    return mean


def check_update(*, policy: NonFinitePolicy, layout: BucketLayout) -> None:
    """Raise ``UsageError`` if means are not known before the end of the step, or not on the host."""
    if policy is NonFinitePolicy.DROP:
        raise UsageError("update: not with when_not_finite = drop, which may reduce a bucket again; use abort")
    if layout.mirrors is not None or any(isinstance(scheme, DeviceScheme) for scheme in layout.schemes):
        raise UsageError("update: expected gradients in memory of the host, got some on devices")
