"""Tests for real GPUs (``scripts/test-gpu``): the communicator suite and gradients, as tensors of torch over NCCL."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import pytest
import torch

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.testing.collectives import CommunicatorConformance
from tests.backends.extras import outputs_of
from tests.device.torch_worlds import OnTorch, nccl_world

DEVICES = int(os.environ.get("ASYNCPAR_TEST_GPUS", "1"))
SIZES = (1, 2, 4) if DEVICES == 1 else tuple(size for size in (1, 2, 3, 4, 8) if size <= DEVICES)


class TestTensorsOverNccl(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = SIZES

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with nccl_world(size, devices=min(size, DEVICES)) as nodes:
            yield [cast(Communicator, OnTorch(node.world, cast(Any, None), node.rank % DEVICES)) for node in nodes]


@dataclass
class Parameter:
    name: str
    grad: Any


async def test_gradients_of_a_backward_pass_are_averaged_on_their_own_streams() -> None:
    size = SIZES[-1]
    async with nccl_world(size, devices=min(size, DEVICES)) as nodes:
        made = [GradientSynchronizer.data_parallel(node.world) for node in nodes]

        async def step(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            torch.manual_seed(rank)
            device = torch.device("cuda", rank % DEVICES)
            model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).to(
                device
            )
            model(torch.randn(64, 256, device=device)).square().sum().backward()
            parameters = [Parameter(name, one.grad) for name, one in model.named_parameters()]
            alone = [one.grad.clone().cpu() for one in parameters]
            async with made[rank].step(parameters) as running:
                for parameter in reversed(parameters):
                    running.ready(parameter.name)
            return alone, [one.grad.cpu() for one in parameters]

        results = await asyncio.gather(*(step(rank) for rank in range(size)))
        for place, means in enumerate(zip(*(result[1] for result in results), strict=True)):
            expected = torch.stack([result[0][place] for result in results]).mean(0)
            for mean in means:
                assert torch.equal(mean, means[0])
                torch.testing.assert_close(mean, expected)
        for one in made:
            one.close()


@pytest.mark.parametrize("path", ["torch", "asyncpar"])
@pytest.mark.parametrize("ranks", [max(2, DEVICES)])
def test_the_torch_backend_trains_ddp_on_gpus(ranks: int, path: str, tmp_path: Any) -> None:
    """By torch's own NCCL, or by asyncpar's; two ranks on one GPU need NCCL 2.30 there.

    ``tests/torch/test_cuda_path.py`` has the operations of asyncpar's without a GPU.
    """
    program = tmp_path / "train.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('asyncpar')\n"
        "device = torch.device('cuda', int(os.environ['LOCAL_RANK']) % torch.cuda.device_count())\n"
        "torch.cuda.set_device(device)\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(device))\n"
        "model(torch.full((4, 8), float(dist.get_rank()), device=device)).sum().backward()\n"
        "print('grad', model.module.weight.grad.sum().item())\n"
        "dist.destroy_process_group()\n"
    )
    shared = f"NCCL_MULTI_RANK_GPU_ENABLE={os.environ.get('NCCL_MULTI_RANK_GPU_ENABLE', '0')}"
    command = [
        "env",
        shared,
        f"ASYNCPAR_TORCH_CUDA={path}",
        sys.executable,
        "-m",
        "asyncpar",
        "launch",
        f"--nproc-per-node={ranks}",
        str(program),
    ]
    [output] = outputs_of(command, home=tmp_path, timeout=200)
    expected = 4.0 * 64 * sum(range(ranks)) / ranks
    assert output.count(f"grad {expected}") == ranks, output
