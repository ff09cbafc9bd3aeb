"""Elastic jobs on a real Dask cluster, whose workers die and come."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import asyncpar as ap
from asyncpar.testing.engines import ElasticConformance, GrowingConformance
from tests.engines.consoles import RecordingConsole
from tests.engines.dask_workers import wait_for_workers

distributed = pytest.importorskip("distributed", reason="distributed (extra dask) is not installed")

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def client(two_workers: Any) -> Iterator[Any]:
    with distributed.Client(two_workers, set_as_default=False) as client:
        wait_for_workers(client)
        yield client


class TestElasticDask(ElasticConformance):
    @pytest.fixture(autouse=True)
    def _use(self, client: Any) -> None:
        self.client = client

    async def launch(
        self, function: Callable[..., Any], *arguments: Any, ranks: tuple[int, int], **options: Any
    ) -> list[Any]:
        return await ap.dask.launch(
            self.client, function, *arguments, ranks=ranks, console=RecordingConsole(), **options
        )


class TestGrowingDask(GrowingConformance):
    @pytest.fixture(autouse=True)
    def _use(self, two_workers: Any) -> Iterator[None]:
        with distributed.Client(two_workers, set_as_default=False) as self.client:
            wait_for_workers(self.client)
            yield
            two_workers.scale(2)
            wait_for_workers(self.client)

    async def launch(
        self, function: Callable[..., Any], *arguments: Any, ranks: tuple[int, int], **options: Any
    ) -> list[Any]:
        return await ap.dask.launch(
            self.client, function, *arguments, ranks=ranks, console=RecordingConsole(), **options
        )

    async def add_place(self) -> None:
        self.client.cluster.scale(3)

    async def lose_place(self, pid: int) -> None:
        workers = await asyncio.to_thread(self.client.run, os.getpid)
        parents = {parent.pid for parent in psutil.Process(pid).parents()}
        (worker,) = parents & set(workers.values())
        os.kill(worker, signal.SIGKILL)  # its nanny starts another one
