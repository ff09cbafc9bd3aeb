"""Stages that compute nothing, and take virtual time for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage
from asyncpar.pipeline import PipelineSchedule, Schedule
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.pipeline.result import PipelineResult
from tests.pipeline.worlds import Ranks

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class VirtualCompute:
    """Computes at once, then sleeps for the cost that the stages report.  One call at a time."""

    def __init__(self) -> None:
        self.cost = 0.0
        self._lock = asyncio.Lock()

    async def run(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        async with self._lock:
            result = function(*arguments)
            cost, self.cost = self.cost, 0.0
            await asyncio.sleep(cost)
            return result


class TimedStage(Stage[int]):
    """Adds one to its input.  Forward takes 1 second, each half of a backward 1, and so a whole one 2."""

    def __init__(self, compute: VirtualCompute, *, fails: Callable[[str, int], None] | None = None) -> None:
        self._compute = compute
        self._fails = fails
        self.log: list[str] = []

    def forward(self, x: Array) -> tuple[Array, int]:
        self._spend("forward", int(x[0]))
        return x + 1.0, int(x[0])

    def backward(
        self, saved: int, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array:
        self._spend("backward", saved)

        def weights(on_gradient: OnGradient | None) -> None:
            self._spend("weight", saved)
            if on_gradient is not None:
                on_gradient("weight")

        if deferred is None:
            weights(on_gradient)
        else:
            deferred.append(weights)
        return dy

    def parameters(self) -> tuple[Parameter, ...]:
        return ()

    def _spend(self, what: str, number: int) -> None:
        if self._fails is not None:
            self._fails(what, number)
        self.log.append(f"{what} {number}")
        self._compute.cost += 1.0


class SlowCommunicator:
    """``communicator`` over lanes on which each message takes ``latency`` seconds."""

    def __init__(self, communicator: Communicator, latency: float) -> None:
        self._communicator = communicator
        self._latency = latency

    def subgroup(self, *arguments: Any, **options: Any) -> Any:
        group = self._communicator.subgroup(*arguments, **options)
        return None if group is None else SlowCommunicator(group, self._latency)

    async def send(self, x: Array, dest: int, *, tag: int = 0) -> None:
        await asyncio.sleep(self._latency)
        await self._communicator.send(x, dest, tag=tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)


def no_loss(y: Array, target: Any) -> tuple[float, Array]:
    """The loss is the target; the gradient is of one."""
    return float(target), np.ones_like(y)


def make_executor(
    schedule: Schedule, communicator: Any, *, fails: Callable[[str, int], None] | None = None, **options: Any
) -> PipelineExecutor:
    """Return the executor of one rank with timed stages."""
    compute = VirtualCompute()
    held = schedule.virtual_stages_of(communicator.rank)
    stages = [TimedStage(compute, fails=fails) for _ in held]
    options = {"loss": no_loss, "compute": compute, "stages": stages, **options}
    stages = options.pop("stages")
    return PipelineExecutor(schedule, stages, communicator=communicator, **options)


def make_inputs(schedule: Schedule, length: int = 3) -> list[Array]:
    """Return inputs of different values."""
    return [np.full(length, 100.0 * micro_batch) for micro_batch in range(schedule.num_microbatches)]


def run_one(executor: PipelineExecutor, **options: Any) -> Coroutine[Any, Any, PipelineResult]:
    """Run the executor with inputs and targets, which ranks without the end stages do not look at."""
    return executor.run(make_inputs(executor.schedule), list(range(executor.schedule.num_microbatches)), **options)


async def run_all(schedule: PipelineSchedule, ranks: Ranks, *, latency: float = 0.0) -> list[PipelineResult]:
    """Run the schedule once on all ranks."""
    communicators = [SlowCommunicator(one, latency) if latency else one for one in ranks.communicators]
    executors = [make_executor(schedule, communicator) for communicator in communicators]
    return await asyncio.gather(*(run_one(executor) for executor in executors))
