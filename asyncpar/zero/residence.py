"""Which values are at home: stage 3.

Theory of operation.  Units are gathered before they are used, some ahead of time, and released after.  Everything is
decided in the compute thread, as a function of the order in which units are used; so all replicas, which compute in one
order, gather the same units in the same order.  Gathers run on the loop; the thread waits for one only if it is not
through yet.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from asyncpar.collectives.bridge import LoopBridge
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array
from asyncpar.zero.config import MIB
from asyncpar.zero.errors import MemoryExceeded
from asyncpar.zero.memory import TransientBytes
from asyncpar.zero.unit import Unit

FORWARD, BACKWARD = 1, -1
"""Where the unit is that is used next."""


class Residence:
    """Gathers ``units``, at most ``depth`` ahead, and as far as all of them take ``most`` bytes."""

    def __init__(
        self, units: Sequence[Unit], *, depth: int, most: int, bridge: LoopBridge, bytes_held: TransientBytes
    ) -> None:
        self._units = tuple(units)
        self._depth = depth
        self._most = most
        self._bridge = bridge
        self._bytes_held = bytes_held
        self._users: Counter[str] = Counter()
        self._gathering: set[asyncio.Task[object]] = set()
        self._loop_thread = threading.get_ident()
        for unit in self._units:
            self._check_fits(unit, unit.nbytes)

    @property
    def at_home(self) -> tuple[str, ...]:
        """The parameters that are gathered."""
        return tuple(self._users)

    @property
    def nbytes_needed(self) -> int:
        """The most bytes that gathered parameters take."""
        return min(self._most, sum(unit.nbytes for unit in self._units))

    # -- in the compute thread ---------------------------------------------------------------------------------------

    @contextmanager
    def using(self, index: int, direction: int) -> Iterator[None]:
        """Have the values of a unit in its parameters within the block.  Blocks until they are there."""
        unit = self._units[index]
        unit.holders += 1
        try:
            if unit.holders == 1:
                self._bring(unit, index, direction)
            yield
        finally:
            unit.holders -= 1
            if not unit.holders and unit.is_home:
                self.release(unit)

    def _bring(self, unit: Unit, index: int, direction: int) -> None:
        if threading.get_ident() == self._loop_thread:
            raise UsageError(
                "a sharded layer must run in a compute thread, such as that of a ComputeWorker, not on the event loop"
            )
        if unit.pending is None:
            self._make_room(unit)
            self._start(unit)
        self._prefetch(index, direction)
        self._take_in(unit, self._taken(unit))

    def _start(self, unit: Unit) -> None:
        unit.pending = self._bridge.start(partial(self._gather, unit))

    def _taken(self, unit: Unit) -> list[Array]:
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

    def _make_room(self, wanted: Unit) -> None:
        """Forget units that were gathered too early, last ones first, until ``wanted`` fits, too."""
        for unit in reversed(self._units):
            if self._bytes_in_use() <= self._most:
                return
            if unit.pending is not None and unit is not wanted:
                self._taken(unit)
                self._drop(unit)
        self._check_fits(wanted, self._bytes_in_use())

    def _bytes_in_use(self) -> int:
        return sum(unit.nbytes for unit in self._units if unit.is_busy)

    def _check_fits(self, unit: Unit, nbytes: int) -> None:
        if nbytes > self._most:
            raise MemoryExceeded(
                f"max_memory_usage_mb: expected room for {nbytes / MIB:.3g} MiB to gather {unit.name} "
                f"({', '.join(share.parameter.name for share in unit.shares)}), got {self._most / MIB:.3g} MiB "
                f"beside what reductions need"
            )

    # -- on the loop, while no thread computes -----------------------------------------------------------------------

    def check_room(self, unit: Unit) -> None:
        """Raise ``MemoryExceeded``, on all replicas alike, when ``unit`` does not fit beside what is there."""
        self._check_fits(unit, unit.nbytes + self._bytes_held.gathered)

    async def gather(self, unit: Unit) -> None:
        """Give the parameters of ``unit`` their values, until ``release``."""
        self._take_in(unit, await self._gather(unit))

    async def forget_prefetched(self) -> None:
        """Drop what was gathered and not used: it is out of date after a step."""
        for unit in self._units:
            if unit.pending is not None:
                taken = partial(self._taken, unit)
                await asyncio.get_running_loop().run_in_executor(None, taken)
                self._drop(unit)

    async def abandon(self) -> None:
        """Give up all units that others may be waiting for.  Waits for nobody."""
        for task in self._gathering:
            task.cancel()
        if self._gathering:
            await asyncio.wait(self._gathering)
        for unit in self._units:
            unit.pending = None
            self._drop(unit)
            for gather in unit.gathers():
                gather.give_up()

    async def _gather(self, unit: Unit) -> list[Array]:
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

    def release(self, unit: Unit) -> None:
        """Take the values from the parameters that nobody else uses."""
        unit.is_home = False
        for share in unit.shares:
            name = share.parameter.name
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._bytes_held.add(gathered=-share.gathered_bytes)
                share.parameter.release_value()

    def _take_in(self, unit: Unit, values: Sequence[Array]) -> None:
        self._drop(unit)
        for share, value in zip(unit.shares, values, strict=True):
            name = share.parameter.name
            if not self._users[name]:  # a layer that shares the parameter may have brought it already
                share.parameter.restore_value(value.reshape(share.parameter.shape))
                self._bytes_held.add(gathered=share.gathered_bytes)
            self._users[name] += 1
        unit.is_home = True

    def _drop(self, unit: Unit) -> None:
        """Count values that have arrived as gone."""
        self._bytes_held.add(gathered=-unit.arrived)
        unit.arrived = 0
