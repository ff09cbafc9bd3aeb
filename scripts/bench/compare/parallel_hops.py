"""Measure the cost of a hop of a pipeline beyond the message: two ranks whose stages compute nothing.

With ROUND_ROBIN there is one micro-batch at a time, so that it takes a round trip and what the executor adds to it: two
hops, the activation and the gradient.  With 1F1B two are under way.  The raw round trip is that of ``send`` and
``recv`` alone, of the same arrays.  What a run costs once, whatever the number of micro-batches (its opening
exchange, its alarm), is told apart by running one micro-batch, too.  Layers "compute" on the loop, which shows what the
executor takes, and in a compute thread, as they do in earnest.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

import asyncpar as ap
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.nn.parameter import OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage
from asyncpar.node import Node
from asyncpar.pipeline import PipelineSchedule
from asyncpar.pipeline.execution import Compute
from asyncpar.pipeline.executor import PipelineExecutor

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Values = NDArray[np.float32]

ONE_AT_A_TIME = PipelineScheduleType.ROUND_ROBIN
ONE_F1B = PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD
Action: TypeAlias = Callable[[], Awaitable[None]]

_KINDS = (ONE_AT_A_TIME, ONE_F1B)
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
        self,
        saved: None,  # noqa: ARG002
        dy: Any,
        on_gradient: OnGradient | None = None,  # noqa: ARG002
        deferred: Deferred | None = None,  # noqa: ARG002
    ) -> Any:
        return dy

    def parameters(self) -> tuple[Parameter, ...]:
        return ()


def echo(y: Values, target: object) -> tuple[float, Values]:  # noqa: ARG001
    """The gradient is the output: as large as the activation."""
    return 0.0, y


async def measure_hops(node: Node, *, sizes: list[int], micro_batches: int, repeats: int) -> None:
    """Measure all sizes; rank 0 prints a line for each."""
    for size in sizes:
        seconds = await _measure_size(node.world, size, micro_batches, repeats)
        if node.rank == 0:
            record = {"what": "hops", "lane": node.links.lane_kind(1), "size": size, "micro_batches": micro_batches}
            sys.stdout.write(json.dumps(record | {"seconds": seconds}) + "\n")
            sys.stdout.flush()


async def _measure_size(comm: ap.Communicator, size: int, micro_batches: int, repeats: int) -> dict[str, float]:
    """Return the seconds of a raw round trip and, for both orders and places, of a micro-batch and of a run besides."""
    worker = WorkerThread("hops")
    computes: dict[str, Compute] = {"loop": OnTheLoop(), "thread": worker}
    cases = [(kind, place, count) for kind in _KINDS for place in computes for count in (1, micro_batches)]
    executors = [_make_executor(comm, computes[place], kind, count) for kind, place, count in cases]
    runs = [_running(executor, size) for executor in executors]
    raw, *totals = await _medians(comm, [_raw_trips(comm, np.ones(size // 4, np.float32)), *runs], repeats)
    for executor in executors:
        await executor.close()
    worker.close()
    seconds = {"raw": raw / _TRIPS}
    for (kind, place, count), one, many in zip(cases[::2], totals[::2], totals[1::2], strict=True):
        assert count == 1, "each run of one micro-batch comes before its run of many"
        each = (many - one) / (micro_batches - 1)
        seconds |= {f"{kind} {place}": each, f"{kind} {place} once": max(0.0, one - each)}
    return seconds


def _raw_trips(comm: ap.Communicator, array: Values) -> Action:
    async def trips() -> None:
        for _ in range(_TRIPS):
            if comm.rank == 0:
                await comm.send(array, 1)
                await comm.recv(1)
            else:
                await comm.send(await comm.recv(0), 0)

    return trips


def _make_executor(
    comm: ap.Communicator, compute: Compute, kind: PipelineScheduleType, micro_batches: int
) -> PipelineExecutor:
    schedule = PipelineSchedule(num_stages=2, num_microbatches=micro_batches, schedule_type=kind)
    group = comm.subgroup(range(comm.size))
    assert group is not None, "it has all ranks"
    return PipelineExecutor(schedule, [Idle()], communicator=group, compute=compute, loss=echo)


def _running(executor: PipelineExecutor, size: int) -> Action:
    inputs = [np.ones(size // 4, np.float32) for _ in range(executor.schedule.num_microbatches)]

    async def run() -> None:
        await executor.run(inputs, inputs)

    return run


async def _medians(comm: ap.Communicator, actions: Sequence[Action], repeats: int) -> list[float]:
    """Return the median seconds of each action on rank 0; they take turns, and each begins everywhere at once."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(1 + repeats):
        for action, kept in zip(actions, times, strict=True):
            await comm.barrier()
            started = time.perf_counter()
            await action()
            kept.append(time.perf_counter() - started)
    return [statistics.median(kept[1:]) for kept in times]
