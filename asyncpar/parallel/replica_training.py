"""Replicas of one process that train without waiting for each other: each takes the model, and updates it in its turn.

Theory of operation.  The model is changed in turns.  A replica copies the model's values at the beginning of a step,
computes, and in its turn puts its gradients into the model's, lets the optimizer move the model, and undoes all but its
share, 1 / replicas, of the movement.  Each replica has a clock, like a rank of ``DistributedDataParallel``, which
learns of the steps of the others at once: it decides when a step may begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.errors import PeerCancelled, PeerTimeout, UsageError
from asyncpar.parallel.checked_model import CheckedModel
from asyncpar.parallel.clock import (
    Begin,
    Event,
    PeerSettling,
    PeerStepped,
    Settled,
    SettleWanted,
    StalenessClock,
    StepDone,
    StepUnwanted,
    StepWanted,
)
from asyncpar.parallel.config import SynchronizationMode
from asyncpar.parallel.module import Array
from asyncpar.parallel.update import Mover, UpdateLayout

T = TypeVar("T")


class ReplicaTraining:
    """The steps of ``replicas``, copies of ``model``, in a mode in which they do not average gradients.

    ``timeout``: seconds for which a replica waits for slower ones while no step is done, before ``PeerTimeout``.
    """

    def __init__(
        self,
        model: CheckedModel,
        replicas: Sequence[CheckedModel],
        workers: Sequence[WorkerThread],
        *,
        mode: SynchronizationMode,
        timeout: float | None,
    ) -> None:
        self.replicas = tuple(replicas)
        self.workers = tuple(workers)
        self.turn = asyncio.Lock()
        """Held by a replica that reads or changes the model."""
        self.failure: PeerCancelled | None = None
        size = len(self.replicas)
        self.waited = [0.0] * size
        self._model = model
        self._mover = Mover(UpdateLayout(model.parameters()), share=1.0 / size)
        self._clocks = [StalenessClock(rank=i, size=size, max_staleness=mode.max_staleness) for i in range(size)]
        self._timeout = timeout
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._settling: set[int] = set()
        self._progress_at = 0.0

    async def join(self, index: int) -> None:
        """Start training with ``index``; if it has settled, wait until all have."""
        if index in self._settling:
            await self._answer(index, None)

    async def begin(self, index: int) -> None:
        """Wait until ``index`` may begin a step, and copy the model's values to it."""
        try:
            await self._answer(index, StepWanted())
        except BaseException:
            self._handle(index, StepUnwanted())
            raise
        async with self.turn:
            await self.workers[index].run(self._take_values, index)

    async def update(self, index: int, step: Callable[[], T]) -> T:
        """Run ``step``, which moves the model by the gradients of ``index``."""
        async with self.turn:
            self.check()
            result = await self.workers[index].run(self._move, index, step)
        self._publish(index, StepDone(), lambda steps: PeerStepped(index, steps))
        return result

    def settle(self, index: int) -> None:
        """Exempt ``index`` from staleness bounds until all have settled."""
        self._settling.add(index)
        self._publish(index, SettleWanted(), lambda steps: PeerSettling(index, steps))

    def fail(self, index: int, error: BaseException) -> None:
        """End the steps of all: ``index`` will not continue."""
        if self.failure is not None:
            return
        self.failure = PeerCancelled(
            f"replica {index} has failed: {error!r}", rank=index, operation="step", cause=repr(error)
        )
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self.failure)

    def staleness(self, index: int) -> int:
        """Return how many steps ``index`` is ahead of the slowest."""
        return self._clocks[index].staleness()

    def check(self) -> None:
        """Raise if a replica has failed."""
        if self.failure is not None:
            raise self.failure

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _answer(self, index: int, event: Event | None) -> None:
        """Pass ``event`` to the clock of ``index`` and wait for its answer."""
        self.check()
        loop = asyncio.get_running_loop()
        answer = self._answers[index] = loop.create_future()
        self._progress_at = max(self._progress_at, loop.time())
        try:
            if event is not None:
                self._handle(index, event)
            while not answer.done():
                left = None if self._timeout is None else self._progress_at + self._timeout - loop.time()
                if left is not None and left <= 0.0:
                    raise self._late(index)
                await asyncio.wait({answer}, timeout=left)
            answer.result()
        finally:
            del self._answers[index]

    def _late(self, index: int) -> PeerTimeout:
        slowest = self._clocks[index].slowest()
        return PeerTimeout(
            f"replica {index}: waited {self._timeout} s for a step of replica {slowest}, which is "
            f"{self.staleness(index)} steps behind",
            rank=slowest,
            operation="step",
            cause="it makes no progress",
        )

    def _publish(self, index: int, event: Event, news: Callable[[int], Event]) -> None:
        """Feed ``event`` to the clock of ``index``, and the corresponding event to all others."""
        self._progress_at = asyncio.get_running_loop().time()
        self._handle(index, event)
        steps = self._clocks[index].steps
        for other in range(len(self._clocks)):
            if other != index:
                self._handle(other, news(steps))

    def _handle(self, index: int, event: Event) -> None:
        for command in self._clocks[index].handle(event, asyncio.get_running_loop().time()):
            match command:
                case Begin(waited):
                    self.waited[index] += waited
                case Settled():
                    self._settling.discard(index)
                case _:
                    continue
            answer = self._answers.get(index)
            if answer is not None and not answer.done():
                answer.set_result(None)

    def _take_values(self, index: int) -> None:
        for mine, models in zip(self.replicas[index].parameters(), self._model.parameters(), strict=True):
            np.copyto(mine.value, models.value)

    def _move(self, index: int, step: Callable[[], T]) -> T:
        self._mover.remember()
        for mine, models in zip(self.replicas[index].parameters(), self._model.parameters(), strict=True):
            np.copyto(models.grad, mine.grad)
        try:
            result = step()
        except BaseException:
            self._mover.restore()
            raise
        self._mover.measure()
        return result


