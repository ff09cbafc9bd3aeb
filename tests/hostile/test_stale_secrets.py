"""Holders of the secret that are out of date (former members, old generations and starts) change nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncpar.errors import UsageError
from asyncpar.hosts import consensus_messages as consensus
from asyncpar.hosts import messages as worlds
from asyncpar.hosts.codec import decode_group, encode_entry, encode_group
from asyncpar.hosts.consensus_messages import Acceptance, Entry, Term
from asyncpar.hosts.group import GroupNode
from asyncpar.hosts.lineage import Lineage
from asyncpar.hosts.service import MOST_STRANGERS
from asyncpar.launch.agents.control_client import ControlClient
from asyncpar.launch.agents.requests import CancelRequest, DrainRequest
from asyncpar.launch.agents.views import GroupView
from asyncpar.net.membership.credentials import create_secret
from asyncpar.net.transport.rpc import Credentials
from asyncpar.testing import run_virtual
from tests.hostile.floods import ELASTIC, Flooded, eventually, terminate
from tests.hostile.stale_agents import Group
from tests.hostile.stale_callers import PINS, StaleCaller, knock
from tests.ports import free_port

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
    group.services["a"].report(worlds.JobOpened(number=1, terms=TERMS, record=b"job"))
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
        assert len(group.network.wires) - before <= MOST_STRANGERS * len(group.doors)
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


# -- a running job -----------------------------------------------------------------------------------------------------

LATE_WRITE = "INTERNAL"
"""The status of a stream at a caller that writes after it was refused, if the refusal comes before the write."""

GROWTH = 48.0
"""Megabytes that a process may have more after all that was said to it."""


class Victim:
    """An elastic job of two ranks, of an agent, in its third world: one rank was killed, and another one came."""

    def __init__(self, folder: Path) -> None:
        self.job = Flooded(folder, descriptors=1024)
        self.address = f"127.0.0.1:{free_port()}"
        self.credentials = Credentials(create_secret(folder / "secret"))
        proof = ("--secret-file", str(folder / "secret"))
        self.agent = self.job.start("agent", "--name", "only", "--listen", self.address, "--grace", "2", *proof)
        eventually(lambda: "serves at" in self.job.said(), self.job.said)
        options = ("--nnodes", "1:1", "--nproc-per-node", "2", "--elastic", "ranks", "--max-restarts", "1")
        program = self.job.write(ELASTIC)
        self.job.start("launch", *options, "--rdzv-endpoint", self.address, *proof, program, "1000000", log="launch")
        eventually(lambda: len(self.job.steps()) == 2, self.job.said)
        os.kill(next(pid for pid in self.pids() if pid is not None), signal.SIGKILL)
        eventually(lambda: self.view().generation == 2, self.job.said)
        self.go_on()

    def view(self) -> GroupView:
        return asyncio.run(ControlClient(self.address, self.credentials).status())

    def pids(self) -> list[int | None]:
        return [rank.pid for host in self.view().hosts for rank in host.ranks]

    def go_on(self) -> None:
        """Wait until the job has committed more steps."""
        before = max(self.job.steps().values())
        eventually(lambda: max(self.job.steps().values()) > before + 10, self.job.said)

    def megabytes(self) -> dict[int, float]:
        return {process.pid: process.memory_info().rss / (1 << 20) for process in self.job.processes()}


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="needs /proc")
def test_a_running_job_does_not_notice_a_former_member_that_says_everything_to_all_its_ports(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    try:
        view, pids, before, said = victim.view(), victim.pids(), victim.megabytes(), victim.job.said()
        outcomes = asyncio.run(attack(victim))
        check(outcomes)
        victim.go_on()
        assert (victim.view().generation, victim.view().world_size, victim.pids()) == (view.generation, 2, pids)
        grown = {pid: size - before[pid] for pid, size in victim.megabytes().items() if pid in before}
        assert max(grown.values()) < GROWTH, grown
        assert "Traceback" not in victim.job.said()[len(said) :] + victim.job.said("launch")
        assert terminate(victim.agent) in (0, 143), victim.job.said()
    finally:
        victim.job.close()


async def attack(victim: Victim) -> dict[str, list[str]]:
    """Say everything to all ports; return how the calls ended, by their kind."""
    outcomes: dict[str, list[str]] = {}
    places = {f"127.0.0.1:{place[1]}" for place in victim.job.listening() if isinstance(place, tuple)}
    assert len(places) >= 5, places  # of the agent one, of each rank those of snapshots, links and TCP lanes
    for address in places:
        answer = await knock(address, victim.credentials.secret)
        if answer:  # gRPC says at once what it speaks
            caller = StaleCaller(address, victim.credentials, generation=2)
            await caller.run()
            for what, found in caller.outcomes.items():
                outcomes.setdefault(what, []).extend(found)
    control = ControlClient(victim.address, victim.credentials)
    await control.cancel(CancelRequest(number=0, exit_code=1, why="an old job"))
    with pytest.raises(UsageError, match="HOST: expected one of only"):
        await control.drain(DrainRequest(host="former", grace=0.0))
    return outcomes


def check(outcomes: dict[str, list[str]]) -> None:
    """Each kind of call was served somewhere, and refused or without effect there."""
    served = {what: {kind for kind in found if kind != "UNIMPLEMENTED"} for what, found in outcomes.items()}
    assert served["stale link"] == {"refused"}
    assert served["enter"] == {"refusal"}
    assert served["ask"] == {"NOT_FOUND"}
    for stream, refusal in {"frames": "PERMISSION_DENIED", "exchange": "NOT_FOUND"}.items():
        assert served[stream], stream
        assert served[stream] <= {refusal, LATE_WRITE}, stream
    assert served["block"] == {"NOT_FOUND"}
    assert outcomes["pin"].count("ok") >= PINS
    assert served["join"] == {"refusal"}
