"""The thread backend keeps the promises of all communicators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

from asyncpar.collectives.communicator import Communicator
from asyncpar.testing.collectives import CommunicatorConformance
from tests.backends.worlds import open_runtimes


class TestThreadBackend(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with open_runtimes(size) as runtimes:
            yield [runtime.get_group().communicator for runtime in runtimes]
