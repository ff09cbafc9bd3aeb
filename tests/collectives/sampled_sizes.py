"""The suite of communicators in worlds of some sizes only, which tests may share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar
from zlib import crc32

import pytest
import pytest_asyncio

from asyncpar.collectives.communicator import Communicator
from asyncpar.testing.collectives import CommunicatorConformance
from tests.soak import is_soak

Connect = Callable[[int], AbstractAsyncContextManager[Sequence[Communicator]]]


class OfSampledSizes(CommunicatorConformance):
    """Tries each promise in worlds of one in ``out_of`` of the sizes, by turns; ``--soak`` tries all.

    As many classes with different ``turn`` try each promise at all sizes, and each of them all sizes with some promise.
    """

    turn: ClassVar[int] = 0
    out_of: ClassVar[int] = 3

    @pytest.fixture(autouse=True)
    def sample(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if not is_soak():
            place = crc32(request.node.name.encode()) + self.turn
            monkeypatch.setattr(self, "sizes", self.sizes[place % self.out_of :: self.out_of])


@pytest.mark.asyncio(loop_scope="class")
class InSharedWorlds(OfSampledSizes):
    """Tries one promise after the other in the same worlds, one of each size: starting them takes longer than most.

    What an operation does first in a world is for classes whose tests have worlds of their own, and for ``--soak``.
    """

    @pytest.fixture(autouse=True)
    def share(self, shared_worlds: SharedWorlds, monkeypatch: pytest.MonkeyPatch) -> None:
        if not is_soak():
            connect = self.connect
            monkeypatch.setattr(self, "connect", lambda size: shared_worlds.borrow(size, connect))


class SharedWorlds:
    """Worlds by their sizes.  Each is opened, and closed, in a task of its own."""

    def __init__(self) -> None:
        self._opened: dict[int, asyncio.Future[Sequence[Communicator]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()

    @asynccontextmanager
    async def borrow(self, size: int, connect: Connect) -> AsyncIterator[Sequence[Communicator]]:
        if size not in self._opened:
            self._opened[size] = asyncio.get_running_loop().create_future()
            self._tasks.append(asyncio.create_task(self._keep(size, connect)))
        yield await self._opened[size]

    async def close(self) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def _keep(self, size: int, connect: Connect) -> None:
        try:
            async with connect(size) as communicators:
                self._opened[size].set_result(communicators)
                await self._over.wait()
        except BaseException as error:
            if not self._opened[size].done():
                self._opened[size].set_exception(error)
            raise


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def shared_worlds() -> AsyncIterator[SharedWorlds]:
    """Worlds for all tests of a class."""
    worlds = SharedWorlds()
    yield worlds
    await worlds.close()
