"""Communicators over in-process lanes and over sockets keep the promises of all communicators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

from asyncpar.collectives.communicator import Communicator
from asyncpar.testing import local_world
from asyncpar.testing.collectives import CommunicatorConformance


class TestInproc(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size) as nodes:
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
