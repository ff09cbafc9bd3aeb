"""A group of one, and what it answers to newcomers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from asyncpar._proto.asyncpar.v1 import group_pb2 as pb
from asyncpar.errors import LaunchError
from asyncpar.hosts.messages import HostDraining, JobOpened, WorldTerms
from asyncpar.hosts.network import AnswerNewcomer, OnDown, OnUp, PeerConnection, TakeFrame
from asyncpar.hosts.service import WorldService
from asyncpar.hosts.votes import VoteFile, VoteFileError
from asyncpar.testing import run_virtual


class Nobody:
    """A connection that brings nothing anywhere."""

    address = "b:1"

    def send(self, message: object) -> None:
        pass

    async def close(self) -> None:
        pass


class Silent:
    """A network without other agents."""

    address = "a:1"

    def __init__(self) -> None:
        self.answer: AnswerNewcomer | None = None
        self.take: TakeFrame | None = None
        self.downs: dict[str, OnDown] = {}

    def serve(self, node: str, take: TakeFrame, answer: AnswerNewcomer) -> None:
        self.take, self.answer = take, answer

    def connect(self, own: tuple[str, str], node: str, address: str, *, on_up: OnUp, on_down: OnDown) -> PeerConnection:
        self.downs[node] = on_down
        return Nobody()

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        raise ConnectionError("refused")


class FullDisk:
    """A disk that was full when something was to be stored."""

    def __init__(self) -> None:
        self.content: bytes | None = None
        self.is_full = False

    def read(self, name: str) -> bytes:
        if self.content is None:
            raise FileNotFoundError(name)
        return self.content

    def replace(self, name: str, data: bytes) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.content = data


async def founded(network: Silent, disk: FullDisk) -> WorldService:
    votes = VoteFile(Path("votes"), job="agents", disk=disk)
    service = WorldService(name="a", network=network, join=(), votes=votes)
    await service.start()
    await asyncio.sleep(0.5)
    return service


def conversation(talk: Callable[[WorldService, Silent, FullDisk], Awaitable[None]]) -> None:
    async def run() -> None:
        network, disk = Silent(), FullDisk()
        service = await founded(network, disk)
        await talk(service, network, disk)
        await service.stop()

    run_virtual(run())


def test_newcomers_of_another_version_or_with_a_name_that_is_taken_are_refused() -> None:
    async def talk(service: WorldService, network: Silent, _: FullDisk) -> None:
        assert network.answer is not None
        other = await network.answer(pb.EnterRequest(version="0", node="b#1", name="b", address="b:1"))
        assert other.refusal.startswith("version: the group is of asyncpar ")
        assert other.refusal.endswith("this agent of 0; install the same version on all hosts")
        assert not other.is_passing
        version = other.refusal.split()[6].rstrip(",")
        taken = await network.answer(pb.EnterRequest(version=version, node="a#2", name="a", address="c:1"))
        assert taken.refusal.startswith("--name: a host called 'a' is in the group already, at a:1")
        assert (await service.status()).leader == "a"

    conversation(talk)


def test_a_full_disk_ends_the_agent_with_an_error_that_says_so() -> None:
    async def talk(service: WorldService, _: Silent, disk: FullDisk) -> None:
        disk.is_full = True
        service.report(HostDraining("a"))  # no change of what is agreed on
        terms = WorldTerms(least_hosts=1, most_hosts=1, members=1)
        service.report(JobOpened(number=1, terms=terms, record=b""))
        with pytest.raises(VoteFileError, match="cannot be stored: No space left on device"):
            async for _command in service.commands:
                pass

    conversation(talk)


def test_a_newcomer_without_anybody_to_join_says_where_it_looked() -> None:
    async def run() -> None:
        votes = VoteFile(Path("votes"), job="agents", disk=FullDisk())
        service = WorldService(name="b", network=Silent(), join=("x:1",), votes=votes)
        with pytest.raises(LaunchError, match=r"--join: no agent answers at x:1 \(refused\), for 6 s"):
            await service.start()

    run_virtual(run())


class FarLeader(Silent):
    """Agents of which one answers, with the address of a leader that does not."""

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        if address == "x:1":
            return pb.EnterReply(leader_address="far:1")
        return await super().ask(address, request)


def test_a_newcomer_that_does_not_reach_the_leader_says_who_named_it() -> None:
    async def run() -> None:
        votes = VoteFile(Path("votes"), job="agents", disk=FullDisk())
        service = WorldService(name="b", network=FarLeader(), join=("x:1",), votes=votes)
        named = r"no agent answers at far:1 \(refused\), where the leader is by what the agent at x:1 knows"
        with pytest.raises(LaunchError, match=named):
            await service.start()

    run_virtual(run())


async def let_in(network: Silent, *names: str) -> None:
    assert network.answer is not None
    refusal = (await network.answer(pb.EnterRequest(version="0"))).refusal
    version = refusal.split()[6].rstrip(",")
    for name in names:
        await network.answer(pb.EnterRequest(version=version, node=f"{name}#1", name=name, address=f"{name}:1"))


async def leaving(service: WorldService, network: Silent) -> tuple[asyncio.Task[float], float]:
    """Let in two hosts, which vote and answer nothing more, and leave; return the task and when it began."""
    assert network.take is not None
    await let_in(network, "b", "c")
    for name in ("b", "c"):
        network.take(f"{name}#1", f"{name}:1", HostDraining(name, is_draining=False))
    await asyncio.sleep(0.5)
    assert [host.name for host in (await service.status()).hosts if host.is_voter] == ["a", "b", "c"]

    async def leave() -> float:
        await service.stop()
        return asyncio.get_running_loop().time()

    task, began = asyncio.create_task(leave()), asyncio.get_running_loop().time()
    await asyncio.sleep(1.0)
    return task, began


def test_a_host_that_leaves_waits_for_a_while_for_others_that_do_not_answer() -> None:
    async def talk(service: WorldService, network: Silent, _: FullDisk) -> None:
        task, began = await leaving(service, network)
        assert not task.done()
        assert await task == pytest.approx(began + 10.0)

    conversation(talk)


def test_it_does_not_wait_for_others_that_are_gone() -> None:
    async def talk(service: WorldService, network: Silent, _: FullDisk) -> None:
        task, began = await leaving(service, network)
        for node, on_down in network.downs.items():
            on_down(node, True)
        assert await task == pytest.approx(began + 1.0)

    conversation(talk)


def test_it_does_not_wait_when_it_is_asked_again() -> None:
    async def talk(service: WorldService, network: Silent, _: FullDisk) -> None:
        task, began = await leaving(service, network)
        service.leave_at_once()
        assert await task == pytest.approx(began + 1.0)

    conversation(talk)


def test_a_founder_may_leave_a_host_that_has_never_said_anything() -> None:
    async def talk(service: WorldService, network: Silent, _: FullDisk) -> None:
        await let_in(network, "b")
        await service.stop()
        assert [host.name for host in (await service.status()).hosts] == ["b"]

    conversation(talk)
