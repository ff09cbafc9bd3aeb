"""What a hop of a pipeline costs beyond the message: two ranks whose stages compute nothing.

With ROUND_ROBIN there is one micro-batch at a time, so that it takes a round trip and what the executor adds to it: two
hops, the activation and the gradient.  With 1F1B two are under way.  The raw round trip is that of ``send`` and
``recv`` alone, of the same arrays.  What a run costs once, whatever the number of micro-batches (its opening exchange,
its alarm), is told apart by running one micro-batch, too.  All is done on the loop, and in a compute thread, too.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

import asyncpar as ap
from asyncpar.config.parallel import PipelineScheduleType
from asyncpar.node import Node
from asyncpar.nn.parameter import OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage
from asyncpar.parallel.worker import ComputeWorker
from asyncpar.pipeline import PipelineSchedule
from asyncpar.pipeline.execution import Compute
from asyncpar.pipeline.executor import PipelineExecutor

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Values = NDArray[np.float32]

ONE_AT_A_TIME = PipelineScheduleType.ROUND_ROBIN
ONE_F1B = PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD
_REPEATS = 7
_TRIPS = 50


class OnTheLoop:
    """Computes on the event loop, which is right for what takes no time."""

    async def run(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        return function(*arguments)


class Idle(Stage[None]):
    """Hands arrays on."""

    def forward(self, x: Values) -> tuple[Values, None]:
        return x, None

    def backward(
        self, saved: None, dy: Any, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Any:
        return dy

    def parameters(self) -> tuple[Parameter, ...]:
        return ()


def echo(y: Values, target: object) -> tuple[float, Values]:
    """The gradient is the output: as large as the activation."""
    return 0.0, y


async def measure_hops(node: Node, *, sizes: list[int], micro_batches: int) -> None:
    """Measure all sizes; rank 0 prints a line for each."""
    for size in sizes:
        seconds = {"raw": await _time_raw(node.world, np.ones(size // 4, np.float32))}
        for place in ("loop", "thread"):
            worker = ComputeWorker("hops")
            compute: Compute = worker if place == "thread" else OnTheLoop()
            for kind in (ONE_AT_A_TIME, ONE_F1B):
                seconds[f"{kind} {place}"], seconds[f"{kind} {place} once"] = await _time_runs(
                    node.world, compute, kind, size, micro_batches
                )
            worker.close()
        if node.rank == 0:
            record = {"what": "hops", "lane": node.links.lane_kind(1), "size": size, "micro_batches": micro_batches}
            sys.stdout.write(json.dumps(record | {"seconds": seconds}) + "\n")
            sys.stdout.flush()


async def _time_raw(comm: ap.Communicator, array: Values) -> float:
    """Return the seconds of a round trip."""

    async def trips() -> None:
        for _ in range(_TRIPS):
            if comm.rank == 0:
                await comm.send(array, 1)
                await comm.recv(1)
            else:
                await comm.send(await comm.recv(0), 0)

    return await time_median(comm, trips) / _TRIPS


async def _time_runs(
    comm: ap.Communicator, compute: Compute, kind: PipelineScheduleType, size: int, micro_batches: int
) -> tuple[float, float]:
    """Return the seconds of each further micro-batch, and those of a run besides them."""
    totals = {}
    for count in (1, micro_batches):
        schedule = PipelineSchedule(num_stages=2, num_microbatches=count, schedule_type=kind)
        executor = PipelineExecutor(schedule, [Idle()], communicator=comm, compute=compute, loss=echo)
        inputs = [np.ones(size // 4, np.float32) for _ in range(count)]

        async def run(executor: PipelineExecutor = executor, inputs: list[Values] = inputs) -> None:
            await executor.run(inputs, inputs)

        totals[count] = await time_median(comm, run)
        await executor.close()
    each = (totals[micro_batches] - totals[1]) / (micro_batches - 1)
    return each, max(0.0, totals[1] - each)


async def time_median(comm: ap.Communicator, action: Callable[[], Awaitable[None]]) -> float:
    """Return the median seconds on rank 0 of several goes, each begun at the same time, and one before them."""
    times = []
    for _ in range(1 + _REPEATS):
        await comm.barrier()
        started = time.perf_counter()
        await action()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