class Replica:
    """One replica that trains by itself, on ``device``; use as ``async with``.

    A step is the same as with ``DistributedDataParallel``::

        async with data_parallel.replica(index) as replica:
            for x in batches:
                replica.zero_grad()
                y, saved = await replica.forward(x)
                await replica.backward(saved, loss_gradient(y))
                await replica.update(lambda: optimizer.step(rate))

    The optimizer is one over the parameters of the model, for all replicas.  Leaving the block means that others need
    not wait for this replica; if it is left by an error, they get ``PeerCancelled``.
    """

    def __init__(self, training: ReplicaTraining, index: int, device: str) -> None:
        self.index = index
        self.device = device
        self._training = training
        self._model = training.replicas[index]
        self._worker = training.workers[index]
        self._is_open = self._is_in_step = False

    async def __aenter__(self) -> Self:
        if self._is_open:
            raise UsageError(f"replica {self.index}: this block was entered already")
        self._training.check()
        await self._training.join(self.index)
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = self._is_in_step = False
        if error is not None:
            self._training.fail(self.index, error)
        elif self._training.failure is None:
            self._training.settle(self.index)

    @property
    def is_open(self) -> bool:
        """Whether its block has been entered."""
        return self._is_open

    def zero_grad(self) -> None:
        """Forget the gradients of this replica."""
        self._model.zero_grad()

    async def forward(self, x: NDArray[Any]) -> tuple[Array, Any]:
        """Return the output and the state for ``backward``; the first call of a step begins it.

        Beginning a step waits for slower replicas if the mode requires it, and takes the model's current values.
        """
        self._check()
        if not self._is_in_step:
            await self._training.begin(self.index)
            self._is_in_step = True
        return await self._worker.run(self._model.forward, x)

    async def backward(self, saved: Any, dy: Array) -> Array | None:
        """Add to the gradients of this replica; return that of the input."""
        self._check()
        if not self._is_in_step:
            raise UsageError("backward: expected a forward pass before it, which begins the step")
        return await self._worker.run(self._model.backward, saved, dy)

    async def update(self, step: Callable[[], T]) -> T:
        """Run ``step``, which changes the model by its gradients, those of this replica; return its result.

        The change is weighted by 1 / replicas.  Raises ``NonFiniteValue``, with the parameters unchanged, for a change
        that is not finite.
        """
        self._check()
        if not self._is_in_step:
            raise UsageError("update: expected a forward pass before it, which begins the step")
        result = await self._training.update(self.index, step)
        self._is_in_step = False
        return result

    def staleness(self) -> int:
        """Return how many updates this replica is ahead of the slowest."""
        return self._training.staleness(self.index)

    def waited(self) -> float:
        """Return the seconds for which this replica has waited for slower ones."""
        return self._training.waited[self.index]

    def _check(self) -> None:
        if not self._is_open:
            raise UsageError(f"replica {self.index}: expected its block to be entered; use `async with`")
        self._training.check()
