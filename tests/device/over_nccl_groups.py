"""Tests for real GPUs (``scripts/test-gpu``): parts of a split, ranks by host, and messages, as tensors of torch.

``test_gpu_suite.py`` runs them without a GPU.  Hosts are names here: all ranks are on one machine.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch

from tests.device.torch_worlds import nccl_world

DEVICES = int(os.environ.get("ASYNCPAR_TEST_GPUS", "1"))
SIZE = 4
ELEMENTS = 100_000


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank % DEVICES)


def full(rank: int, value: float, elements: int = ELEMENTS) -> Any:
    return torch.full((elements,), value, device=device_of(rank))


def check(tensor: torch.Tensor, value: float) -> None:
    assert bool((tensor.cpu() == value).all()), tensor


async def test_parts_of_a_split_reduce_on_their_own() -> None:
    async with nccl_world(SIZE, devices=min(SIZE, DEVICES)) as nodes:

        async def use(rank: int) -> None:
            world: Any = nodes[rank].world
            check(await world.all_reduce(full(rank, 1.0)), SIZE)
            part: Any = await world.split(rank % 2)
            check(await part.all_reduce(full(rank, rank + 1.0)), sum(range(rank % 2 + 1, SIZE + 1, 2)))
            check(await world.all_reduce(full(rank, 2.0)), 2 * SIZE)

        await asyncio.gather(*map(use, range(SIZE)))


@pytest.mark.parametrize("pin", [None, "all_reduce@hierarchical;broadcast@hierarchical"])
async def test_ranks_of_two_hosts_reduce_by_a_route_that_they_tried_or_by_host(pin: str | None) -> None:
    hosts = ["a"] * (SIZE // 2) + ["b"] * (SIZE // 2)
    async with nccl_world(SIZE, devices=min(SIZE, DEVICES), hosts=hosts, pin=pin) as nodes:

        async def use(rank: int) -> None:
            world: Any = nodes[rank].world
            for _ in range(2):
                check(await world.all_reduce(full(rank, rank + 1.0)), sum(range(1, SIZE + 1)))
                check(await world.broadcast(full(rank, rank + 1.0), root=SIZE - 1), SIZE)

        await asyncio.gather(*map(use, range(SIZE)))
        way = "hierarchical" if pin else "nccl"
        assert f"all_reduce of device arrays  {way}" in nodes[0].world.algorithm_table()


@pytest.mark.parametrize("elements", [10, ELEMENTS])
async def test_messages_go_around_in_both_directions(elements: int) -> None:
    async with nccl_world(SIZE, devices=min(SIZE, DEVICES)) as nodes:

        async def use(rank: int) -> None:
            world: Any = nodes[rank].world
            before, after = (rank - 1) % SIZE, (rank + 1) % SIZE
            for turn in range(3):
                came = [full(rank, -1.0, elements) for _ in range(2)]
                await asyncio.gather(
                    world.send(full(rank, rank + 10.0 * turn, elements), after),
                    world.send(full(rank, rank + 10.0 * turn, elements), before, tag=1),
                    world.recv(before, out=came[0]),
                    world.recv(after, out=came[1], tag=1),
                )
                check(came[0], before + 10.0 * turn)
                check(came[1], after + 10.0 * turn)

        await asyncio.gather(*map(use, range(SIZE)))
        if elements == ELEMENTS:
            assert "send of device arrays  nccl" in nodes[0].world.algorithm_table()


async def test_lanes_are_measured_and_choose_and_cancelled_copies_leave_arrays_alone() -> None:
    async with nccl_world(SIZE, devices=min(SIZE, DEVICES)) as nodes:

        async def use(rank: int) -> None:
            world: Any = nodes[rank].world
            index = device_of(rank).index or 0
            await world.calibrate(device=index)
            assert world.device_lanes.within.is_measured
            assert world.device_lanes.copy.is_measured
            assert world.predict("all_reduce", 1 << 20, on_devices=True) > 0
            check(await world.all_reduce(full(rank, 1.0)), SIZE)
            for turns in range(0, 40, 8):
                given = full(rank, 1.0)
                call = asyncio.ensure_future(world.all_reduce(given, algorithm="staged"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait([call])
                given.fill_(7.0)
                await asyncio.sleep(0.05)
                check(given, 7.0)
            check(await world.all_reduce(full(rank, 2.0)), 2 * SIZE)

        await asyncio.gather(*map(use, range(SIZE)))
        assert "lanes of devices: within " in nodes[0].world.algorithm_table()
