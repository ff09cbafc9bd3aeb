"""Gathering of layers' parameters before they compute and release afterwards: stage 3.

Theory of operation.  Units are gathered before use, some ahead of time, and released afterwards.  Everything is decided
in the compute thread, as a function of the order in which units are used; so all replicas, which compute in one order,
gather the same units in the same order.  Gathers run on the loop; the thread waits for one only if it is not done yet.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from asyncpar.core.concurrency.bridge import LoopBridge, PendingResult
from asyncpar.core.config.slicing import ceil_div
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage
from asyncpar.zero.buckets import BucketGather, Means
from asyncpar.zero.config import MIB
from asyncpar.zero.errors import MemoryExceeded
from asyncpar.zero.memory import TransientBytes
from asyncpar.zero.partition import Partition, gather_bytes, make_partition, most_gathered, usual_widths


class ParameterUnit:
    """The parameters ``members``, in separate buckets.

    ``name`` is that of the unit on all replicas.  ``holders`` counts the users of the values, ``pending`` are values in
    transit.  ``arrived`` counts bytes of values that have arrived, but are not in the parameters yet; they are in the
    parameters while it ``is_whole``.
    """

    def __init__(self, name: str, members: Sequence[int], means: Means) -> None:
        self.name = name
        self.shares = [means.shares[member] for member in members]
        self.partition: Partition = make_partition(
            [means.partition.specs[member] for member in members],
            means.partition.size,
            bucket_bytes=means.config.bucket_bytes_of(means.partition.nbytes),
        )
        self.holders = 0
        self.pending: PendingResult[list[Array]] | None = None
        self.arrived = 0
        self.is_whole = False
        self.nbytes = gather_bytes(self.partition, usual_widths(means.partition, means.config))
        """Bytes of the whole values and of the largest bucket, which are held during a gather."""
        self._means = means

    @property
    def value_nbytes(self) -> int:
        """Bytes of the whole values."""
        return sum(spec.count * spec.dtype.itemsize for spec in self.partition.specs)

    @property
    def is_busy(self) -> bool:
        """Whether it takes memory."""
        return self.holders > 0 or self.pending is not None

    async def gather(self) -> list[Array]:
        """Gather its parameters and return their flat values."""
        arrays, specs, size = self._means.arrays, self.partition.specs, self.partition.size
        padded: list[Array] = [arrays.empty((size * ceil_div(spec.count, size),), spec.dtype) for spec in specs]
        if size == 1:
            for share, value in zip(self.shares, padded, strict=True):
                value[...] = share.own_value
        else:
            for gather in self.gathers():
                await gather.run(padded, has_own=False)
        return [value[: spec.count] for value, spec in zip(padded, specs, strict=True)]

    def gathers(self) -> list[BucketGather]:
        """Return the bucket gathers of which the next gather consists."""
        key = f"{self._means.key()}/unit/{self.name}"
        return [
            BucketGather(bucket, self._means, self.partition, self.shares, key=key) for bucket in self.partition.buckets
        ]


FORWARD, BACKWARD = 1, -1
"""The direction in which the unit lies that is used next."""


class ParameterGatherer:
    """Gathers ``units``, at most ``depth`` ahead and within ``most`` bytes.

    The units are passed through in ``runs``, one of which may begin before another one ends.
    """

    def __init__(
        self,
        units: Sequence[ParameterUnit],
        *,
        depth: int,
        most: int,
        bridge: LoopBridge,
        bytes_held: TransientBytes,
        runs: int = 1,
    ) -> None:
        self._units = tuple(units)
        self._depth = depth
        self._runs = runs
        self._most = most
        self._bridge = bridge
        self._bytes_held = bytes_held
        self._users: Counter[str] = Counter()
        self._gathering: set[asyncio.Task[object]] = set()
        self._loop_thread = threading.get_ident()
        for unit in self._units:
            self._check_fits(unit, unit.nbytes)

    @property
    def gathered(self) -> tuple[str, ...]:
        """The names of the gathered parameters."""
        return tuple(self._users)

    @property
    def nbytes_needed(self) -> int:
        """Peak bytes of gathered parameters."""
        return min(self._most, most_gathered([unit.nbytes for unit in self._units], self._depth, self._runs))

    # -- in the compute thread ---------------------------------------------------------------------------------------

    @contextmanager
    def using(self, index: int, direction: int) -> Iterator[None]:
        """Provide the values of a unit in its parameters within the block.  Blocks until they have arrived."""
        unit = self._units[index]
        unit.holders += 1
        try:
            if unit.holders == 1:
                self._bring(unit, index, direction)
            yield
        finally:
            unit.holders -= 1
            if not unit.holders and unit.is_whole:
                self.release(unit)

    def _bring(self, unit: ParameterUnit, index: int, direction: int) -> None:
        if threading.get_ident() == self._loop_thread:
            raise UsageError(
                "a sharded layer must run in a compute thread, such as that of a WorkerThread, not on the event loop"
            )
        if unit.pending is None:
            self._make_room(unit)
            self._start(unit)
        self._prefetch(index, direction)
        self._take_in(unit, self._taken(unit))

    def _start(self, unit: ParameterUnit) -> None:
        unit.pending = self._bridge.start(partial(self._gather, unit))

    def _taken(self, unit: ParameterUnit) -> list[Array]:
        """Wait for the values of ``unit`` and return them."""
        assert unit.pending is not None, "it was started"
        pending, unit.pending = unit.pending, None
        return pending.wait()

    def _prefetch(self, index: int, direction: int) -> None:
        for ahead in range(1, self._depth + 1):
            place = index + ahead * direction
            if not 0 <= place < len(self._units):
                return
            unit = self._units[place]
            if unit.is_busy:
                continue
            if self._bytes_in_use() + unit.nbytes > self._most:
                return
            self._start(unit)

    def _make_room(self, wanted: ParameterUnit) -> None:
        """Drop units that were gathered too early, latest first, until ``wanted`` fits, too."""
        for unit in reversed(self._units):
            if self._bytes_in_use() <= self._most:
                return
            if unit.pending is not None and unit is not wanted:
                self._taken(unit)
                self._drop(unit)
        self._check_fits(wanted, self._bytes_in_use())

    def _bytes_in_use(self) -> int:
        return sum(unit.nbytes for unit in self._units if unit.is_busy)

    def _check_fits(self, unit: ParameterUnit, nbytes: int) -> None:
        if nbytes > self._most:
            raise MemoryExceeded(
                f"max_memory_usage_mb: expected room for {nbytes / MIB:.3g} MiB to gather {unit.name} "
                f"({', '.join(share.parameter.name for share in unit.shares)}), got {self._most / MIB:.3g} MiB "
                f"beside what reductions need"
            )

    # -- on the loop, while no thread computes -----------------------------------------------------------------------

    def check_room(self, unit: ParameterUnit) -> None:
        """Raise ``MemoryExceeded``, on all replicas alike, if ``unit`` does not fit beside current memory."""
        self._check_fits(unit, unit.nbytes + self._bytes_held.gathered)

    async def gather(self, unit: ParameterUnit) -> None:
        """Give the parameters of ``unit`` their values, until ``release``."""
        self._take_in(unit, await self._gather(unit))

    async def forget_prefetched(self) -> None:
        """Drop values that were gathered and not used: they are out of date after a step."""
        for unit in self._units:
            if unit.pending is not None:
                taken = partial(self._taken, unit)
                await asyncio.get_running_loop().run_in_executor(None, taken)
                self._drop(unit)

    async def abandon(self) -> None:
        """Abort all gathers that other ranks may be waiting for.  Does not wait."""
        for task in self._gathering:
            task.cancel()
        if self._gathering:
            await asyncio.wait(self._gathering)
        for unit in self._units:
            unit.pending = None
            self._drop(unit)
            for gather in unit.gathers():
                gather.give_up()

    async def _gather(self, unit: ParameterUnit) -> list[Array]:
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        self._gathering.add(task)
        try:
            values = await unit.gather()
        finally:
            self._gathering.discard(task)
        unit.arrived = unit.value_nbytes
        self._bytes_held.add(gathered=unit.arrived)
        return values

    # -- parameters --------------------------------------------------------------------------------------------------

    def release(self, unit: ParameterUnit) -> None:
        """Remove the values from the parameters that no other unit uses."""
        unit.is_whole = False
        for share in unit.shares:
            name = share.parameter.name
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._bytes_held.add(gathered=-share.gathered_bytes)
                share.parameter.release_value()

    def _take_in(self, unit: ParameterUnit, values: Sequence[Array]) -> None:
        self._drop(unit)
        for share, value in zip(unit.shares, values, strict=True):
            name = share.parameter.name
            if not self._users[name]:  # a layer that shares the parameter may have gathered it already
                share.parameter.restore_value(value.reshape(share.parameter.shape))
                self._bytes_held.add(gathered=share.gathered_bytes)
            self._users[name] += 1
        unit.is_whole = True

    def _drop(self, unit: ParameterUnit) -> None:
        """Count arrived values as released."""
        self._bytes_held.add(gathered=-unit.arrived)
        unit.arrived = 0


class ShardedStage(Stage[Any]):
    """``inner``, with parameters gathered before each pass and released after it.

    Runs in a compute thread, which waits here for missing values.  Deferred weight gradients must not need values;
    those of all layers of ``asyncpar.nn`` do not.  To recompute activations, shard the layer that recomputes, not the
    one inside it, so that values are not gathered again.
    """

    def __init__(self, inner: Stage[Any], index: int) -> None:
        self.inner = inner
        self._index = index
        self._gatherer: ParameterGatherer | None = None

    def settle(self, gatherer: ParameterGatherer) -> None:
        """Use ``gatherer`` from now on; until then, parameters are whole."""
        self._gatherer = gatherer

    def forward(self, x: Any) -> tuple[Array, Any]:
        if self._gatherer is None:
            return self.inner.forward(x)
        with self._gatherer.using(self._index, FORWARD):
            return self.inner.forward(x)

    def forward_again(self, x: Any) -> tuple[Array, Any]:
        if self._gatherer is None:
            return self.inner.forward_again(x)
        with self._gatherer.using(self._index, BACKWARD):
            return self.inner.forward_again(x)

    def backward(
        self, saved: Any, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array | None:
        if self._gatherer is None:
            return self.inner.backward(saved, dy, on_gradient, deferred)
        with self._gatherer.using(self._index, BACKWARD):
            return self.inner.backward(saved, dy, on_gradient, deferred)

    def parameters(self) -> tuple[Parameter, ...]:
        return self.inner.parameters()

    def generators(self) -> tuple[np.random.Generator, ...]:
        return self.inner.generators()
