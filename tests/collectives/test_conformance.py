"""Communicators over in-process lanes and over sockets keep the promises of all communicators.

Over sockets and shared memory, each promise is tried in worlds of some sizes; ``--soak`` tries all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar
from zlib import crc32

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.testing import local_world
from asyncpar.testing.collectives import CommunicatorConformance
from tests.soak import is_soak


class OfSampledSizes(CommunicatorConformance):
    """Tries each promise in worlds of a third of the sizes, by turns.

    Three classes with different ``turn`` try each promise at all sizes, and each of them all sizes with some promise.
    """

    turn: ClassVar[int]

    @pytest.fixture(autouse=True)
    def sample(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if not is_soak():
            place = crc32(request.node.name.encode()) + self.turn
            monkeypatch.setattr(self, "sizes", self.sizes[place % 3 :: 3])


class TestInproc(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size) as nodes:
            yield [node.world for node in nodes]


class TestShm(OfSampledSizes):
    turn = 0
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm") as nodes:
            yield [node.world for node in nodes]


class TestShmWithoutArena(OfSampledSizes):
    turn = 0

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm", arena=False) as nodes:
            yield [node.world for node in nodes]


class TestArenaWithoutPolling(OfSampledSizes):
    turn = 1

    @pytest.fixture(autouse=True)
    def no_polling(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ASYNCPAR_ARENA_WAIT", "doorbell")

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm") as nodes:
            yield [node.world for node in nodes]


class TestSmallArena(OfSampledSizes):
    turn = 2

    @pytest.fixture(autouse=True)
    def little_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ASYNCPAR_ARENA_BYTES", "256K")

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="shm") as nodes:
            yield [node.world for node in nodes]


class TestTcp(OfSampledSizes):
    turn = 1
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="tcp") as nodes:
            yield [node.world for node in nodes]


class TestGrpc(OfSampledSizes):
    turn = 2
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport="grpc") as nodes:
            yield [node.world for node in nodes]
