"""Communicators over in-process lanes and over sockets keep the promises of all communicators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.testing import local_world
from asyncpar.testing.collectives import CommunicatorConformance


class TestInproc(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size) as nodes:
            yield [node.world for node in nodes]


class TestShm(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm") as nodes:
            yield [node.world for node in nodes]


class TestShmWithoutArena(CommunicatorConformance):
    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm", arena=False) as nodes:
            yield [node.world for node in nodes]


class TestArenaWithoutPolling(CommunicatorConformance):
    @pytest.fixture(autouse=True)
    def no_polling(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ASYNCPAR_ARENA_WAIT", "doorbell")

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm") as nodes:
            yield [node.world for node in nodes]


class TestSmallArena(CommunicatorConformance):
    @pytest.fixture(autouse=True)
    def little_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ASYNCPAR_ARENA_BYTES", "256K")

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm") as nodes:
            yield [node.world for node in nodes]


class TestTcp(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="tcp") as nodes:
            yield [node.world for node in nodes]


class TestGrpc(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="grpc") as nodes:
            yield [node.world for node in nodes]
