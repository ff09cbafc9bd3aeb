"""Run the real executor on virtual time: stages compute nothing, which takes 1 second in each direction.

So a whole backward pass takes 2, as in the usual figures of pipeline schedules; messages take no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

import numpy as np

from asyncpar.core.config.parallel import PipelineScheduleType as Kind
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage
from asyncpar.pipeline import PipelineSchedule, simulate
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.pipeline.result import PipelineResult
from asyncpar.testing import local_world, run_virtual

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

RANKS, MICRO_BATCHES = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A schedule and, where the table has it, what it should take: makespan over the busiest rank's computing."""

    kind: Kind
    chunks: int = 1
    table: tuple[int, int] | None = None

    @property
    def schedule(self) -> PipelineSchedule:
        return PipelineSchedule(
            num_stages=RANKS, num_microbatches=MICRO_BATCHES, schedule_type=self.kind, num_model_chunks=self.chunks
        )


CASES = (
    Case(kind=Kind.SEQUENTIAL),
    Case(kind=Kind.ROUND_ROBIN),
    Case(kind=Kind.GPIPE, table=(33, 24)),
    Case(kind=Kind.ONE_FORWARD_ONE_BACKWARD, table=(33, 24)),
    Case(kind=Kind.INTERLEAVED_ONE_F1B, chunks=2, table=(57, 48)),
    Case(kind=Kind.INTERLEAVED_ONE_F1B, chunks=4, table=(105, 96)),
    Case(kind=Kind.ZERO_BUBBLE, table=(27, 24)),
    Case(kind=Kind.ZBV, table=(51, 48)),
    Case(kind=Kind.DUALPIPE_V),
)


class _VirtualCompute:
    """Computes at once, then sleeps for what the stages say that it has cost; one call at a time."""

    def __init__(self) -> None:
        self.cost = 0.0
        self._lock = asyncio.Lock()

    async def run(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        async with self._lock:
            result = function(*arguments)
            cost, self.cost = self.cost, 0.0
            await asyncio.sleep(cost)
            return result


class _Timed(Stage[None]):
    """Hands arrays on: 1 second forward, 1 for each half of a backward pass."""

    def __init__(self, compute: _VirtualCompute) -> None:
        self._compute = compute

    def forward(self, x: Array) -> tuple[Array, None]:
        self._compute.cost += 1.0
        return x, None

    def backward(
        self,
        saved: None,  # noqa: ARG002
        dy: Array,
        on_gradient: OnGradient | None = None,  # noqa: ARG002
        deferred: Deferred | None = None,
    ) -> Array:
        self._compute.cost += 1.0
        if deferred is None:
            self._compute.cost += 1.0
        else:
            deferred.append(self._spend)
        return dy

    def parameters(self) -> tuple[Parameter, ...]:
        return ()

    def _spend(self, on_gradient: OnGradient | None) -> None:  # noqa: ARG002
        self._compute.cost += 1.0


def measure_case(case: Case) -> dict[str, Any]:
    """Run the executor on all ranks, on virtual time; return what it took beside the simulation and the table."""
    results = run_virtual(_run(case.schedule))
    simulation = simulate(case.schedule)
    return {
        "what": "schedule",
        "kind": case.kind,
        "chunks": case.schedule.num_model_chunks,
        "table": case.table,
        "simulated": (simulation.makespan, simulation.ideal),
        "measured": (max(one.seconds for one in results), max(one.seconds_busy for one in results)),
        "peaks": [one.peak_in_flight for one in results],
    }


async def _run(schedule: PipelineSchedule) -> list[PipelineResult]:
    inputs = [np.zeros(1) for _ in range(schedule.num_microbatches)]

    def loss(y: Array, target: Array) -> tuple[float, Array]:  # noqa: ARG001
        return 0.0, y

    async with local_world(schedule.num_stages) as nodes:
        executors = []
        for node in nodes:
            compute = _VirtualCompute()
            stages = [_Timed(compute) for _ in schedule.virtual_stages_of(node.rank)]
            executors.append(PipelineExecutor(schedule, stages, communicator=node.world, compute=compute, loss=loss))
        results = await asyncio.gather(*(executor.run(inputs, inputs) for executor in executors))
        for executor in executors:
            await executor.close()
    return results
