"""Holders of the secret who are out of date (a former member, an old generation or start) change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from asyncpar.net.membership import consensus_messages as consensus
from asyncpar.net.membership import world_messages as worlds
from asyncpar.net.membership.consensus_messages import Acceptance, Entry, Term
from asyncpar.net.membership.group_codec import decode_group, encode_entry, encode_group
from asyncpar.net.membership.group_state import GroupNode
from asyncpar.net.membership.lineage import Lineage
from asyncpar.net.membership.world_service import _MOST_STRANGERS
from asyncpar.testing import run_virtual
from tests.hostile.stale_agents import Group

FAR = 1_000_000
TERMS = worlds.WorldTerms(least_hosts=1, most_hosts=3, members=1)
STALE = "d#former"


def with_group(talk: Callable[[Group], Awaitable[None]], names: str = "abc") -> None:
    async def run() -> None:
        async with Group(names) as group:
            await talk(group)

    run_virtual(run())


def forged_votes(group: Group, sender: str) -> list[object]:
    """Everything that voters say about the next entry, in a term above all others."""
    now, term = group.decided.generation, Term(FAR, sender)
    alone = Entry(generation=now + 1, voters=(sender,), nodes=(sender,), content=group.decided.content)
    return [
        consensus.PreVote(now),
        consensus.Prepare(now, term),
        consensus.AcceptEntry(now, term, alone),
        consensus.Heartbeat(now, term),
        consensus.PreVoteGranted(now, term),
        consensus.Promise(now, term, Acceptance(term, alone)),
        consensus.EntryAccepted(now, term),
        consensus.Refused(now, term),
        consensus.HeartbeatAck(now, term),
        consensus.Behind(now),
    ]


STALE_EVENTS = [
    worlds.JobOpened(number=2, terms=TERMS, record=b""),
    worlds.JobClosed(number=1, record=b""),
    worlds.MemberArrived(member="m0", host="a", lineage=Lineage(0, b"")),
    worlds.MemberDied("m0", "was killed"),
    worlds.HostDraining("a"),
    worlds.HostLeaving("a"),
]
STALE_COMMANDS = [
    worlds.WorldStarted(0, ("nowhere:1",)),
    worlds.WorldEnded(0, "it is over"),
    worlds.MemberDismissed("m0", "it is over"),
    worlds.JobStopped(1, "it is over"),
]


async def open_job(group: Group) -> None:
    group.services["a"].tell(worlds.JobOpened(number=1, terms=TERMS, record=b"job"))
    await asyncio.sleep(1.0)
    assert all(view.job is not None for view in await group.views())


@pytest.mark.parametrize("number", range(10))
def test_a_node_that_is_out_of_the_group_has_no_vote_whatever_term_it_claims(number: int) -> None:
    async def talk(group: Group) -> None:
        await open_job(group)
        views, votes = await group.views(), [group.votes(name) for name in "abc"]
        group.network.sent.clear()
        for _ in range(20):
            await group.say(STALE, forged_votes(group, STALE)[number])
            await asyncio.sleep(0.2)
        assert await group.views() == views
        assert [group.votes(name) for name in "abc"] == votes, "no promise was made"
        campaigns = consensus.PreVote | consensus.Prepare
        assert not [message for _, _, message in group.network.sent if isinstance(message, campaigns)], "no election"

    with_group(talk)


@pytest.mark.parametrize("message", [*STALE_EVENTS, *STALE_COMMANDS], ids=lambda message: type(message).__name__)
def test_what_a_former_agent_reports_or_orders_is_dropped(message: object) -> None:
    async def talk(group: Group) -> None:
        await open_job(group)
        views, commands = await group.views(), list(group.commands)
        for sender in (STALE, "a#earlier"):
            await group.say(sender, message)
        await asyncio.sleep(3.0)
        assert await group.views() == views
        assert group.commands == commands

    with_group(talk)


def test_an_agent_that_was_let_go_learns_it_and_its_later_words_count_for_nothing() -> None:
    async def talk(group: Group) -> None:
        await open_job(group)
        former, address = group.node("c"), group.doors["c"].address
        await group.services["c"].stop()
        await asyncio.sleep(3.0)
        del group.doors["c"], group.services["c"]
        views, before = await group.views(), group.decided
        assert [host.name for host in views[0].hosts] == ["a", "b"]
        group.network.sent.clear()
        await group.say(former, consensus.Behind(before.generation - 1), address)
        learnt = [message.entry for _, to, message in group.network.sent if isinstance(message, consensus.Learn)]
        assert learnt == [before, before]
        for message in (*forged_votes(group, former), *STALE_EVENTS, *STALE_COMMANDS):
            await group.say(former, message, address)
        await asyncio.sleep(3.0)
        assert await group.views() == views
        assert group.decided == before

    with_group(talk)


def test_names_without_end_cost_a_few_connections_which_end() -> None:
    async def talk(group: Group) -> None:
        before = len(group.network.wires)
        for number in range(500):
            for message in (consensus.Behind(0), consensus.Prepare(FAR, Term(FAR, "x")), worlds.HostLeaving("a")):
                for door in group.doors.values():
                    assert door.take is not None
                    door.take(f"x#{number}", f"x{number}:1", message)
        assert len(group.network.wires) - before <= _MOST_STRANGERS * len(group.doors)
        await asyncio.sleep(1.0)
        assert len(group.network.wires) == before, "nobody is there"
        for service in group.services.values():
            known = vars(service._silence)  # noqa: SLF001  # what is kept of strangers is seen nowhere else
            assert not [name for kept in known.values() for name in kept if name.startswith("x#")]

    with_group(talk)


def of_another_group(group: Group) -> bytes:
    """The last entry of an older group with the same secret, which has decided more."""
    state = decode_group(group.decided.content)
    nodes = tuple(GroupNode(node=f"{name}#old", name=name, address=f"{name}:1") for name in "ad")
    entry = Entry(
        generation=FAR, voters=("a#old",), nodes=("a#old", "d#old"), content=encode_group(replace(state, nodes=nodes))
    )
    return encode_entry(entry)


def unreadable(group: Group) -> bytes:
    return encode_entry(replace(group.decided, generation=FAR, content=b"\xc1"))


@pytest.mark.parametrize(
    "known", [of_another_group, unreadable, lambda _: b"\xc1", lambda group: encode_entry(group.decided)]
)
def test_votes_of_another_group_with_the_same_secret_are_no_news(known: Callable[[Group], bytes]) -> None:
    async def talk(group: Group) -> None:
        await open_job(group)
        views, before = await group.views(), group.decided
        reply = await group.enter("a", node="a#old", known=known(group))  # a name that is taken: it gets no place
        assert reply.refusal
        await asyncio.sleep(3.0)
        assert await group.views() == views
        assert group.decided == before

    with_group(talk)


def test_a_former_voter_brings_what_its_own_group_has_decided() -> None:
    async def talk(group: Group) -> None:
        newer = replace(group.decided, generation=group.decided.generation + 1)
        await group.enter("a", node="a#old", known=encode_entry(newer))
        assert group.decided.generation >= newer.generation

    with_group(talk)
