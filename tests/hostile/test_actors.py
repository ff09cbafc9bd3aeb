"""A rank that says to actors what no actor system says: its link ends at most; everybody else is served as before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.core.config.world import Member, World
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric
from asyncpar.net.transport.links import Links
from tests.hostile.actor_messages import TARGET, every_message
from tests.hostile.inputs import bit_flips, mutated, truncations
from tests.soak import chosen

MESSAGES = every_message()
PER_WORLD = 200
EACH = chosen(31, soak=1)
"""Of so many bits of a message one is changed."""

CUTS = chosen(8, soak=None)
"""A message is cut after each of so many first bytes, at as many places behind them, and before its last (None: after
each byte)."""

COUNT = chosen(300, soak=10_000)


class Target(Actor):
    """Takes anything."""

    @endpoint
    async def poke(self, *arguments: Any, **keywords: Any) -> int:
        return len(arguments) + len(keywords)


class Keeper(Actor):
    """Nobody hostile knows its name."""

    @endpoint
    async def add(self, number: int) -> int:
        return number + 1


class Scene:
    """Rank 0 has actors, rank 1 is hostile, rank 2 asks."""

    def __init__(self, hostile: Links, asker: ActorRef[Any], complaints: list[dict[str, Any]]) -> None:
        self.hostile = hostile
        self._asker = asker
        self.complaints = complaints

    @property
    def is_linked(self) -> bool:
        """Does rank 0 still listen to rank 1?"""
        return self.hostile.is_up(0)

    async def say(self, payload: bytes) -> None:
        """Send ``payload`` as a message of rank 1, and let rank 0 do what it does about it."""
        self.hostile.link(0).send_message(memoryview(payload))
        for _ in range(3):
            await asyncio.sleep(0)

    async def check(self) -> None:
        """Rank 2 is served, and nothing has gone wrong in silence."""
        async with asyncio.timeout(30):
            assert await self._asker.add(41) == 42
        assert self.complaints == []


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    fabric = InprocFabric()
    world = World(members=tuple(Member(rank=rank) for rank in range(3)))
    async with AsyncExitStack() as stack:
        links = []
        for rank in range(3):
            connector = InprocConnector(fabric)
            links.append(await stack.enter_async_context(Links(world=world, rank=rank, connector=connector)))
            fabric.join(links[-1])
        systems = {rank: await stack.enter_async_context(ActorSystem(links[rank])) for rank in (0, 2)}
        await systems[0].spawn(Target, name=TARGET)
        await systems[0].spawn(Keeper, name="keeper of secrets")
        await InprocConnector(fabric).connect(links[1], 0)
        made = Scene(links[1], systems[2].ref("keeper of secrets", rank=0), complaints)
        await made.check()
        yield made
        await made.check()
    assert complaints == []


async def say_all(payloads: list[bytes]) -> tuple[int, int]:
    """Say ``payloads`` to one node after another; return how many were taken, and how many ended the link."""
    taken, waiting = 0, list(reversed(payloads))
    while waiting:
        async with scene() as here:
            for _ in range(min(PER_WORLD, len(waiting))):
                await here.say(waiting.pop())
                if not here.is_linked:
                    break
                taken += 1
    return taken, len(payloads) - taken


@pytest.mark.parametrize("name", MESSAGES)
async def test_each_message_with_any_bit_changed_or_cut_ends_the_link_at_most(name: str) -> None:
    valid = MESSAGES[name]
    cuts = list(truncations(valid))
    if CUTS is not None:
        cuts = list(dict.fromkeys([*cuts[:CUTS], *cuts[CUTS :: len(cuts) // CUTS + 1], cuts[-1]]))
    _, refused = await say_all([valid, *cuts, *bit_flips(valid, each=EACH)])
    assert refused >= len(cuts)


async def test_messages_in_any_order_and_mutated_end_the_link_at_most() -> None:
    dice = random.Random(9)
    messages = list(MESSAGES.values())
    payloads = [
        mutated(dice.choice(messages), dice) if dice.random() < 0.2 else dice.choice(messages) for _ in range(COUNT)
    ]
    taken, refused = await say_all(payloads)
    assert taken > COUNT // 10
    assert refused > COUNT // 10
