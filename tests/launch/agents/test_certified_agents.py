"""Agents of a group with certificates let in whom they should, and say on both sides why they refuse others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncpar._proto.asyncpar.v1 import agents_pb2_grpc
from asyncpar.errors import AuthenticationError, UsageError
from asyncpar.hosts import entry
from asyncpar.hosts.messages import JobOpened
from asyncpar.hosts.network import RpcGroupNetwork
from asyncpar.hosts.service import WorldService
from asyncpar.hosts.votes import VoteFile
from asyncpar.launch.agents.control_client import ControlClient
from asyncpar.launch.agents.control_service import ControlService
from asyncpar.launch.agents.group_credentials import find_credentials
from asyncpar.launch.agents.job_record import ElasticMode, encode_record
from asyncpar.launch.agents.requests import SubmitRequest
from asyncpar.launch.agents.submission import adopt_credentials
from asyncpar.launch.options import LaunchOptions
from asyncpar.net.membership.credentials import load_certificates, read_secret
from asyncpar.net.security import issuing
from asyncpar.net.security.identity import COORDINATOR, Role, agent_role, rank_role
from asyncpar.net.transport.rpc import Credentials, RpcServer
from tests.launch.agents.simulated_hosts import record
from tests.net.security.parties import make_homes
from tests.soak import first

pytestmark = pytest.mark.process
JOB = record((1, 2))


@dataclass
class Agent:
    """An agent without ranks; ``refused`` is what it heard of others."""

    service: WorldService
    address: str
    refused: list[str] = field(default_factory=list)


@dataclass
class Group:
    """The directories of the hosts of a group, and agents that run in this process."""

    folder: Path
    homes: list[Path]
    stack: AsyncExitStack
    agents: list[Agent] = field(default_factory=list)

    async def start(
        self, name: str, credentials: Credentials, *, role: Role | None = None, votes: str | None = None
    ) -> Agent:
        """Found the group, or join it, acting under ``role`` (None: under the one that the certificate has)."""
        server = RpcServer(credentials)
        certificates = credentials.certificates
        service = WorldService(
            name=name,
            network=RpcGroupNetwork(server, credentials),
            join=[agent.address for agent in self.agents],
            votes=VoteFile(self.folder / (votes or name), job="agents"),
            role=role or (None if certificates is None else certificates.identity.role),
        )
        nobody: Any = None
        control = ControlService(name, service, nobody, credentials, on_refused=server.refused)
        agents_pb2_grpc.add_AgentsServicer_to_server(control, server.server)  # type: ignore[no-untyped-call]
        await server.start()
        self.stack.push_async_callback(server.stop, grace=0.0)
        agent = Agent(service, server.address)
        server.on_refused = lambda _, why: agent.refused.append(why)
        await service.start()
        self.stack.push_async_callback(service.stop)
        self.agents.append(agent)
        return agent

    def of(self, host: int) -> Credentials:
        """Return the credentials of the agent of a host."""
        return find_credentials(None, str(self.homes[host]), "127.0.0.1:1").rpc


@asynccontextmanager
async def group_of(folder: Path, homes: list[Path]) -> AsyncIterator[Group]:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        yield Group(folder, homes, stack)


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    return make_homes(tmp_path / "certs", hosts=3, ranks=1)


async def test_agents_with_certificates_decide_together_and_answer_each_other(
    homes: list[Path], tmp_path: Path
) -> None:
    async with group_of(tmp_path, homes) as group:
        first = await group.start("one", group.of(0))
        await group.start("two", group.of(1))
        third = await group.start("three", group.of(2))
        names = {host.name for host in (await first.service.status()).hosts}
        assert names == {"one", "two", "three"}
        third.service.report(JobOpened(number=1, terms=JOB.terms, record=encode_record(JOB)))
        while (await first.service.status()).job is None:  # noqa: ASYNC110  # it went to the leader, and the decision to all
            await asyncio.sleep(0.01)
        assert [agent.refused for agent in group.agents] == [[], [], []]


async def test_an_agent_cannot_act_as_that_of_another_host_and_both_sides_say_so(
    homes: list[Path], tmp_path: Path
) -> None:
    async with group_of(tmp_path, homes) as group:
        first = await group.start("one", group.of(0))
        why = (
            "it calls as the agent of host 2 of job 'demo', "
            "but its certificate is for the agent of host 1 of job 'demo'"
        )
        with pytest.raises(AuthenticationError, match=why):
            await group.start("three", group.of(1), role=agent_role(2))
        assert first.refused == [why]
        with pytest.raises(AuthenticationError, match="names no certificate of an agent"):
            await group.start("three", group.of(1), role=rank_role(1))


async def test_a_rank_is_no_agent_neither_for_those_who_call_it_nor_for_those_it_calls(
    homes: list[Path], tmp_path: Path
) -> None:
    async with group_of(tmp_path, homes) as group:
        first = await group.start("one", group.of(0))
        secret = read_secret(homes[0] / "secret")
        rank = Credentials(secret, load_certificates(homes[1], rank_role(1)))
        why = "it calls as an agent of job 'demo', but its certificate is for rank 1 of job 'demo'"
        with pytest.raises(AuthenticationError, match=why):
            await ControlClient(first.address, rank).status()
        assert first.refused == [why]
        server = RpcServer(rank)
        await server.start()
        group.stack.push_async_callback(server.stop, grace=0.0)
        with pytest.raises(AuthenticationError, match=r"shows the certificate of rank 1 .*, not of an agent"):
            await ControlClient(server.address, group.of(0)).status()


@pytest.mark.parametrize("asks", first(1, ["to join", "for the status"]))
async def test_an_agent_without_certificates_or_with_those_of_another_run_learns_it_at_once(
    homes: list[Path], tmp_path: Path, asks: str
) -> None:
    strangers = make_homes(tmp_path / "others", hosts=2, ranks=1)
    async with group_of(tmp_path, homes) as group:
        first = await group.start("one", group.of(0))
        secret = read_secret(homes[0] / "secret")

        async def ask(credentials: Credentials) -> None:
            if asks == "to join":
                await group.start("two", credentials)
            else:
                await ControlClient(first.address, credentials).status()

        with pytest.raises(AuthenticationError, match=r"wants certificates, .*; give all hosts --certs"):
            await ask(Credentials(secret))
        with pytest.raises(AuthenticationError, match="all hosts need certificates of the same `asyncpar certs init`"):
            await ask(Credentials(secret, load_certificates(strangers[1], agent_role(1))))
        with pytest.raises(AuthenticationError, match="did not accept our secret"):
            await ask(Credentials(bytes(32), load_certificates(homes[1], agent_role(1))))
        assert first.refused == ["it has another secret"]
        assert len((await first.service.status()).hosts) == 1, "and the group is as it was"


async def test_an_agent_with_certificates_learns_that_the_group_has_none(homes: list[Path], tmp_path: Path) -> None:
    async with group_of(tmp_path, homes) as group:
        await group.start("one", Credentials(read_secret(homes[0] / "secret")))
        with pytest.raises(AuthenticationError, match=r"does not answer in TLS .* give all hosts --certs"):
            await group.start("two", group.of(1))


async def test_a_directory_that_was_copied_to_two_hosts_is_named(
    homes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "_ENTER_SECONDS", 1.0)  # in which the first of them might turn out to be dead
    async with group_of(tmp_path, homes) as group:
        await group.start("one", group.of(0))
        await group.start("two", group.of(1))
        with pytest.raises(UsageError, match=r"--certs: the agent of host 1 is in the group already, as 'two' at 127"):
            await group.start("three", group.of(1))


async def test_votes_of_another_host_or_of_a_time_without_certificates_are_not_gone_on_with(
    homes: list[Path], tmp_path: Path
) -> None:
    secret = read_secret(homes[0] / "secret")
    async with group_of(tmp_path, homes) as group:
        await group.start("one", Credentials(secret))
    async with group_of(tmp_path, homes) as group:
        with pytest.raises(UsageError, match=r"votes of an agent without certificates, and this one is the agent"):
            await group.start("one", group.of(0))
        await group.start("one", group.of(0), votes="new")
    async with group_of(tmp_path, homes) as group:
        with pytest.raises(UsageError, match=r"votes of the agent of host 0, and this one has none; give the --certs"):
            await group.start("one", Credentials(secret), votes="new")


@pytest.mark.parametrize("mode", first(1, ElasticMode))
async def test_agents_with_certificates_take_jobs_of_both_modes(
    homes: list[Path], tmp_path: Path, mode: ElasticMode
) -> None:
    async with group_of(tmp_path, homes) as group:
        first = await group.start("one", group.of(0))
        job = msgspec.structs.replace(JOB, mode=mode)
        assert (await ControlClient(first.address, group.of(1)).submit(SubmitRequest(record=job))).number == 1


def test_certificates_of_the_time_when_agents_did_not_serve_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuing, "ANY_AGENT", COORDINATOR)  # agents get no common name then
    old = make_homes(tmp_path / "old", hosts=1)[0]
    with pytest.raises(UsageError, match=r"agent-0\.crt was made by an older asyncpar and is not for agents"):
        find_credentials(None, str(old), "127.0.0.1:1")


def test_a_launcher_takes_the_job_and_the_ranks_from_the_certificates(tmp_path: Path) -> None:
    home = make_homes(tmp_path / "certs", hosts=2)[1]
    options = LaunchOptions(program="x", elastic="ranks", nnodes=2, endpoint="h:1", certs=str(home), nproc=2)
    adopted, credentials = adopt_credentials(options, "127.0.0.1:1")
    assert adopted.job == "demo"
    assert credentials.certificates is not None
    assert credentials.certificates.ranks == (2, 3)
    assert adopt_credentials(replace(options, certs=str(home.parent), node_rank=1), "127.0.0.1:1") == (
        replace(adopted, certs=str(home.parent), node_rank=1),
        credentials,
    )
    with pytest.raises(UsageError, match="has certificates for 2 ranks, this host runs 3"):
        adopt_credentials(replace(options, nproc=3), "127.0.0.1:1")
    with pytest.raises(UsageError, match="--rdzv-id: expected 'demo', the job of the certificates"):
        adopt_credentials(replace(options, job="other"), "127.0.0.1:1")
    with pytest.raises(UsageError, match="is for several hosts; name the directory of this one in it"):
        adopt_credentials(replace(options, certs=str(home.parent)), "127.0.0.1:1")
