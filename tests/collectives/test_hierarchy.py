"""Groups over several hosts that have arenas keep the promises of all communicators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.testing import local_world
from asyncpar.testing.collectives import CommunicatorConformance


class TestTwoHosts(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (3, 4, 5, 8)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        hosts = ["left"] * (size // 2) + ["right"] * (size - size // 2)
        async with local_world(size, transport=None, hosts=hosts, pin="all_reduce:0-inf@hierarchical") as nodes:
            yield [node.world for node in nodes]
