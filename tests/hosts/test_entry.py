"""Agents that come back as the voters that they were, and agents that are newcomers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from asyncpar._proto.asyncpar.v1 import group_pb2 as pb
from asyncpar.errors import LaunchError, UsageError
from asyncpar.hosts.codec import decode_entry, encode_entry, encode_group
from asyncpar.hosts.consensus_messages import DurableState, Entry, Term
from asyncpar.hosts.entry import find_place, found_group
from asyncpar.hosts.group import GroupNode, GroupState
from asyncpar.hosts.network import AnswerNewcomer, OnDown, OnUp, PeerConnection, TakeFrame
from asyncpar.hosts.votes import VoteFile
from asyncpar.testing import run_virtual

OLD = GroupNode(node="a#old", name="a", address="a:1")
OTHER = GroupNode(node="b#1", name="b", address="b:1")
NEW = replace(OLD, node="a#new")


def entry(*nodes: GroupNode, generation: int = 3) -> Entry:
    ids = tuple(node.node for node in nodes)
    return Entry(generation=generation, voters=ids, nodes=ids, content=encode_group(GroupState(nodes=nodes)))


STORED = DurableState(decided=entry(OLD, OTHER), promised=Term(4, "b#1"), node="a#old")


class Answering:
    """A network in which all agents answer the same; None: nobody does."""

    address = "a:1"

    def __init__(self, reply: pb.EnterReply | None) -> None:
        self.reply = reply
        self.asked: list[tuple[str, pb.EnterRequest]] = []

    def serve(self, node: str, take: TakeFrame, answer: AnswerNewcomer) -> None:
        raise AssertionError

    def connect(self, own: tuple[str, str], node: str, address: str, *, on_up: OnUp, on_down: OnDown) -> PeerConnection:
        raise AssertionError

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        self.asked.append((address, request))
        if self.reply is None:
            raise ConnectionError("refused")
        return self.reply


def place(stored: DurableState | None, join: tuple[str, ...], network: Answering, own: GroupNode = NEW) -> DurableState:
    return run_virtual(find_place(own, stored, join, network, version="1"))


def test_a_founder_is_the_voter_that_it_was_and_else_founds() -> None:
    assert place(STORED, (), Answering(None)) == STORED
    assert place(None, (), Answering(None)) == found_group(NEW)


def test_a_group_that_goes_on_takes_a_newcomer_and_learns_what_it_knew() -> None:
    now = entry(OTHER, NEW, generation=9)
    network = Answering(pb.EnterReply(entry=encode_entry(now)))
    assert place(STORED, ("b:1",), network) == DurableState(decided=now, node="a#new")
    assert decode_entry(network.asked[0][1].known) == STORED.decided


def test_a_group_without_a_leader_needs_the_voter() -> None:
    leaderless = pb.EnterReply(refusal="the group has no leader now", is_passing=True)
    assert place(STORED, ("b:1",), Answering(leaderless)) == STORED
    assert place(STORED, ("b:1",), Answering(None)) == STORED
    with pytest.raises(LaunchError, match="--join: the group has no leader now"):
        place(None, ("b:1",), Answering(leaderless))


def test_who_was_declared_lost_or_serves_elsewhere_asks_the_others() -> None:
    now = encode_entry(entry(OTHER, NEW, generation=9))
    for stored, own in (
        (replace(STORED, decided=entry(OTHER)), NEW),
        (STORED, replace(NEW, address="a:2")),
    ):
        network = Answering(pb.EnterReply(entry=now))
        assert place(stored, (), network, own).node == "a#new"
        assert network.asked[0][0] == "b:1"


class Stopped(Answering):
    """A network in which only the last of the agents answers; the others are stopped."""

    def __init__(self, reply: pb.EnterReply, last: str) -> None:
        super().__init__(reply)
        self.last = last

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        if address != self.last:
            self.asked.append((address, request))
            await asyncio.sleep(3.0)
            raise ConnectionError("nothing for 3 s")
        return await super().ask(address, request)


def test_every_agent_is_asked_however_many_are_stopped() -> None:
    network = Stopped(pb.EnterReply(entry=encode_entry(entry(OTHER, NEW, generation=9))), "f:1")
    assert place(None, ("b:1", "c:1", "d:1", "e:1", "f:1"), network).node == "a#new"
    assert [address for address, _ in network.asked] == ["b:1", "c:1", "d:1", "e:1", "f:1"]


def test_agents_that_name_each_other_as_the_leader_are_not_followed_for_ever() -> None:
    network = Answering(pb.EnterReply(leader_address="b:1"))
    with pytest.raises(LaunchError, match="names a leader at b:1, which does not let it in"):
        place(None, ("b:1", "c:1"), network)
    assert network.asked[-1][0] == "c:1", "the others are asked, too"


def test_votes_of_another_host_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--state-dir: holds the votes of host 'a', and this one is called 'c'"):
        place(STORED, (), Answering(None), replace(NEW, name="c"))


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from asyncpar.hosts.consensus import ConsensusNode
    from asyncpar.hosts.consensus_messages import *
    from asyncpar.hosts.votes import VoteFile

    votes = VoteFile(Path(sys.argv[1]), job="agents")
    entry = Entry(generation=0, voters=("a", "b", "c"), nodes=("a", "b", "c"))
    state = votes.read() or DurableState(decided=entry, node="a")
    node = ConsensusNode("a", state, now=0.0, jitter=lambda: 0.5)
    asked = MessageReceived(sys.argv[2], Prepare(0, Term(int(sys.argv[3]), sys.argv[2])))
    for command in node.handle(asked, now=0.1):
        if isinstance(command, Persist):
            votes.write(command.state)
            if sys.argv[4] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        print(type(command.message).__name__ if isinstance(command, SendMessage) else "stored", flush=True)
"""


def test_a_voter_that_is_killed_between_its_write_and_its_answer_keeps_its_promise(tmp_path: Path) -> None:
    def asked(candidate: str, term: int, *, dies: bool = False) -> subprocess.CompletedProcess[str]:
        arguments = [str(tmp_path / "votes"), candidate, str(term), "dies" if dies else "lives"]
        command = [sys.executable, "-c", textwrap.dedent(KILLED), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    killed = asked("b", 5, dies=True)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "")
    assert asked("c", 4).stdout.split() == ["Refused"]
    assert asked("b", 5).stdout.split() == ["Promise"]
    assert asked("c", 6).stdout.split() == ["stored", "Promise"]
    stored = VoteFile(tmp_path / "votes", job="agents").read()
    assert stored is not None
    assert stored.promised == Term(6, "c")


class Redirecting(Answering):
    """A network in which the leader refuses for now, if it ``refuses``, and the others name the leader."""

    def __init__(self, *, refuses: bool) -> None:
        super().__init__(None)
        self._refuses = refuses

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        self.asked.append((address, request))
        if address == "b:1" and self._refuses and len(self.asked) < 4:
            return pb.EnterReply(refusal="--name: it is taken", is_passing=True)
        return pb.EnterReply(leader_address="b:1")


def test_why_there_is_no_place_is_told_also_where_the_last_answer_only_named_the_leader() -> None:
    with pytest.raises(UsageError, match="--name: it is taken"):
        place(None, ("c:1",), Redirecting(refuses=True))
    with pytest.raises(LaunchError, match="names a leader at b:1, which does not let it in, for 6 s"):
        place(None, ("c:1",), Redirecting(refuses=False))
