"""One rank of ``versions.py``: operations, asks, steps of all kinds and joins, a line of JSON for each.

It uses nothing but what every version has, and is run with the package of either.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

import asyncpar as ap
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn.optimizers import Adam, Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.zero import ZeROConfig, ZeROOptimizer, ZeROStage

Array = npt.NDArray[np.float32]
Timed = Callable[[], Awaitable[object]]

_PARAMETERS = 8
_WARM_UP = 5
_AT_ONCE = 1000
_KILLED_AT = 20
_JOIN_STEPS = 600
_JOIN_STEP_SECONDS = 0.02
_HIDDEN = 1024


class Echo(ap.Actor):
    """What is asked."""

    @ap.endpoint
    async def echo(self, content: bytes) -> bytes:
        return content


async def median_of(operation: Timed, *, seconds: float, before: Timed | None = None) -> float:
    """Return the median of the seconds of an operation, repeated for about ``seconds``; ``before`` is not counted."""
    times: list[float] = []
    for number in range(_WARM_UP + 1_000_000):
        if before is not None:
            await before()
        begun = time.perf_counter()
        await operation()
        if number >= _WARM_UP:
            times.append(time.perf_counter() - begun)
        if number >= _WARM_UP and sum(times) > seconds and len(times) >= _WARM_UP:
            break
    return statistics.median(times)


async def agreed_count(world: ap.Communicator, operation: Timed, seconds: float) -> int:
    """Return how often all ranks are to repeat a collective that takes as long as the slowest rank finds."""
    for _ in range(_WARM_UP):
        await operation()
    begun = time.perf_counter()
    await operation()
    slowest = await world.all_reduce(np.array([time.perf_counter() - begun]), "max")
    return max(_WARM_UP, min(20_000, int(seconds / float(slowest[0]))))


async def median_together(world: ap.Communicator, operation: Timed, seconds: float) -> float:
    """Return the median of the seconds of a collective operation, on this rank."""
    times: list[float] = []
    for _ in range(await agreed_count(world, operation, seconds)):
        begun = time.perf_counter()
        await operation()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def parameters_of(size: int) -> list[Parameter]:
    """Return parameters of ``size`` bytes together."""
    count = size // 4 // _PARAMETERS
    return [Parameter(f"w{place}", np.zeros(count, np.float32)) for place in range(_PARAMETERS)]


class Cells:
    """What is measured on this rank, and printed by the first one."""

    def __init__(self, node: ap.Node, seconds: float) -> None:
        self._node = node
        self._world = node.world
        self._seconds = seconds

    def _show(self, name: str, seconds: float) -> None:
        if self._node.rank == 0:
            print(json.dumps({"what": "cell", "name": name, "seconds": seconds}), flush=True)

    async def all_reduce(self, sizes: Sequence[int]) -> None:
        """Measure arrays of ``sizes`` bytes."""
        for size in sizes:
            x = np.ones(max(1, size // 4), np.float32)
            operation = partial(self._world.all_reduce, x)
            self._show(f"all_reduce {size}", await median_together(self._world, operation, self._seconds))

    async def asks(self) -> None:
        """Measure an ask of 1 KB, and a thousand at once."""
        await self._node.spawn(Echo, name="echo")
        await self._world.barrier()
        if self._node.rank == 0:
            echo, content = self._node.ref("echo", rank=1, actor_class=Echo), bytes(1024)

            async def many() -> None:
                await asyncio.gather(*(echo.echo(content) for _ in range(_AT_ONCE)))

            self._show("ask 1 KB", await median_of(lambda: echo.echo(content), seconds=self._seconds))
            self._show(f"{_AT_ONCE} asks", await median_of(many, seconds=self._seconds))
        await self._world.barrier()

    async def gradients(self, size: int) -> None:
        """Measure steps of a synchronizer."""
        for codec in ("none", "int8"):
            gradients = {one.name: np.ones(one.shape, np.float32) for one in parameters_of(size)}
            synchronizer = GradientSynchronizer.data_parallel(
                self._world,
                bucketing=GradientBucketingConfig(bucket_size_mb=4.0),
                compression=GradientCompressionConfig(codec=codec),
                name=f"versions {codec}",
            )
            step = partial(synchronizer.synchronize_gradients, gradients)
            self._show(f"gradients {codec}", await median_together(self._world, step, self._seconds))

    async def zero(self, size: int) -> None:
        """Measure steps of ZeRO."""
        for stage in (ZeROStage.STAGE1, ZeROStage.STAGE2, ZeROStage.STAGE3):
            optimizer = ZeROOptimizer(Adam(), ZeROConfig(stage=stage), self._world, name=f"versions {stage}")
            await optimizer.register_parameters(parameters_of(size))
            gradients = {one.name: np.ones(one.shape, np.float32) for one in parameters_of(size)}

            async def step(of: ZeROOptimizer = optimizer, gradients: dict[str, Array] = gradients) -> None:
                of.update_gradients(gradients)
                await of.optimizer_step()

            self._show(f"ZeRO {stage}", await median_together(self._world, step, self._seconds))
            optimizer.close()


async def elastic(size: int, seconds: float) -> None:
    """Measure elastic steps in which nothing happens."""
    async with ap.elastic(portions=2) as job:
        parameters = parameters_of(size)
        optimizer = Optimizer(parameters, Adam())
        gradients = [np.ones(one.shape, np.float32) for one in parameters]
        state = job.state(parameters, optimizer)
        times: list[float] = []
        begun = time.perf_counter()
        async for step in job.steps(state, until=max(20, int(seconds * 50))):
            async with step:
                for portion in step.portions:
                    step.add(portion, gradients)
                await step.update(optimizer, await step.reduce("mean"), learning_rate=1e-6)
            times.append(time.perf_counter() - begun)
            begun = time.perf_counter()
        if job.rank == 0:
            cell = {"what": "cell", "name": "elastic step", "seconds": statistics.median(times[_WARM_UP:])}
            print(json.dumps(cell), flush=True)


async def join(size: int) -> None:
    """Measure how long an elastic job has one rank less, from its kill to the first step of the rank in its place."""
    async with ap.elastic(portions=2) as job:
        parameters = parameters_of(size)
        optimizer = Optimizer(parameters, Adam())
        gradients = [np.ones(one.shape, np.float32) for one in parameters]
        alone, together, is_new = 0.0, 0.0, None
        async for step in job.steps(job.state(parameters, optimizer), until=_JOIN_STEPS):
            is_new = step.number > 0 if is_new is None else is_new
            if job.rank == 1 and not is_new and step.number == _KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            alone = alone or (time.perf_counter() if job.size == 1 else 0.0)
            together = together or (time.perf_counter() if alone and job.size == 2 else 0.0)
            async with step:
                for portion in step.portions:
                    step.add(portion, gradients)
                await step.update(optimizer, await step.reduce("mean"), learning_rate=1e-6)
            await asyncio.sleep(_JOIN_STEP_SECONDS)
        if job.rank == 0 and not is_new:
            assert together, f"no rank came back within {_JOIN_STEPS} steps"
            print(json.dumps({"what": "cell", "name": "join", "seconds": together - alone}), flush=True)


def distributed_data_parallel(size: int, seconds: float) -> None:
    """Measure steps of a torch model of ``size`` bytes; the last one of a number that all ranks know is the end."""
    import torch  # other parts need none
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import asyncpar.torch  # noqa: F401  # registers the backend

    torch.set_num_threads(1)
    dist.init_process_group("asyncpar")
    layers = max(1, size // 4 // (_HIDDEN * _HIDDEN))
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(_HIDDEN, _HIDDEN, bias=False) for _ in range(layers))))
    x = torch.ones(8, _HIDDEN)
    times: list[float] = []
    for _ in range(_WARM_UP + max(_WARM_UP, int(20 * seconds))):
        begun = time.perf_counter()
        model.zero_grad()
        model(x).sum().backward()
        times.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        cell = {"what": "cell", "name": "DDP", "seconds": statistics.median(times[_WARM_UP:])}
        print(json.dumps(cell), flush=True)
    dist.destroy_process_group()


async def main(options: argparse.Namespace) -> None:
    if options.part == "elastic":
        await elastic(options.step_size, options.seconds)
        return
    if options.part == "join":
        await join(options.step_size)
        return
    async with ap.init() as node:
        cells = Cells(node, options.seconds)
        match options.part:
            case "start":
                await node.world.barrier()
            case "all_reduce":
                await cells.all_reduce([int(size) for size in options.sizes.split(",")])
            case "asks":
                await cells.asks()
            case "gradients":
                await cells.gradients(options.step_size)
            case "zero":
                await cells.zero(options.step_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--sizes", default="4")
    parser.add_argument("--step-size", type=int, required=True)
    settings = parser.parse_args()
    if settings.part == "ddp":
        distributed_data_parallel(settings.step_size, settings.seconds)
    else:
        ap.run(main(settings))
