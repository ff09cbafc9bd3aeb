"""A node that closes ends actors that own others, or that are about to end already."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.errors import ActorDown, PeerLost
from asyncpar.testing.loop import run_virtual
from tests.actors.runtime.conftest import OpenRanks


class Member(Actor):
    """Writes down when it stops; may take two turns of the loop for it."""

    def __init__(self, label: str, ends: list[str], *, is_slow: bool = False) -> None:
        self._label = label
        self._ends = ends
        self._is_slow = is_slow

    async def on_stop(self) -> None:
        if self._is_slow:
            self._ends.append(f"{self._label} begins")
            await asyncio.sleep(0.01)
        self._ends.append(self._label)

    @endpoint
    async def hang(self) -> None:
        await asyncio.get_running_loop().create_future()


class Owner(Member):
    """Has two children, of which it can replace the first one."""

    async def on_start(self) -> None:
        self._first = await self.spawn(Member, "first", self._ends)
        self._second = await self.spawn(Member, "second", self._ends, name="second")

    @endpoint
    async def hang_second(self) -> None:
        self._second.hang.tell()


async def spawn_owner(system: ActorSystem, ends: list[str]) -> Owner:
    return await system.spawn(Owner, "owner", ends)


async def test_owners_end_their_children_before_themselves_and_before_older_actors(open_ranks: OpenRanks) -> None:
    ends: list[str] = []
    async with open_ranks(1) as ranks:
        (system,) = ranks.systems
        await system.spawn(Member, "older", ends)
        await spawn_owner(system, ends)
        await system.spawn(Member, "newer", ends)
    assert ends == ["newer", "second", "first", "owner", "older"]


async def test_an_on_stop_that_has_begun_is_not_cut_short(open_ranks: OpenRanks) -> None:
    ends: list[str] = []
    async with open_ranks(1) as ranks:
        (system,) = ranks.systems
        ref = await system.spawn(Member, "slow", ends, is_slow=True)
        stopping = asyncio.ensure_future(system.stop(ref))
        while not ends:  # noqa: ASYNC110  # a few turns of the loop
            await asyncio.sleep(0)
    await stopping
    assert ends == ["slow begins", "slow"]


async def test_a_child_that_its_owner_waits_for_is_closed_with_it(open_ranks: OpenRanks) -> None:
    ends: list[str] = []
    async with open_ranks(1) as ranks:
        (system,) = ranks.systems
        owner = await spawn_owner(system, ends)
        await owner.hang_second()
        hanging = asyncio.ensure_future(system.ref("second", actor_class=Member).hang())
        stopping = asyncio.ensure_future(system.stop(owner))
        for _ in range(20):
            await asyncio.sleep(0)
        assert ends == []
    await stopping
    assert ends == ["second", "first", "owner"]
    with pytest.raises((ActorDown, PeerLost)):
        await hanging


class Stubborn(Actor):
    """Does not let itself be cancelled for a while."""

    @endpoint
    async def persist(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            try:
                await asyncio.sleep(end - loop.time())
            except asyncio.CancelledError:
                continue


def test_a_node_that_waits_for_an_actor_says_so(open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with open_ranks(1) as ranks:
            ref = await ranks.systems[0].spawn(Stubborn, name="stubborn")
            asking = asyncio.create_task(ref.persist(13.0))
            await asyncio.sleep(1.0)
            await ranks.systems[0].close()
            await asking  # it did what it was asked after all

    run_virtual(main())
    warnings = [text for record in caplog.records if "the node waits" in (text := record.getMessage())]
    assert len(warnings) == 2, "after 5 and 10 of 12 seconds"
    assert warnings[0].startswith("rank 0: the node waits for actor 'stubborn': it was cancelled and has not ended")
