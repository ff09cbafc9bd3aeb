"""Communicators keep the promises of all communicators over device arrays, by NCCL as the fake fabric has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar, cast

from asyncpar.collectives.communicator import Communicator
from tests.collectives.sampled_sizes import OfSampledSizes
from tests.device.device_worlds import OnDevices, device_world
from tests.device.fake_devices import FakeCluster
from tests.soak import chosen


class TestOnDevices(OfSampledSizes):
    out_of = 2
    sizes: ClassVar[Sequence[int]] = chosen((1, 2, 5), soak=(1, 2, 3, 4, 5, 6, 7, 8))

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        cluster = FakeCluster(seed=size)
        async with device_world(size, cluster=cluster) as nodes:
            yield [cast(Communicator, OnDevices(node.world, cluster)) for node in nodes]
