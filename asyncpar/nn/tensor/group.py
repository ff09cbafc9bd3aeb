"""Collectives of the ranks that share a tensor-parallel layer, called from the compute thread."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.bridge import LoopBridge, PendingResult
from asyncpar.nn.parameter import Array
from asyncpar.shards.plan import split_bounds


class TensorGroup(ABC):
    """A group of ranks that each hold a part of the same layers, and run them in the same order.

    Calls block the calling thread and match by their order.  Parts along a dimension are those of ``split_bounds``.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process in the group, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def start_all_reduce(self, x: Array) -> Callable[[], Array]:
        """Start summing ``x`` in place over all ranks; the returned function waits for the sum and returns ``x``.

        ``x`` must be C-contiguous and unchanged until then.
        """

    @abstractmethod
    def all_reduce_max(self, x: Array) -> Array:
        """Replace ``x`` by its elementwise maximum over ranks, and return it."""

    @abstractmethod
    def all_gather(self, x: Array, dim: int) -> Array:
        """Return the parts of all ranks, concatenated along ``dim``."""

    @abstractmethod
    def reduce_scatter(self, x: Array, dim: int) -> Array:
        """Return this rank's part, along ``dim``, of the sum of all ``x``, which is not changed."""

    def all_reduce(self, x: Array) -> Array:
        """Sum ``x``, in place, over all ranks, and return it."""
        return self.start_all_reduce(x)()

    def renew(self, number: int) -> None:  # noqa: B027 (nothing to do for a group of one)
        """Restart the count of calls, after a failure that may have kept some ranks from calls that others have made.

        All ranks call it, with the same ``number``, a new one each time, while no call is in progress.
        """

    @property
    def seconds_waiting(self) -> float:
        """Seconds for which the compute thread has waited in calls so far."""
        return 0.0

    def bounds(self, length: int) -> tuple[int, int]:
        """Return start and stop of this rank's part of ``length``."""
        return split_bounds(length, self.size)[self.rank]


class SingleRankGroup(TensorGroup):
    """A group of one rank: every collective returns its argument."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def start_all_reduce(self, x: Array) -> Callable[[], Array]:
        return lambda: x

    def all_reduce_max(self, x: Array) -> Array:
        return x

    def all_gather(self, x: Array, dim: int) -> Array:  # noqa: ARG002 (all are one)
        return x

    def reduce_scatter(self, x: Array, dim: int) -> Array:  # noqa: ARG002 (all are one)
        return x


class BridgedGroup(TensorGroup):
    """The ranks of a communicator, reached through a bridge to its event loop.

    ``look`` is called with this rank's input of each collective before it begins.

    ``clock`` returns seconds, by which waits are measured.
    """

    def __init__(
        self,
        communicator: Communicator,
        bridge: LoopBridge,
        *,
        clock: Callable[[], float] = time.perf_counter,
        look: Callable[[Array], None] = lambda _: None,
    ) -> None:
        self._origin = self._communicator = communicator
        self._bridge = bridge
        self._clock = clock
        self._look = look
        self._seconds_waiting = 0.0

    def renew(self, number: int) -> None:
        group = self._origin.subgroup(range(self.size), name=self._origin.name, key=f"slices {number}")
        assert group is not None, "this rank is in its own group"
        self._communicator = group

    @property
    def rank(self) -> int:
        return self._communicator.rank

    @property
    def size(self) -> int:
        return self._communicator.size

    def start_all_reduce(self, x: Array) -> Callable[[], Array]:
        self._look(x)
        pending = self._bridge.start(lambda: self._communicator.all_reduce(x))
        return lambda: self._wait(pending)

    def all_reduce_max(self, x: Array) -> Array:
        self._look(x)
        return self._call(lambda: self._communicator.all_reduce(x, op="max"))

    def all_gather(self, x: Array, dim: int) -> Array:
        first = np.ascontiguousarray(np.moveaxis(x, dim, 0))
        self._look(first)
        gathered = self._call(lambda: self._communicator.all_gather_v(first))
        return np.ascontiguousarray(np.moveaxis(gathered, 0, dim))

    def reduce_scatter(self, x: Array, dim: int) -> Array:
        """Parts are padded to one length, because the collective cuts into equal chunks."""
        bounds = split_bounds(x.shape[dim], self.size)
        widest = max(stop - start for start, stop in bounds)
        first = np.moveaxis(x, dim, 0)
        padded = np.zeros((self.size, widest, *first.shape[1:]), x.dtype)
        for part, (start, stop) in zip(padded, bounds, strict=True):
            part[: stop - start] = first[start:stop]
        self._look(padded)
        own = self._call(lambda: self._communicator.reduce_scatter(padded))
        start, stop = bounds[self.rank]
        return np.ascontiguousarray(np.moveaxis(own[0][: stop - start], 0, dim))

    @property
    def seconds_waiting(self) -> float:
        return self._seconds_waiting

    def _call(self, make: Callable[[], Coroutine[Any, Any, Array]]) -> Array:
        return self._wait(self._bridge.start(make))

    def _wait(self, pending: PendingResult[Array]) -> Array:
        began = self._clock()
        try:
            return pending.wait()
        finally:
            self._seconds_waiting += self._clock() - began
