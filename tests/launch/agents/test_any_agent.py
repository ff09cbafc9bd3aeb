"""Requests to any agent of a group: where one is gone, stopped or only coming back, another one is asked."""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from asyncpar._proto.asyncpar.v1 import agents_pb2_grpc
from asyncpar.errors import UsageError
from asyncpar.hosts.messages import JobOpened
from asyncpar.hosts.network import RpcGroupNetwork
from asyncpar.hosts.service import WorldService
from asyncpar.hosts.votes import VoteFile
from asyncpar.launch.agents.any_agent import AnyAgent
from asyncpar.launch.agents.control_client import ControlClient, NoAgent
from asyncpar.launch.agents.control_service import ControlService
from asyncpar.launch.agents.job_record import decode_record, encode_record
from asyncpar.launch.agents.requests import CancelRequest, SubmitRequest
from asyncpar.launch.agents.views import GroupView, HostView
from asyncpar.net.transport.rpc import Credentials, RpcServer
from asyncpar.testing import run_virtual
from tests.launch.agents.simulated_hosts import record

CREDENTIALS = Credentials(bytes(range(32)))
JOB = record((1, 2))


class Agents:
    """Agents of which some are ``stopped``; the others name those at c:1 and d:1."""

    def __init__(self, *addresses: str, stopped: tuple[str, ...] = ()) -> None:
        self.addresses, self.stopped = addresses, set(stopped)
        self.asked: list[str] = []

    def connect(self, address: str, _: Credentials, seconds: float) -> ControlClient:
        return cast("ControlClient", FakeClient(self, address, seconds))

    @property
    def any(self) -> AnyAgent:
        return AnyAgent(self.addresses, CREDENTIALS, connect=self.connect)


class FakeClient:
    def __init__(self, agents: Agents, address: str, seconds: float) -> None:
        self._agents, self._address, self._seconds = agents, address, seconds

    async def status(self) -> GroupView:
        self._agents.asked.append(self._address)
        if self._address in self._agents.stopped:
            await asyncio.sleep(self._seconds)
            raise NoAgent(f"{self._address} did not answer")
        hosts = tuple(
            HostView(name=address[0], address=address, state="up", is_leader=False, is_voter=True)
            for address in ("c:1", "d:1")
        )
        return cast("GroupView", FakeView(hosts))


class FakeView:
    def __init__(self, hosts: tuple[HostView, ...]) -> None:
        self.hosts = hosts


def test_the_agent_that_answered_is_asked_again_and_those_that_it_names() -> None:
    agents = Agents("a:1", "b:1", "c:1", stopped=("a:1", "b:1"))

    async def ask() -> str:
        anyone = agents.any
        await anyone.status()
        agents.stopped = {"c:1"}
        await anyone.status()
        return anyone.address

    assert run_virtual(ask()) == "d:1"
    assert agents.asked == ["a:1", "b:1", "c:1", "c:1", "d:1"]


def test_all_are_asked_however_long_those_that_are_stopped_take() -> None:
    addresses = tuple(f"{name}:1" for name in "abcdefg")
    agents = Agents(*addresses, stopped=addresses[:-1])
    run_virtual(agents.any.status())
    assert agents.asked == list(addresses)
    everyone = Agents(*addresses, stopped=addresses)
    with pytest.raises(NoAgent):
        run_virtual(everyone.any.status())
    assert everyone.asked == list(addresses)


def test_a_lonely_agent_that_is_gone_is_waited_for_for_a_while() -> None:
    agents = Agents("a:1", stopped=("a:1",))
    with pytest.raises(NoAgent):
        run_virtual(agents.any.status())
    assert len(agents.asked) > 1


def test_who_is_asked_may_change_meanwhile_and_asking_ends_all_the_same() -> None:
    agents = Agents("a:1", "b:1", "x:1", stopped=("a:1", "b:1", "c:1", "d:1", "x:1"))
    hosts = tuple(
        HostView(name=name, address=f"{name}:1", state="up", is_leader=False, is_voter=True) for name in ("c", "d")
    )

    async def ask() -> None:
        asked = agents.any
        asyncio.get_running_loop().call_later(1.0, asked.know, cast("GroupView", FakeView(hosts)))
        async with asyncio.timeout(600):
            await asked.status()

    with pytest.raises(NoAgent):
        run_virtual(ask())
    assert "x:1" not in agents.asked


