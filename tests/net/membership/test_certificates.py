"""Joining with certificates: a rank joins as itself, and trouble with certificates is told at once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.world import Member, World
from asyncpar.errors import AuthenticationError, StaleGeneration, UsageError
from asyncpar.net.membership.client import JoinRequest, join_world, serve_alone
from asyncpar.net.membership.credentials import load_certificates, read_credentials, rendezvous_role
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.security.identity import COORDINATOR, agent_role, rank_role
from asyncpar.net.transport.rpc import Credentials, RpcServer, open_channel
from asyncpar.net.transport.serving import Serving
from asyncpar.net.transport.tls_probe import check_tls
from tests.net.security.parties import JOB, make_directory, make_homes

SECRET = bytes(range(32))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_directory(tmp_path / "certs")


@asynccontextmanager
async def rendezvous(
    credentials: Credentials, *, size: int = 2, service: RendezvousService | None = None
) -> AsyncIterator[str]:
    server = RpcServer(credentials)
    service = service or RendezvousService(job=JOB, world_size=size)
    membership_pb2_grpc.add_RendezvousServicer_to_server(service, server.server)  # type: ignore[no-untyped-call]
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(grace=0)


def request(rank: int, *, size: int = 2, generation: int = 0) -> JoinRequest:
    member = Member(rank=rank, address="127.0.0.1:1")
    return JoinRequest(member=member, world_size=size, generation=generation, job=JOB, timeout=20.0)


def of_rank(home: Path, rank: int) -> Credentials:
    return Credentials(SECRET, load_certificates(home, rank_role(rank)))


async def test_ranks_join_as_themselves(home: Path) -> None:
    async with rendezvous(Credentials(SECRET, load_certificates(home, COORDINATOR))) as address:
        worlds = await asyncio.gather(*(join_world(address, of_rank(home, rank), request(rank)) for rank in (0, 1)))
    assert worlds[0] == worlds[1]


async def test_a_rank_cannot_join_as_another_and_does_not_spoil_its_place(home: Path) -> None:
    async with rendezvous(Credentials(SECRET, load_certificates(home, COORDINATOR))) as address:
        with pytest.raises(
            AuthenticationError,
            match="refused this rank: it calls as rank 0 of job 'demo', but its certificate is for rank 1 of job",
        ):
            await join_world(address, of_rank(home, 1), request(0))
        worlds = await asyncio.gather(*(join_world(address, of_rank(home, rank), request(rank)) for rank in (0, 1)))
    assert worlds[0] == worlds[1]


async def test_ranks_of_worlds_that_start_again_join_with_the_certificates_of_their_world(tmp_path: Path) -> None:
    """Hosts of an earlier world are in other places in the next one, or gone; certificates are those of hosts."""
    one, two = make_homes(tmp_path / "certs", hosts=2)
    service = RendezvousService(job="agents", certified=())
    agent, first = agent_role(1), of_rank(one, 1)
    async with rendezvous(Credentials(SECRET, load_certificates(two, agent)), service=service) as address:

        async def join(credentials: Credentials, rank: int, *, generation: int, size: int) -> World:
            asked = request(rank, size=size, generation=generation)
            return await join_world(address, credentials, asked, served_by=agent)

        with pytest.raises(AuthenticationError, match="rank 0 of generation 0: there is no such rank in the world"):
            await join(first, 0, generation=0, size=1)

        service.open(generation=3, world_size=2, job=JOB, certified=(1, 2))
        worlds = await asyncio.gather(
            join(first, 0, generation=3, size=2), join(of_rank(two, 2), 1, generation=3, size=2)
        )
        assert worlds[0] == worlds[1]

        service.open(generation=5, world_size=2, job=JOB, certified=(2, 3))
        with pytest.raises(
            AuthenticationError,
            match=(
                "rank 0 of generation 5 has the certificate rank-2: it calls as rank 2 of job 'demo', but its "
                "certificate is for rank 1 of job 'demo'"
            ),
        ):
            await join(first, 0, generation=5, size=2)
        with pytest.raises(StaleGeneration, match="rank 0 belongs to generation 3; generation 5 is in force"):
            await join(first, 0, generation=3, size=2)
        with pytest.raises(AuthenticationError, match="rank 2 of generation 5: there is no such rank"):
            await join(first, 2, generation=5, size=3)
        later = await asyncio.gather(*(join(of_rank(two, 2 + rank), rank, generation=5, size=2) for rank in (0, 1)))
        assert later[0] == later[1], "and nobody has spoilt their places"


async def test_a_rank_meets_only_where_the_agent_of_its_world_serves(tmp_path: Path) -> None:
    one, two = make_homes(tmp_path / "certs", hosts=2)
    async with rendezvous(Credentials(SECRET, load_certificates(two, agent_role(1)))) as address:
        with pytest.raises(AuthenticationError, match=r"certificate of the agent of host 1 .*, not of .* host 0"):
            await join_world(address, of_rank(one, 0), request(0), served_by=agent_role(0))


async def test_a_rank_is_no_rendezvous(home: Path) -> None:
    async with rendezvous(of_rank(home, 0)) as address, asyncio.timeout(30):
        with pytest.raises(AuthenticationError, match=r"shows the certificate of rank 0 .*, not of the coordinator"):
            await join_world(address, of_rank(home, 1), request(1))


async def test_hosts_with_certificates_of_two_runs_learn_it_at_once(home: Path, tmp_path: Path) -> None:
    other = make_directory(tmp_path / "other")
    async with rendezvous(Credentials(SECRET, load_certificates(home, COORDINATOR))) as address, asyncio.timeout(30):
        with pytest.raises(AuthenticationError, match=r"the coordinator at .* of the same `asyncpar certs init`"):
            await join_world(address, of_rank(other, 1), request(1))


async def test_a_rank_without_certificates_learns_it_at_once(home: Path) -> None:
    async with rendezvous(Credentials(SECRET, load_certificates(home, COORDINATOR))) as address, asyncio.timeout(30):
        with pytest.raises(AuthenticationError, match=r"wants certificates, .* \(ranks read ASYNCPAR_CERTS\)"):
            await join_world(address, Credentials(SECRET), request(1))


async def test_a_rendezvous_without_certificates_is_told_apart_at_once(home: Path) -> None:
    async with rendezvous(Credentials(SECRET)) as address, asyncio.timeout(30):
        with pytest.raises(AuthenticationError, match="does not answer in TLS"):
            await join_world(address, of_rank(home, 1), request(1))


async def test_a_certificate_without_the_jobs_secret_is_not_enough(home: Path) -> None:
    async with rendezvous(Credentials(SECRET, load_certificates(home, COORDINATOR))) as address:
        with pytest.raises(AuthenticationError, match="did not accept this job's secret"):
            await join_world(address, Credentials(bytes(32), load_certificates(home, rank_role(1))), request(1))


def place(home: Path, **changes: object) -> LaunchEnvironment:
    whole = LaunchEnvironment(
        rank=1,
        local_rank=1,
        world_size=2,
        local_world_size=2,
        group_rank=0,
        group_world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        rendezvous="127.0.0.1:2",
        secret_file=str(home / "secret"),
        job=JOB,
        generation=0,
        restart_count=0,
        host="h",
        host_id="h-1",
        bind="127.0.0.1",
        timeout=1.0,
        certs=str(home),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_a_rank_reads_its_credentials_from_where_its_environment_says(home: Path) -> None:
    environment = LaunchEnvironment.from_mapping(place(home).to_mapping())
    assert environment is not None
    credentials = read_credentials(environment)
    assert credentials.secret == (home / "secret").read_bytes()
    assert credentials.certificates is not None
    assert credentials.certificates.identity.role == rank_role(1)
    assert read_credentials(place(home, certs=None)).certificates is None


def test_a_rank_of_a_certified_world_has_the_certificate_that_its_environment_says(tmp_path: Path) -> None:
    home = make_homes(tmp_path / "certs", hosts=2)[1]
    mapping = place(home, certified=(0, 3), rendezvous_role="agent-1").to_mapping()
    environment = LaunchEnvironment.from_mapping(mapping)
    assert environment is not None
    credentials = read_credentials(environment)
    assert credentials.certificates is not None
    assert credentials.certificates.identity.role == rank_role(3)
    assert [credentials.role_of(rank) for rank in (0, 1)] == [rank_role(0), rank_role(3)]
    assert rendezvous_role(environment) == agent_role(1)
    assert rendezvous_role(place(home)) == COORDINATOR
    for wrong in ("rank-1", "nobody"):
        with pytest.raises(UsageError, match=f"_ROLE: expected coordinator or agent-N, got '{wrong}'"):
            rendezvous_role(place(home, rendezvous_role=wrong))


async def test_a_node_that_nobody_launched_serves_with_the_certificates_of_rank_0(home: Path) -> None:
    environment = {"ASYNCPAR_CERTS": str(home), "ASYNCPAR_SECRET_FILE": str(home / "secret")}
    secret = (home / "secret").read_bytes()
    async with AsyncExitStack() as stack:
        server = await serve_alone(stack, Serving(address="127.0.0.1:0"), environment, register=lambda _: None)
        assert server is not None
        client = Credentials(secret, load_certificates(home, rank_role(1)))
        async with open_channel(server.address, client, peer=rank_role(0)) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        with pytest.raises(AuthenticationError, match="wants certificates"):
            await check_tls(server.address, Credentials(secret), rank_role(0))


def test_certificates_of_another_job_are_refused_before_any_call(home: Path) -> None:
    with pytest.raises(UsageError, match=r"ASYNCPAR_CERTS: expected certificates of job 'elsewhere', .* of job 'demo'"):
        read_credentials(place(home, job="elsewhere"))


def test_a_directory_that_is_gone_is_named(home: Path) -> None:
    environment = place(home)
    secret = home.with_name("secret")
    shutil.copy(home / "secret", secret)
    shutil.rmtree(home)
    with pytest.raises(UsageError, match=r"certs has none for rank 1|certs cannot be read"):
        read_credentials(replace(environment, secret_file=str(secret)))
