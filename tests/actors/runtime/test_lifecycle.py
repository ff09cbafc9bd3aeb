"""Starting and ending actors on other ranks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.registry import class_path, find_actor_class
from asyncpar.errors import ActorDown, PeerLost, RemoteError, UsageError
from tests.actors.runtime.test_mailbox import settle


@dataclass
class Settings:
    width: int
    weights: np.ndarray


class Model(Actor):
    def __init__(self, settings: Settings, *, scale: float = 1.0) -> None:
        self.settings = settings
        self.scale = scale

    @endpoint
    async def total(self) -> float:
        assert isinstance(self.settings, Settings)
        return float(self.settings.weights.sum()) * self.scale + self.settings.width


class Difficult(Actor):
    def __init__(self, how: str) -> None:
        self.how = how
        if how == "construct":
            raise ValueError("not like this")

    async def on_start(self) -> None:
        if self.how == "start":
            raise ValueError("not today")
        if self.how == "wait":
            await asyncio.Event().wait()

    async def on_stop(self) -> None:
        if self.how == "stop":
            raise ValueError("not yet")

    @endpoint
    async def ping(self) -> str:
        return "pong"


@pytest.fixture(params=[0, 1], ids=["same rank", "other rank"])
def home(request: pytest.FixtureRequest) -> int:
    """Where actors are started; rank 0 wants it."""
    rank: int = request.param
    return rank


@pytest.mark.promise("spawn-remote")
async def test_an_actor_is_started_on_another_rank_with_copies_of_its_arguments(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        settings = Settings(width=2, weights=np.ones(4))
        ref = await ranks.systems[0].spawn_on(home, Model, (settings,), {"scale": 2.0}, name="model")
        settings.weights[:] = 0
        assert (ref.rank, ref.name) == (home, "model")
        assert await ref.total() == 10.0
        nameless = await ranks.systems[0].spawn_on(home, Model, (settings,))
        assert nameless.name != ref.name
        assert await nameless.total() == 2.0


@pytest.mark.parametrize("how", ["construct", "start"])
async def test_what_keeps_an_actor_from_starting_reaches_the_one_that_wanted_it(
    open_ranks: Any, home: int, how: str
) -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(RemoteError, match="ValueError: not") as caught:
            await ranks.systems[0].spawn_on(home, Difficult, (how,), name="d")
        assert caught.value.rank == home
        ref = await ranks.systems[0].spawn_on(home, Difficult, ("fine",), name="d")
        assert await ref.ping() == "pong", "the name was free again"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), r"Difficult\(\) misses 'how'"),
        ((1,), r"argument 'how' of Difficult\(\): Expected `str`, got `int`"),
        ((object(),), r"argument 1 of Difficult\(\): a value of type object cannot be sent"),
    ],
)
async def test_wrong_constructor_arguments_are_named(open_ranks: Any, home: int, args: Any, text: str) -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(UsageError, match=text):
            await ranks.systems[0].spawn_on(home, Difficult, args)


async def test_a_taken_name_is_refused(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[0].spawn_on(home, Difficult, ("fine",), name="d")
        with pytest.raises(UsageError, match=f"name: 'd' is taken by another actor on rank {home}"):
            await ranks.systems[0].spawn_on(home, Difficult, ("fine",), name="d")


async def test_a_cancelled_start_is_undone(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        spawning = asyncio.create_task(ranks.systems[0].spawn_on(home, Difficult, ("wait",), name="d"))
        await settle()
        spawning.cancel()
        await asyncio.wait({spawning})
        await settle()
        ref = await ranks.systems[0].spawn_on(home, Difficult, ("fine",), name="d")
        assert await ref.ping() == "pong"


async def test_a_start_on_a_rank_that_is_lost_fails(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        spawning = asyncio.create_task(ranks.systems[0].spawn_on(1, Difficult, ("wait",)))
        await settle()
        ranks.kill(1)
        with pytest.raises(PeerLost, match=r"rank 1 on .* is lost"):
            await spawning
        with pytest.raises(PeerLost, match=r"rank 1 on .* is lost"):
            await ranks.systems[0].spawn_on(1, Difficult, ("fine",))


async def test_a_start_on_a_rank_that_leaves_fails(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        spawning = asyncio.create_task(ranks.systems[0].spawn_on(1, Difficult, ("wait",)))
        await settle()
        await ranks.systems[1].close()
        with pytest.raises(PeerLost, match="closed"):
            await spawning


async def test_what_on_stop_raises_reaches_the_one_that_stopped_the_actor(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref = await ranks.systems[0].spawn_on(home, Difficult, ("stop",), name="d")
        with pytest.raises((RemoteError, ValueError), match="not yet"):
            await ranks.systems[0].stop(ref)
        with pytest.raises(ActorDown, match="the actor was stopped"):
            await ref.ping()
        with pytest.raises(UsageError, match=r"there is no actor 'd' on rank . any more: the actor was stopped"):
            await ranks.systems[0].stop(ref)


async def test_to_kill_an_actor_that_has_ended_does_nothing(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        killed = await ranks.systems[0].spawn_on(home, Difficult, ("fine",), name="killed")
        await asyncio.gather(*(system.kill(killed) for system in ranks.systems for _ in range(3)))
        await ranks.systems[0].kill(killed)
        stopped = await ranks.systems[0].spawn_on(home, Difficult, ("fine",), name="stopped")
        await ranks.systems[0].stop(stopped)
        await ranks.systems[0].kill(stopped)
        with pytest.raises(UsageError, match="there is no actor 'nobody'"):
            await ranks.systems[0].kill(ranks.systems[0].ref("nobody", rank=home))


async def test_ranks_out_of_range_are_refused(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(UsageError, match=r"rank: expected 0..1, got 2"):
            await ranks.systems[0].spawn_on(2, Difficult, ("fine",))


def test_only_known_classes_are_found() -> None:
    assert find_actor_class(class_path(Model)) is Model
    for path in (
        "os:system",
        "tests.actors.runtime.test_lifecycle:Settings",
        "tests.actors.runtime.test_lifecycle:Nobody",
        "",
    ):
        with pytest.raises(UsageError, match="is not known to this rank"):
            find_actor_class(path)
