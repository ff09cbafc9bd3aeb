"""An agent's stream to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.launch import agent_machine
from asyncpar.launch.coordinator_client import CoordinatorClient
from asyncpar.launch.coordinator_machine import JobSettings
from asyncpar.launch.coordinator_service import CoordinatorService
from asyncpar.launch.protocol import AgentHello, JobOutcome
from asyncpar.net.membership.credentials import load_certificates
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.security.identity import COORDINATOR, Role, agent_role, rank_role
from asyncpar.net.transport.rpc import Credentials, RpcServer
from tests.net.security.parties import JOB, authority_now, certify

HELLO = AgentHello(job="j", nnodes=1, nproc=1, node_rank=0, host="h")
SECRET = b"s" * 32


async def attend(address: str, credentials: Credentials, hello: AgentHello) -> list[agent_machine.Event]:
    """Attend until the coordinator has nothing more to say; return what it said."""
    taken: list[agent_machine.Event] = []
    async with asyncio.timeout(10):
        await CoordinatorClient(address, credentials, timeout=8.0, take=taken.append).run(hello)
    return taken


@asynccontextmanager
async def coordinator(home: Path) -> AsyncIterator[str]:
    """Serve the coordinator of a job of two hosts, with its certificate."""
    server = RpcServer(Credentials(SECRET, load_certificates(home, COORDINATOR)))
    rendezvous = RendezvousService(job=JOB)
    service = CoordinatorService(JobSettings(job=JOB, nnodes=2), rendezvous, lambda: ("127.0.0.1", 1))
    membership_pb2_grpc.add_CoordinatorServicer_to_server(service, server.server)  # type: ignore[no-untyped-call]
    await server.start()
    try:
        yield server.address
    finally:
        service.close()
        await server.stop(grace=0)


@pytest.mark.parametrize(
    ("shown", "claimed", "node_rank"),
    [
        (agent_role(1), "the agent of host 0", 0),
        (rank_role(0), "the agent of host 0", 0),
        (agent_role(0), "the agent of host 1", 1),
    ],
)
async def test_an_agent_has_to_show_the_certificate_of_its_host(
    tmp_path: Path, shown: Role, claimed: str, node_rank: int
) -> None:
    authority = authority_now()
    for role in (COORDINATOR, shown):
        certify(authority, role, tmp_path)
    hello = AgentHello(job=JOB, nnodes=2, nproc=1, node_rank=node_rank, host="h")
    async with coordinator(tmp_path) as address:
        taken = await attend(address, Credentials(SECRET, load_certificates(tmp_path, shown)), hello)
    assert isinstance(taken[0], JobOutcome)
    assert taken[0].message == (
        f"the coordinator refused this agent: it calls as {claimed} of job 'demo', but its certificate is for {shown} "
        "of job 'demo'"
    )


async def test_trouble_with_certificates_is_reported_at_once(tmp_path: Path) -> None:
    certify(authority_now(), COORDINATOR, tmp_path / "one")
    other = certify(authority_now(), agent_role(0), tmp_path / "other")
    async with coordinator(tmp_path / "one") as address:
        for credentials in (Credentials(SECRET, other), Credentials(SECRET)):
            (event,) = await attend(address, credentials, HELLO)
            assert isinstance(event, agent_machine.CoordinatorLost)
            assert "certificates" in event.cause


async def test_a_coordinator_with_another_secret_is_distinguished_from_a_lost_one() -> None:
    server = RpcServer(Credentials(b"s" * 32))
    membership_pb2_grpc.add_CoordinatorServicer_to_server(  # type: ignore[no-untyped-call]
        membership_pb2_grpc.CoordinatorServicer(), server.server
    )
    await server.start()
    taken: list[agent_machine.Event] = []
    for _ in range(20):
        stranger = CoordinatorClient(server.address, Credentials(b"x" * 32), timeout=10.0, take=taken.append)
        await stranger.run(HELLO)
    await server.stop(grace=0)
    assert len(taken) == 20
    for event in taken:
        assert isinstance(event, agent_machine.CoordinatorLost)
        assert "did not accept our secret" in event.cause


async def test_a_coordinator_that_never_comes_is_waited_for_and_no_longer() -> None:
    taken: list[agent_machine.Event] = []
    await CoordinatorClient("127.0.0.1:9", Credentials(b"s" * 32), timeout=0.2, take=taken.append).run(HELLO)
    (event,) = taken
    assert isinstance(event, agent_machine.CoordinatorLost)
    assert "no coordinator answered at 127.0.0.1:9 for 0.2 s" in event.cause
