"""Mailbox policies, and the order in which an actor attends to what has come."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.declaration import MailboxPolicy, WhenFull
from asyncpar.errors import ActorDown, MailboxFull, UsageError


class Busy(Actor):
    """Is held by one message until its gate opens."""

    def __init__(self, log: list[int], gate: asyncio.Event) -> None:
        self.log = log
        self.gate = gate

    @endpoint
    async def hold(self) -> None:
        await self.gate.wait()

    @endpoint
    async def note(self, item: int) -> int:
        self.log.append(item)
        return item


class Strict(Busy):
    mailbox: ClassVar[MailboxPolicy] = MailboxPolicy(limit=2, when_full="fail")


class Recent(Busy):
    mailbox: ClassVar[MailboxPolicy] = MailboxPolicy(limit=2, when_full=WhenFull.DROP_OLDEST)


@pytest.fixture(params=[0, 1], ids=["same rank", "other rank"])
def home(request: pytest.FixtureRequest) -> int:
    """The rank of the actor; its caller is rank 0."""
    rank: int = request.param
    return rank


async def settle() -> None:
    """Let everything that is under way arrive."""
    for _ in range(20):
        await asyncio.sleep(0)


async def fill(ranks: Any, home: int, kind: type[Busy], count: int) -> tuple[Any, list[int], list[asyncio.Task[Any]]]:
    """Hold an actor, ask it ``count`` things, and let it go; return reference, log and asks, which have ended."""
    log: list[int] = []
    gate = asyncio.Event()
    await ranks.systems[home].spawn(kind, log, gate, name="busy")
    ref = ranks.systems[0].ref("busy", rank=home)
    asks = [asyncio.create_task(ref.hold())]
    await settle()
    asks += [asyncio.create_task(ref.note(item)) for item in range(count)]
    await settle()
    gate.set()
    await asyncio.wait(asks)
    return ref, log, asks[1:]


@pytest.mark.promise("mailbox-fail")
async def test_a_full_mailbox_may_refuse_what_comes(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        _, log, asks = await fill(ranks, home, Strict, 4)
        assert log == [0, 1]
        assert [ask.result() for ask in asks[:2]] == [0, 1]
        for ask in asks[2:]:
            with pytest.raises(MailboxFull, match=r"note of .*: the mailbox is full \(2 messages wait\)") as caught:
                ask.result()
            assert caught.value.rank == home


@pytest.mark.promise("mailbox-drop")
async def test_a_full_mailbox_may_drop_what_waits_longest(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        _, log, asks = await fill(ranks, home, Recent, 4)
        assert log == [2, 3]
        assert [ask.result() for ask in asks[2:]] == [2, 3]
        for ask in asks[:2]:
            with pytest.raises(MailboxFull, match="the mailbox is full"):
                ask.result()


@pytest.mark.promise("mailbox-wait")
async def test_by_default_everything_waits_and_nothing_is_refused(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        _, log, asks = await fill(ranks, home, Busy, 2000)
        assert log == list(range(2000))
        assert [ask.result() for ask in asks] == log


async def test_told_messages_without_room_are_dead_letters(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        log: list[int] = []
        gate = asyncio.Event()
        await ranks.systems[home].spawn(Strict, log, gate, name="busy")
        ref = ranks.systems[0].ref("busy", rank=home)
        holding = asyncio.create_task(ref.hold())
        await settle()
        for item in range(5):
            await ref.note.tell(item)
        await settle()
        gate.set()
        await holding
        assert await ref.note(5) == 5
        assert log == [0, 1, 5]
        assert ranks.systems[home].dead_letters.count == 3
        assert {letter.reason for letter in ranks.systems[home].dead_letters.recent} == {
            "the mailbox is full (2 messages wait)"
        }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"when_full": "panic"}, "when_full: expected one of 'wait', 'fail', 'drop_oldest', got 'panic'"),
        ({"limit": 5}, "limit: expected None with when_full='wait', got 5"),
        ({"limit": 0, "when_full": "fail"}, "limit: expected at least 1 message, got 0"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        MailboxPolicy(**arguments)


def test_a_class_needs_a_policy_that_is_one() -> None:
    with pytest.raises(UsageError, match=r"mailbox: Wrong.mailbox is no Mailbox but 5"):
        type("Wrong", (Actor,), {"mailbox": 5})


# -- kill > stop > messages --------------------------------------------------------------------------------------------


@pytest.mark.promise("stop-drains")
async def test_stop_handles_what_waits_and_refuses_what_comes(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        log: list[int] = []
        gate = asyncio.Event()
        await ranks.systems[home].spawn(Busy, log, gate, name="busy")
        ref = ranks.systems[0].ref("busy", rank=home)
        asks = [asyncio.create_task(ref.hold()), *(asyncio.create_task(ref.note(item)) for item in range(3))]
        await settle()
        stopping = asyncio.create_task(ranks.systems[0].stop(ref))
        await settle()
        with pytest.raises(ActorDown, match="the actor was stopped"):
            await ref.note(9)
        gate.set()
        await asyncio.gather(*asks, stopping)
        assert log == [0, 1, 2]


@pytest.mark.promise("kill-interrupts")
async def test_kill_overtakes_a_stop_and_interrupts_what_runs(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        log: list[int] = []
        await ranks.systems[home].spawn(Busy, log, asyncio.Event(), name="busy")
        ref = ranks.systems[0].ref("busy", rank=home)
        asks = [asyncio.create_task(ref.hold()), *(asyncio.create_task(ref.note(item)) for item in range(3))]
        await settle()
        stopping = asyncio.create_task(ranks.systems[0].stop(ref))
        await settle()
        await ranks.systems[0].kill(ref)
        await stopping
        for ask in asks:
            with pytest.raises(ActorDown, match="the actor was killed"):
                await ask
        assert log == []
