"""Connections between agents and the coordinator break and come back: nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.addresses import split_address
from asyncpar.launch import agent_machine, protocol
from asyncpar.launch.coordinator_client import CoordinatorClient
from asyncpar.launch.coordinator_machine import JobPhase, JobSettings
from asyncpar.launch.coordinator_service import CoordinatorService
from asyncpar.launch.messages import ResumableStream
from asyncpar.launch.protocol import AgentHello, JobOutcome
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.transport.rpc import Credentials, RpcServer
from tests.launch.proxies import ResettingProxy
from tests.ports import free_port
from tests.soak import chosen

SECRET = Credentials(b"s" * 32)
HELLO = AgentHello(job="j", nnodes=1, nproc=1, node_rank=0, host="h")
Launcher = Any  # the class lives in conftest.py


class Recorder:
    """Stands for the machine: keeps what comes, answers each stopped generation with a Stop of the same number."""

    phase = JobPhase.RUNNING
    next_deadline = None

    def __init__(self) -> None:
        self.events: list[protocol.Event] = []

    def handle(self, event: protocol.Event, *, now: float) -> list[protocol.Command]:
        self.events.append(event)
        if isinstance(event, protocol.AgentStopped):
            return [protocol.SendOrder(event.agent, protocol.StopRanks(event.generation, signal.SIGTERM, ""))]
        if isinstance(event, protocol.JobInterrupted):
            return [protocol.SendOrder(event.agent, JobOutcome(7, "the end"))]
        return []

    def numbers(self) -> list[int]:
        return [event.generation for event in self.events if isinstance(event, protocol.AgentStopped)]

    def lost(self) -> list[str]:
        return [event.cause for event in self.events if isinstance(event, protocol.AgentLost)]


@asynccontextmanager
async def coordinator(*, reconnect: float = 5.0) -> AsyncIterator[tuple[Recorder, CoordinatorService, ResettingProxy]]:
    server = RpcServer(SECRET)
    settings = JobSettings(job="j", nnodes=1, reconnect=reconnect)
    service = CoordinatorService(settings, RendezvousService(job="j"), lambda: ("127.0.0.1", 1))
    recorder = Recorder()
    service._machine = recorder  # type: ignore[assignment]  # noqa: SLF001  # a recorder stands in for the state machine, which the service makes itself
    membership_pb2_grpc.add_CoordinatorServicer_to_server(service, server.server)  # type: ignore[no-untyped-call]
    await server.start()
    try:
        async with ResettingProxy(server.address) as proxy:
            yield recorder, service, proxy
    finally:
        service.close()
        await server.stop(grace=0)


def stopped(number: int) -> pb.AgentEvent:
    return pb.AgentEvent(stopped=pb.AgentStopped(generation=number))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not is_so():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.005)


async def test_a_connection_that_breaks_before_the_welcome_is_made_again() -> None:
    taken: list[agent_machine.Event] = []
    async with coordinator() as (recorder, _, proxy):
        agent = CoordinatorClient(proxy.address, SECRET, timeout=10.0, take=taken.append)
        attending = asyncio.ensure_future(agent.run(HELLO))
        for _ in range(3):
            await until(lambda: bool(proxy.connections))
            proxy.reset()
        agent.send(stopped(1))
        await until(lambda: len(taken) == 1)
        attending.cancel()
        await asyncio.wait({attending})
    assert recorder.numbers() == [1]


@pytest.mark.parametrize("seed", chosen((0,), soak=range(3)))
async def test_messages_of_both_sides_come_once_and_in_order_however_often_the_connection_breaks(seed: int) -> None:
    chance = random.Random(seed)
    taken: list[agent_machine.Event] = []
    async with coordinator() as (recorder, service, proxy):
        agent = CoordinatorClient(proxy.address, SECRET, timeout=10.0, take=taken.append)
        attending = asyncio.ensure_future(agent.run(HELLO))
        seen = 0
        for number in range(60):
            agent.send(stopped(number))
            await asyncio.sleep(chance.choice((0.0, 0.0, 0.01)))
            if number % 10 == seed:
                await until(lambda: len(recorder.numbers()) > seen)  # noqa: B023
                await asyncio.sleep(chance.uniform(0.0, 0.03))
                seen = len(recorder.numbers())
                proxy.reset()
        await until(lambda: len(taken) == 60)
        agent.send(pb.AgentEvent(interrupted=pb.AgentInterrupted(signal_number=2)))
        await until(lambda: len(taken) == 61)
        proxy.reset()  # with the outcome on its way to be acknowledged
        async with asyncio.timeout(10.0):
            await attending
            await service.wait_empty()
    assert proxy.resets >= 4
    assert recorder.numbers() == list(range(60))
    assert [event.generation for event in taken[:60] if isinstance(event, protocol.StopRanks)] == list(range(60))
    assert taken[60:] == [JobOutcome(7, "the end")]
    arrivals = [event for event in recorder.events if isinstance(event, protocol.AgentArrived)]
    assert len(arrivals) == 1
    assert len(recorder.lost()) == 1  # when it had left


@pytest.mark.parametrize("is_welcomed", [False, True])
async def test_a_coordinator_that_does_not_come_back_is_lost_within_the_grace_and_named(
    is_welcomed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[agent_machine.Event] = []
    async with coordinator(reconnect=0.5) as (recorder, service, proxy):
        agent = CoordinatorClient(proxy.address, SECRET, timeout=10.0, take=taken.append, reconnect=0.5)

        def cut() -> None:
            proxy.refuses = True
            proxy.reset()

        def find_and_cut(greeting: pb.AgentEvent) -> Any:
            cut()
            return find(greeting)

        find = service._find  # noqa: SLF001  # the connection is cut between the greeting and its answer, inside the service
        if not is_welcomed:
            monkeypatch.setattr(service, "_find", find_and_cut)
        attending = asyncio.ensure_future(agent.run(HELLO))
        await until(lambda: agent._is_connected if is_welcomed else bool(recorder.events))  # noqa: SLF001  # the client tells nobody that it has been welcomed
        cut()
        await attending
        (event,) = taken
        assert isinstance(event, agent_machine.CoordinatorLost)
        assert f"lost the coordinator at {proxy.address}" in event.cause
        assert "it did not come back within 0.5 s (--reconnect-within)" in event.cause
        await until(lambda: bool(recorder.lost()))
    assert "did not come back within 0.5 s" in recorder.lost()[0]


async def test_another_coordinator_at_the_same_place_is_not_taken_for_the_one_before() -> None:
    taken: list[agent_machine.Event] = []
    async with coordinator() as (recorder, service, proxy):
        agent = CoordinatorClient(proxy.address, SECRET, timeout=10.0, take=taken.append)
        attending = asyncio.ensure_future(agent.run(HELLO))
        agent.send(stopped(1))
        await until(lambda: len(taken) == 1 and bool(recorder.events))
        service._connected.clear()  # noqa: SLF001  # makes the service forget a connection that the agent still holds, as a restart would
        proxy.reset()
        async with asyncio.timeout(5.0):
            await attending
    assert isinstance(taken[-1], agent_machine.CoordinatorLost)
    assert "another one than before" in taken[-1].cause


@pytest.mark.parametrize("turns", chosen((0, 1, 2, 4), soak=range(8)))
async def test_the_proxy_may_reset_connections_at_any_moment_of_their_end(turns: int) -> None:
    async with coordinator() as (_, _, proxy):
        host, port = split_address(proxy.address)
        _, writer = await asyncio.open_connection(host, port)
        await until(lambda: proxy.connections == 2)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()  # with RST
        for _ in range(turns):
            await asyncio.sleep(0)
        proxy.reset()
        await until(lambda: not proxy.connections)


def test_messages_are_kept_until_they_are_acknowledged_and_taken_once() -> None:
    session: ResumableStream[pb.AgentEvent] = ResumableStream()
    first, second = session.send(stopped(1)), session.send(stopped(2))
    assert [first.number, second.number] == [1, 2]
    assert session.take(pb.AgentCommand(number=1, received=1))
    assert list(session.unacknowledged) == [second]
    assert not session.take(pb.AgentCommand(number=1))
    assert not session.take(pb.AgentCommand(received=2))
    assert not session.unacknowledged
    assert session.received == 1


BODY = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            open(f"{sys.argv[1]}/began-{rank}", "a").write("x")
            for step in range(10):
                x = np.ones(4)
                await node.world.all_reduce(x)
                assert x[0] == node.world.size
                await asyncio.sleep(0.1)
            open(f"{sys.argv[1]}/ended-{rank}", "a").write("x")

    ap.run(main)
"""


@pytest.mark.process
async def test_a_job_outlives_resets_while_it_forms_runs_and_ends(launcher: Launcher, tmp_path: Any) -> None:
    port = free_port()
    out = tmp_path / "out"
    out.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    script = launcher.script(BODY)
    common = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "j", "--secret-file", str(secret))
    async with ResettingProxy(f"127.0.0.1:{port}") as proxy:
        ends = [f"127.0.0.1:{port}", proxy.address]
        agents = [
            launcher.start(*common, "--node-rank", str(rank), "--rdzv-endpoint", end, script, str(out))
            for rank, end in enumerate(ends)
        ]
        while any(agent.poll() is None for agent in agents):
            await asyncio.sleep(0.4)
            proxy.reset()
        done = [await asyncio.to_thread(launcher.finish, agent) for agent in agents]
    assert [end.returncode for end in done] == [0, 0], [end.stderr for end in done]
    assert proxy.resets >= 4
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        f"{what}-{rank}": "x" for what in ("began", "ended") for rank in range(2)
    }
