"""Tests for real GPUs (``scripts/test-gpu``) above the fabric: encoded gradients, replicas, pipelines, the backend.

None of it has run on hardware yet; the same paths are tested on the fake in ``tests/gradsync/test_devices.py``,
``tests/parallel/test_devices.py``, ``tests/pipeline/test_device.py`` and ``tests/device/test_bad_input.py``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from asyncpar.backends import CommunicationRuntime, existing
from asyncpar.backends.nccl import nccl_over
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.core.config.names import CodecChoice
from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.gradsync import GradientCompressionConfig, GradientSynchronizer
from asyncpar.parallel import DDPConfig, init_process_group
from asyncpar.pipeline import PipelineSchedule
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.torch import CudaModuleStage
from tests.device.torch_worlds import nccl_world
from tests.parallel.replicas import open_replica

DEVICES = int(os.environ.get("ASYNCPAR_TEST_GPUS", "1"))
SIZE = 2 if DEVICES == 1 else min(DEVICES, 4)
FEATURES = 64


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank % DEVICES)


def make_module(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 256), torch.nn.ReLU(), torch.nn.Linear(256, FEATURES), torch.nn.BatchNorm1d(FEATURES)
    )


@dataclass
class Parameter:
    name: str
    grad: Any


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "topk:0.05", "topk:0.05+int8", "powersgd:2"])
async def test_encoded_gradients_are_those_of_the_host(codec: CodecChoice) -> None:
    """Bit by bit, but for sums of bf16 and fp16, which NCCL adds in an order of its own."""
    compression = GradientCompressionConfig(codec=codec)
    async with nccl_world(SIZE, devices=min(SIZE, DEVICES)) as nodes:
        made = [GradientSynchronizer.data_parallel(node.world, compression=compression, name="there") for node in nodes]
        host = [GradientSynchronizer.data_parallel(node.world, compression=compression, name="here") for node in nodes]

        async def step(rank: int, turn: int) -> tuple[list[Any], list[Any]]:
            random = np.random.default_rng([rank, turn])
            drawn = [random.normal(size=shape).astype(np.float32) for shape in ((100_000,), (7,), (300, 40))]
            there = [Parameter(f"p{i}", torch.from_numpy(one).to(device_of(rank))) for i, one in enumerate(drawn)]
            here = [Parameter(f"p{i}", one.copy()) for i, one in enumerate(drawn)]
            async with made[rank].step(there):
                pass
            async with host[rank].step(here):
                pass
            return [one.grad.cpu().numpy() for one in there], [one.grad for one in here]

        for turn in range(3):
            for found, wanted in await asyncio.gather(*(step(rank, turn) for rank in range(SIZE))):
                for one, other in zip(found, wanted, strict=True):
                    if codec in ("bf16", "fp16") and SIZE > 2:
                        np.testing.assert_allclose(one, other, atol=0.05)
                    else:
                        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
        how = "staged" if codec.startswith("powersgd") else "encoded on the device by torch"
        assert how in nodes[0].world.algorithm_table()
        for one in (*made, *host):
            one.close()


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("delay", [True, False])
async def test_replicas_of_modules_stay_equal_and_learn(codec: CodecChoice | None, delay: bool) -> None:
    compression = GradientCompressionConfig(codec=codec) if codec else None
    async with nccl_world(SIZE, devices=min(SIZE, DEVICES)) as nodes:

        async def train(rank: int) -> tuple[list[float], list[Any]]:
            stage = CudaModuleStage("it", make_module(seed=rank).to(device_of(rank)))
            optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.05)
            torch.manual_seed(100 + rank)
            x = torch.randn(128, FEATURES, device=device_of(rank))
            losses = []
            config = DDPConfig(delay_all_reduce=delay)
            async with open_replica(nodes[rank], stage, config=config, compression=compression) as ddp:
                for _ in range(10):
                    ddp.zero_grad()
                    y, saved = await ddp.forward(x)
                    value, dy = stage.loss(torch.nn.functional.mse_loss)(y, x)
                    await ddp.backward(saved, dy)
                    await ddp.update(optimizer.step)
                    losses.append(float(value))
            return losses, [one.detach().cpu().numpy() for one in stage.module.parameters()]

        results = await asyncio.gather(*(train(rank) for rank in range(SIZE)))
        for losses, values in results:
            assert losses[-1] < losses[0]
            for one, other in zip(values, results[0][1], strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", list(PipelineScheduleType))
async def test_pipelines_of_modules_compute_what_one_module_does(kind: PipelineScheduleType) -> None:
    schedule = PipelineSchedule(num_stages=SIZE, num_microbatches=4, schedule_type=kind)
    torch.manual_seed(9)
    x, target = torch.randn(4, 8, FEATURES), torch.randn(4, 8, FEATURES)

    def part(place: int) -> torch.nn.Module:
        torch.manual_seed(place)
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.Tanh())

    whole = torch.nn.Sequential(*(part(place) for place in range(schedule.num_virtual_stages))).to(device_of(0))
    wanted = []
    for one, goal in zip(x.to(device_of(0)), target.to(device_of(0)), strict=True):
        loss = torch.nn.functional.mse_loss(whole(one), goal)
        loss.backward()
        wanted.append(float(loss.detach()))
    async with nccl_world(SIZE, devices=min(SIZE, DEVICES)) as nodes:
        workers = [WorkerThread(f"stage {rank}") for rank in range(SIZE)]
        held: list[list[CudaModuleStage]] = []
        executors = []
        for node, worker in zip(nodes, workers, strict=True):
            places = schedule.virtual_stages_of(node.rank)
            held.append([CudaModuleStage(str(place), part(place).to(device_of(node.rank))) for place in places])
            loss_of = held[-1][0].loss(torch.nn.functional.mse_loss)
            executors.append(
                PipelineExecutor(schedule, held[-1], communicator=node.world, compute=worker, loss=loss_of)
            )

        def items(values: torch.Tensor, rank: int) -> Sequence[Any]:
            return list(values.to(device_of(rank)))

        results = await asyncio.gather(
            *(
                executor.run(
                    items(x, rank) if executor.has_first_stage else None,
                    items(target, rank) if executor.has_last_stage else None,
                )
                for rank, executor in enumerate(executors)
            )
        )
        [losses] = [result.losses for result in results if result.losses]
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
        for rank, stages in enumerate(held):
            for place, stage in zip(schedule.virtual_stages_of(rank), stages, strict=True):
                for mine, other in zip(stage.module.parameters(), whole[place].parameters(), strict=True):
                    torch.testing.assert_close(mine.grad.cpu(), other.grad.cpu())
        for executor in executors:
            await executor.close()
        for worker in workers:
            worker.close()


async def test_the_backend_opens_and_reduces() -> None:
    async with nccl_world(SIZE, devices=min(SIZE, DEVICES)) as nodes:

        async def use(rank: int) -> Any:
            runtime = CommunicationRuntime()
            runtime.register_backend("nccl", nccl_over(existing(nodes[rank].world)))
            _, group = await init_process_group("nccl", runtime=runtime)
            x: Any = torch.full((1000,), rank + 1.0, device=device_of(rank))
            found: Any = (await group.run("all_reduce", x)).value
            await runtime.finalize()
            return found.cpu()

        for found in await asyncio.gather(*(use(rank) for rank in range(SIZE))):
            assert bool((found == sum(range(1, SIZE + 1))).all())
