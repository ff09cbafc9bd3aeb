"""The part of one host in a group of agents: its server, its vote, and the agent that runs its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from asyncpar._proto.asyncpar.v1 import agents_pb2_grpc, membership_pb2_grpc
from asyncpar.core.addresses import host_of_peer, split_address
from asyncpar.errors import AuthenticationError
from asyncpar.hosts.network import RpcGroupNetwork
from asyncpar.hosts.service import WorldService
from asyncpar.hosts.votes import VoteFile
from asyncpar.launch.agents.control_service import ControlService
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.launch.agents.slot_processes import HostPlace
from asyncpar.launch.display import Display
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.transport.refusals import Refusals
from asyncpar.net.transport.rpc import Credentials, RpcServer

GROUP_JOB = "agents"
"""The job name of agents that outlive jobs, in lists of jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPart:
    """The parts of a host in the group: ``group`` decides, ``agent`` runs ranks, ``control`` answers commands."""

    group: WorldService
    agent: HostAgent
    control: ControlService


async def take_part(
    stack: AsyncExitStack,
    place: HostPlace,
    *,
    listen: str,
    join: tuple[str, ...],
    credentials: Credentials,
    votes: Path,
    display: Display,
    reaper: ReaperClient,
    only_job: bool = False,
    is_for_one_job: bool = False,
    on_line: Callable[[str], None] | None = None,
) -> GroupPart:
    """Join the group of the agents at ``join``, or found one, and serve this host's part until ``stack`` closes.

    ``listen`` is ``host:port`` (port 0: a free one), ``votes`` the directory of its votes.  See ``HostAgent`` for
    ``only_job`` and ``on_line``.  Raises the errors of joining: ``AuthenticationError``, ``LaunchError``,
    ``UsageError``.
    """
    bind, port = split_address(listen)
    certificates = place.certificates
    server = RpcServer(credentials, bind=bind, port=port)
    group = WorldService(
        name=place.host,
        network=RpcGroupNetwork(server, credentials),
        join=join,
        votes=VoteFile(votes / "votes", job=GROUP_JOB),
        is_witness=place.is_witness,
        role=None if certificates is None else certificates.agent.identity.role,
    )
    rendezvous = RendezvousService(job=GROUP_JOB, certified=None if certificates is None else ())
    agent = HostAgent(
        group, place, rendezvous=rendezvous, display=display, reaper=reaper, only_job=only_job, on_line=on_line
    )
    control = ControlService(
        place.host, group, agent, credentials, on_refused=server.refused, is_for_one_job=is_for_one_job
    )
    agents_pb2_grpc.add_AgentsServicer_to_server(control, server.server)  # type: ignore[no-untyped-call]
    membership_pb2_grpc.add_RendezvousServicer_to_server(  # type: ignore[no-untyped-call]  # generated
        rendezvous, server.server
    )
    server.on_refused = _report_refused(agent.report)
    await server.start()
    stack.push_async_callback(server.stop, grace=0.2)
    agent.address = control.address = server.address
    stack.push_async_callback(group.stop)
    await group.start()
    if not place.is_launcher:
        agent.report(f"serves at {server.address}")
    return GroupPart(group=group, agent=agent, control=control)


def _report_refused(report: Callable[[str], None]) -> Callable[[str, str], None]:
    """Return a function that reports refused peers (as gRPC names them) with the reason, at a limited rate."""
    refusals, loop = Refusals(), asyncio.get_running_loop()

    def report_refused(peer: str, why: str) -> None:
        host = host_of_peer(peer)
        line = refusals.line(AuthenticationError(f"from {host}: {why}"), now=loop.time())
        if line is not None:
            report(line)

    return report_refused
