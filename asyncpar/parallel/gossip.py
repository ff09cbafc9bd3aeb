"""The modes in which ranks do not wait for each other: they exchange the changes made by their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.errors import UsageError
from asyncpar.parallel.clock import StalenessClock
from asyncpar.parallel.config import SynchronizationMode
from asyncpar.parallel.exchange import UpdateExchange
from asyncpar.parallel.module import Trainable
from asyncpar.parallel.replicas import broadcast
from asyncpar.parallel.update import AsyncUpdate, Mover, UpdateLayout

T = TypeVar("T")


class UpdateGossip:
    """Exchanges the updates of ``parameters``, each weighted by 1 / ranks.

    Updates of others are applied at the beginning of a step, so that they do not change parameters between forward and
    backward passes.  Every update is applied exactly once on every rank; once all have settled, parameters differ by
    rounding, and take the bits of rank 0.  ``key`` is equal on all ranks, and is used once.
    """

    def __init__(
        self, parameters: Sequence[Trainable], communicator: Communicator, mode: SynchronizationMode, *, key: str
    ) -> None:
        group = communicator.subgroup(range(communicator.size), name=f"{communicator.name} updates", key=key)
        assert group is not None, "it has all ranks"
        self._communicator = group
        self._parameters = tuple(parameters)
        layout = UpdateLayout(self._parameters)
        self._mover = Mover(layout, share=1.0 / group.size)
        self._clock = StalenessClock(rank=group.rank, size=group.size, max_staleness=mode.max_staleness)
        self._exchange = UpdateExchange(group, layout, self._clock)
        self._is_in_step = False

    async def start(self) -> None:
        """Start receiving."""
        await self._exchange.start()

    async def close(self, *, failed: bool) -> None:
        """Stop; see ``UpdateExchange.close``."""
        await self._exchange.close(failed=failed)

    def staleness(self) -> int:
        """Return how many updates this rank is known to be ahead of the slowest."""
        return self._clock.staleness()

    def waited(self) -> float:
        """Return the seconds for which this rank has waited for slower ones."""
        return self._exchange.waited

    async def begin_step(self, worker: WorkerThread) -> None:
        """Begin a step, unless one is in progress: when the clock allows it, with all updates that have arrived."""
        if not self._is_in_step:
            await self._exchange.begin_step()
            self._is_in_step = True
            await self._apply_arrived(worker)

    async def update(self, step: Callable[[], T], worker: WorkerThread) -> T:
        """Run ``step`` and send its changes."""
        if not self._is_in_step:
            raise UsageError("update: expected a forward pass before it, which begins the step")
        result, update = await worker.run(self._move, step)
        self._exchange.publish(update)
        self._is_in_step = False
        return result

    async def settle(self, worker: WorkerThread) -> None:
        """Wait until all ranks have all updates and equal parameters.  A step in progress is abandoned."""
        self._is_in_step = False
        await self._exchange.settle()
        await self._apply_arrived(worker)
        await broadcast(self._parameters, self._communicator, root=0, key="settled")
        await self._communicator.barrier(key="settled")  # before it, no rank makes updates that would be overwritten

    async def _apply_arrived(self, worker: WorkerThread) -> None:
        arrived = await self._exchange.take_arrived()
        if arrived is not None:
            await worker.run(arrived.apply)

    def _move(self, step: Callable[[], T]) -> tuple[T, AsyncUpdate]:
        self._mover.remember()
        try:
            result = step()
        except BaseException:
            self._mover.restore()
            raise
        return result, self._mover.measure()