class Served:
    """An agent without ranks in this process; it takes part in its group after ``begin``."""

    def __init__(self, folder: Path, name: str, join: tuple[str, ...] = ()) -> None:
        self.server = RpcServer(CREDENTIALS)
        self.service = WorldService(
            name=name,
            network=RpcGroupNetwork(self.server, CREDENTIALS),
            join=join,
            votes=VoteFile(folder / name, job="agents"),
        )
        nobody: Any = None
        control = ControlService(name, self.service, nobody, CREDENTIALS, on_refused=self.server.refused)
        agents_pb2_grpc.add_AgentsServicer_to_server(control, self.server.server)  # type: ignore[no-untyped-call]

    async def serve(self, stack: AsyncExitStack) -> str:
        await self.server.start()
        stack.push_async_callback(self.server.stop, grace=0.0)
        return self.server.address

    async def begin(self, stack: AsyncExitStack) -> None:
        await self.service.start()
        stack.push_async_callback(self.service.stop)


@pytest.mark.process
async def test_an_agent_that_is_coming_back_is_passed_over_and_the_job_is_cancelled(tmp_path: Path) -> None:
    """It knows of no job yet, and would say that it has ended."""
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        group, back = Served(tmp_path, "one"), Served(tmp_path, "two")
        address, coming = await group.serve(stack), await back.serve(stack)
        await group.begin(stack)
        group.service.report(JobOpened(number=1, terms=JOB.terms, record=encode_record(JOB)))
        anyone = AnyAgent([coming, address], CREDENTIALS)
        await anyone.ask(lambda client: client.cancel(CancelRequest(number=1, exit_code=130, why="Ctrl-C")))
        assert anyone.address == address
        status = await group.service.status()
        assert status.closed is not None
        assert status.closed.number == 1


@pytest.mark.process
async def test_who_asks_an_agent_that_is_about_to_take_part_gets_the_answer_of_the_group(tmp_path: Path) -> None:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        late = Served(tmp_path, "one")
        client = ControlClient(await late.serve(stack), CREDENTIALS)
        asking = asyncio.create_task(client.submit(SubmitRequest(record=JOB)))
        await asyncio.sleep(0.05)
        await late.begin(stack)
        assert (await asking).number == 1


@pytest.mark.process
async def test_a_launcher_that_submits_its_job_again_gets_its_number_and_another_one_is_refused(
    tmp_path: Path,
) -> None:
    """The agent that took it may have ended before it could answer."""
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        one = Served(tmp_path, "one")
        address = await one.serve(stack)
        await one.begin(stack)
        two = Served(tmp_path, "two", (address,))
        other = await two.serve(stack)
        await two.begin(stack)
        ours = SubmitRequest(record=replace(JOB, ticket="ours"))
        numbers = [(await ControlClient(where, CREDENTIALS).submit(ours)).number for where in (address, other, address)]
        assert numbers == [1, 1, 1]
        for ticket in ("theirs", ""):
            with pytest.raises(UsageError, match=r"the agents run job 1 \(job\)"):
                await ControlClient(other, CREDENTIALS).submit(SubmitRequest(record=replace(JOB, ticket=ticket)))


@pytest.mark.process
async def test_limits_that_are_off_are_off_for_the_agents_too(tmp_path: Path) -> None:
    """They are infinite, for which JSON has no number."""
    limits = ("silent_after", "stopped_after", "busy_after", "restart_window")
    job = replace(JOB, **dict.fromkeys(limits, math.inf))
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        one = Served(tmp_path, "one")
        address = await one.serve(stack)
        await one.begin(stack)
        await ControlClient(address, CREDENTIALS).submit(SubmitRequest(record=job))
        opened = (await one.service.status()).job
    assert opened is not None
    assert decode_record(opened.record) == job
