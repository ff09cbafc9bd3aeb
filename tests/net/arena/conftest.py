"""Arenas whose ranks live in this process, on either event loop; at the end nothing may be left behind."""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import uvloop

from asyncpar.core.config.world import Member, World
from asyncpar.net.arena.arena import Arena
from asyncpar.net.arena.formation import LocalSegment, contribute, form_arena
from asyncpar.net.arena.settings import ArenaSettings
from tests.descriptors import open_descriptors

T = TypeVar("T")
SECRET = b"s" * 32
SETTINGS = ArenaSettings(bytes=256 << 10, polls=True, seconds=5.0)

Run = Callable[[Coroutine[Any, Any, None]], None]


class Events(list[T]):
    """Events in order; ``until`` waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def append(self, entry: T) -> None:
        super().append(entry)
        self._news.set()

    async def until(self, count: int) -> None:
        """Wait until there are ``count`` entries."""
        async with asyncio.timeout(30):
            while len(self) < count:
                self._news.clear()
                await self._news.wait()


async def settle() -> None:
    """Let the loop handle everything that is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass
class Ranks:
    """The ranks of one world in this process, and the ends of others that they saw."""

    size: int
    settings: ArenaSettings = SETTINGS
    hosts: tuple[str, ...] = ()
    contribute: dict[int, Callable[[int, ArenaSettings], LocalSegment]] = field(default_factory=dict)
    own_secrets: dict[int, bytes] = field(default_factory=dict)
    own_settings: dict[int, ArenaSettings] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)
    job: str = field(default_factory=lambda: secrets.token_hex(4))
    lost: Events[tuple[int, int, str]] = field(default_factory=Events)
    left: Events[tuple[int, int]] = field(default_factory=Events)

    @property
    def world(self) -> World:
        hosts = self.hosts or ("here",) * self.size
        members = tuple(
            Member(rank=rank, host=host, host_id=host, address=self.addresses.get(rank, ""))
            for rank, host in enumerate(hosts)
        )
        return World(members=members, job=self.job)

    def form(self, rank: int) -> Coroutine[Any, Any, Arena | None]:
        """Form the arena as ``rank``."""
        return form_arena(
            world=self.world,
            rank=rank,
            secret=self.own_secrets.get(rank, SECRET),
            settings=self.own_settings.get(rank, self.settings),
            on_lost=lambda peer, cause: self.lost.append((rank, peer, cause)),
            on_left=lambda peer: self.left.append((rank, peer)),
            contribute=self.contribute.get(rank, contribute),
        )

    async def form_all(self) -> list[Arena]:
        """Form the arena as all ranks; it must work."""
        arenas = await asyncio.gather(*(self.form(rank) for rank in range(self.size)))
        formed = [arena for arena in arenas if arena is not None]
        assert len(formed) == self.size
        return formed

    async def fail_all(self) -> None:
        """Form the arena as all ranks; it must not work for any."""
        assert await asyncio.gather(*(self.form(rank) for rank in range(self.size))) == [None] * self.size


async def _leave_no_task(test: Awaitable[None]) -> None:
    before = asyncio.all_tasks()
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    await test
    assert asyncio.all_tasks() == before, "tasks were left behind"
    assert complaints == [], "the loop met errors that nobody caught"


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test's coroutine on either loop; it may leave neither tasks nor descriptors behind."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_one(test: Coroutine[Any, Any, None]) -> None:
        factory().close()  # the first loop of a process opens a few descriptors for good
        gc.collect()
        before = open_descriptors()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_leave_no_task(test))
        gc.collect()
        assert open_descriptors() - before == Counter(), "descriptors were left open"

    return run_one
