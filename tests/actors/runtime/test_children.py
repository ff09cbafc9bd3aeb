"""Owners and their children: who ends with whom, and who is notified of a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.ending import Down, DownReason
from asyncpar.errors import ActorDown, RemoteError, UsageError


class Child(Actor):
    def __init__(self, label: str, log: list[str]) -> None:
        self.label = label
        self.log = log

    async def on_start(self) -> None:
        self.log.append(f"{self.label} starts")

    async def on_stop(self) -> None:
        self.log.append(f"{self.label} stops")

    @endpoint
    async def fail(self) -> None:
        raise ValueError(f"{self.label} is broken")

    @endpoint
    async def wait(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append(f"{self.label} is interrupted")


class Owner(Actor):
    def __init__(self, log: list[str], count: int = 3) -> None:
        self.log = log
        self.count = count
        self.downs: list[Down] = []

    async def on_start(self) -> None:
        self.log.append("owner starts")
        for index in range(self.count):
            await self.spawn(Child, str(index), self.log, name=f"child-{index}")

    async def on_stop(self) -> None:
        self.log.append("owner stops")

    @endpoint
    async def end(self, child: Child, *, is_kill: bool = False) -> None:
        await (self.kill_child(child) if is_kill else self.stop_child(child))

    @endpoint
    async def ping(self) -> str:
        return "pong"


class Calm(Owner):
    """Bears the loss of a child."""

    async def on_child_down(self, down: Down) -> None:
        self.log.append(f"{down.ref.name} {down.reason}")


@pytest.mark.promise("children-order")
async def test_children_stop_in_reverse_order_before_their_owner(open_ranks: Any) -> None:
    log: list[str] = []
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Owner, log)
        await ranks.systems[0].stop(ref)
    starts = ["owner starts", "0 starts", "1 starts", "2 starts"]
    assert log == [*starts, "2 stops", "1 stops", "0 stops", "owner stops"]


async def test_the_children_of_an_actor_that_fails_to_start_are_stopped(open_ranks: Any) -> None:
    log: list[str] = []

    class Broken(Owner):
        async def on_start(self) -> None:
            await super().on_start()
            raise KeyError("late")

    async with open_ranks(1) as ranks:
        with pytest.raises(KeyError, match="late"):
            await ranks.systems[0].spawn(Broken, log)
        assert log[-3:] == ["2 stops", "1 stops", "0 stops"]


@pytest.mark.promise("kill-children")
async def test_a_killed_owner_takes_its_children_along(open_ranks: Any) -> None:
    log: list[str] = []
    async with open_ranks(2) as ranks:
        ref = await ranks.systems[1].spawn(Owner, log, 2, name="owner")
        child = ranks.systems[0].ref("child-1", rank=1)
        waiting = asyncio.create_task(child.wait())
        watch = ranks.systems[0].watch(child)
        await asyncio.sleep(0)
        await ranks.systems[0].kill(ranks.systems[0].ref("owner", rank=1))
        with pytest.raises(ActorDown, match="the actor was killed"):
            await waiting
        assert (await watch).reason is DownReason.KILLED
        assert log[3:] == ["1 is interrupted"], "on_stop is not run"
        with pytest.raises(ActorDown, match="the actor was killed"):
            await ref.ping()


@pytest.mark.promise("failure-owner")
async def test_the_failure_of_a_child_is_a_failure_of_its_owner(
    open_ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    async with open_ranks(1) as ranks:
        owner = await ranks.systems[0].spawn(Owner, log, 2, name="owner")
        watch = ranks.systems[0].watch(owner)
        ranks.systems[0].ref("child-0").fail.tell()
        down = await watch
        assert down.reason is DownReason.FAILED
        assert isinstance(down.error, RemoteError)
        assert "ValueError: 0 is broken" in down.error.remote_traceback
    assert log[3:] == ["0 stops", "1 stops", "owner stops"]
    assert [record.getMessage() for record in caplog.records] == ["rank 0: actor 'owner' failed"]


async def test_an_owner_may_decide_otherwise(open_ranks: Any, caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    async with open_ranks(1) as ranks:
        owner = await ranks.systems[0].spawn(Calm, log, 2)
        watch = ranks.systems[0].watch(ranks.systems[0].ref("child-0"))
        ranks.systems[0].ref("child-0").fail.tell()
        await watch
        assert await owner.ping() == "pong"
        assert log[-1] == "child-0 failed"
    assert caplog.records == [], "the owner knows, so nobody else has to"


async def test_an_owner_is_not_notified_of_ends_it_brought_about(open_ranks: Any) -> None:
    log: list[str] = []
    async with open_ranks(1) as ranks:
        owner = await ranks.systems[0].spawn(Calm, log, 2)
        first, second = (ranks.systems[0].ref(f"child-{index}") for index in range(2))
        await owner.end(first)
        await owner.end(second, is_kill=True)
        assert await owner.ping() == "pong"
        assert log[3:] == ["0 stops"]
        with pytest.raises(RemoteError, match=r"is no child of .*, or has ended"):
            await owner.end(first)


async def test_an_owner_is_notified_of_children_that_others_stop(open_ranks: Any) -> None:
    log: list[str] = []
    async with open_ranks(1) as ranks:
        owner = await ranks.systems[0].spawn(Calm, log, 2)
        await ranks.systems[0].stop(ranks.systems[0].ref("child-1"))
        assert await owner.ping() == "pong"
        assert log[-2:] == ["1 stops", "child-1 stopped"]


async def test_closing_a_node_stops_children_before_their_owners(open_ranks: Any) -> None:
    log: list[str] = []
    async with open_ranks(1) as ranks:
        await ranks.systems[0].spawn(Owner, log, 2)
    assert log[3:] == ["1 stops", "0 stops", "owner stops"]


async def test_an_actor_that_was_not_spawned_has_no_children() -> None:
    with pytest.raises(UsageError, match="Owner was not spawned yet"):
        await Owner([]).spawn(Child, "x", [])
