"""Communicators over in-process lanes, sockets and shared memory keep the promises of all communicators.

Each promise is tried in worlds of some sizes, by turns; ``--soak`` tries all.  That every algorithm is right for every
size is shown without a world (``algorithms/test_catalog.py``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.testing import local_world
from tests.collectives.sampled_sizes import InSharedWorlds, OfSampledSizes
from tests.soak import chosen


class TestInproc(OfSampledSizes):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size) as nodes:
            yield [node.world for node in nodes]


class TestShm(InSharedWorlds):
    turn = 5
    out_of = 6
    sizes: ClassVar[Sequence[int]] = chosen(OfSampledSizes.sizes, soak=TestInproc.sizes)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm") as nodes:
            yield [node.world for node in nodes]


class TestShmWithoutArena(InSharedWorlds):
    turn = 0
    out_of = 6

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm", arena=False) as nodes:
            yield [node.world for node in nodes]


class TestArenaWithoutPolling(InSharedWorlds):
    turn = 1
    out_of = 6

    @pytest.fixture(autouse=True)
    def usual_memory_without_polling(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ASYNCPAR_ARENA_BYTES")
        monkeypatch.setenv("ASYNCPAR_ARENA_WAIT", "doorbell")

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm") as nodes:
            yield [node.world for node in nodes]


class TestSmallArena(InSharedWorlds):
    turn = 2
    out_of = 6

    @pytest.fixture(autouse=True)
    def little_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ASYNCPAR_ARENA_BYTES", "256K")

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm") as nodes:
            yield [node.world for node in nodes]


class TestTcp(InSharedWorlds):
    turn = 3
    out_of = 6
    sizes: ClassVar[Sequence[int]] = chosen(OfSampledSizes.sizes, soak=TestInproc.sizes)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="tcp") as nodes:
            yield [node.world for node in nodes]


class TestGrpc(InSharedWorlds):
    turn = 4
    out_of = 6
    sizes: ClassVar[Sequence[int]] = chosen(OfSampledSizes.sizes, soak=TestInproc.sizes)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="grpc") as nodes:
            yield [node.world for node in nodes]
