"""Bring a node into its world: alone, or as one rank of a launched job."""

from __future__ import annotations

import itertools
import logging
import os
import platform
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

import msgspec

from asyncpar.actors.runtime.gateway import ActorGateway
from asyncpar.collectives.policy import parse_pin
from asyncpar.core.addresses import spell_host
from asyncpar.core.config.environment import ELASTIC_PIPE, LaunchEnvironment
from asyncpar.core.config.rank_place import ForeignPlace, explain_batch_script, find_rank_place
from asyncpar.core.config.transport import LaneCosts, parse_checksums, parse_connections, parse_link_timeout
from asyncpar.core.config.world import Member, World, world_of_one
from asyncpar.core.observe.agent_line import AgentLine
from asyncpar.core.observe.rank_observer import WAIT_WARNING, RankObserver, parse_wait_warning
from asyncpar.core.observe.reporting import Reporter, record_failures
from asyncpar.core.observe.stack_dump import open_stack_dump
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.net.arena.limits import core_quota, count_cores
from asyncpar.net.arena.settings import ArenaSettings
from asyncpar.net.membership.client import JoinRequest, join_world, serve_alone
from asyncpar.net.membership.credentials import read_credentials, rendezvous_role
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric
from asyncpar.net.transport.lane_kinds import lane_kind, parse_transport
from asyncpar.net.transport.links import Connector, Links
from asyncpar.net.transport.negotiation import GrpcConnector
from asyncpar.net.transport.rpc import Credentials, RpcServer
from asyncpar.net.transport.serving import Serving
from asyncpar.observe.service import OBSERVE_FD, is_open, open_service

PIN = "ASYNCPAR_ALGORITHM"
"""The variable that pins algorithms."""

_CONNECTIONS = "ASYNCPAR_CONNECTIONS"
_CHECKSUMS = "ASYNCPAR_CHECKSUMS"
_LINK_TIMEOUT = "ASYNCPAR_LINK_TIMEOUT"
_PLACED = "ASYNCPAR_PLACED"
_log = logging.getLogger(__name__)


class WorldBootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs for the start of a node: its world, its rank, the connector of its lanes, and ``join`` for its links.

    ``pin`` pins algorithms; ``lane`` is the kind of lane that all ranks pinned, or its costs, for the cost model.
    ``arena`` configures the memory that ranks of one host share (None: they share none); they prove to each other that
    they hold ``secret``.  ``gateway`` admits callers that have no node; code that blocks the loop for longer than
    ``blocked_after`` seconds is reported.
    """

    world: World
    rank: int
    connector: Connector
    join: Callable[[Links], None]
    server: RpcServer | None = None
    pin: str | None = None
    lane: str | LaneCosts | None = None
    secret: bytes = b""
    arena: ArenaSettings | None = None
    gateway: ActorGateway | None = None
    blocked_after: float | None = None
    line: AgentLine | None = None
    """The line to the agent, which reports lost ranks; None for a rank that was not launched."""


Attach = Callable[[AsyncExitStack], Awaitable[WorldBootstrap]]
"""Brings a node into its world, and pushes on the stack what must be undone at the end."""


def attach_alone(serving: Serving, blocked_after: float | None) -> Attach:
    """Return the attachment to a world of one rank, without links."""

    async def attach(stack: AsyncExitStack) -> WorldBootstrap:
        fabric, gateway = InprocFabric(), ActorGateway()
        return WorldBootstrap(
            world=world_of_one(),
            rank=0,
            connector=InprocConnector(fabric),
            join=fabric.join,
            server=await serve_alone(stack, serving, os.environ, register=gateway.register),
            pin=read_pin(os.environ),
            gateway=gateway,
            blocked_after=blocked_after,
        )

    return attach


def read_pin(environment: Mapping[str, str]) -> str | None:
    """Return the pin of algorithms in ``environment``.  Raises ``UsageError`` if it is invalid."""
    text = environment.get(PIN)
    try:
        parse_pin(text or "")
    except UsageError as error:
        raise UsageError(f"{PIN}: {error}") from error
    return text


def find_world(environment: Mapping[str, str]) -> LaunchEnvironment | ForeignPlace | None:
    """Return the place of this process in its world, given by `asyncpar launch` or another launcher; None: it is alone.

    Raises ``UsageError`` for inconsistent variables, and in a program started by a rank of another launcher.
    """
    if not LaunchEnvironment.is_in(environment) and not environment.get(ELASTIC_PIPE):
        place = find_rank_place(environment)
        if place is not None:
            if environment.get(_PLACED) not in (None, str(os.getpid())):
                raise UsageError(
                    f"{_PLACED}: a rank has started this program, which is no rank of {place.launcher}'s; start it "
                    "without the launcher's variables"
                )
            return place
        warning = explain_batch_script(environment)
        if warning is not None:
            _log.warning(warning)
    return LaunchEnvironment.from_mapping(environment)


def attach_world(
    found: LaunchEnvironment | ForeignPlace | None, transport: str | None, serving: Serving, blocked_after: float | None
) -> Attach:
    """Return the attachment to the world that ``find_world`` found."""
    if found is None:
        return attach_alone(serving, blocked_after)
    if isinstance(found, LaunchEnvironment):
        return attach_launched(found, transport, serving, blocked_after)
    return _attach_placed(found, transport, serving, blocked_after)


_met = itertools.count()
"""Numbers this process's worlds under other launchers: all ranks make the same ones in the same order."""


def _attach_placed(place: ForeignPlace, transport: str | None, serving: Serving, blocked_after: float | None) -> Attach:
    """Return the attachment to a world of ranks that another launcher has started."""

    async def attach(stack: AsyncExitStack) -> WorldBootstrap:
        from asyncpar.net.membership.meeting import meet  # only these ranks need it

        meeting = await meet(stack, place, os.environ, serial=next(_met))
        os.environ[_PLACED] = str(os.getpid())
        world = await attach_launched(meeting.environment, transport, serving, blocked_after)(stack)
        meeting.close()
        return world

    return attach


def _transport_of(environment: LaunchEnvironment) -> str | None:
    try:
        return parse_transport(environment.transport)
    except UsageError as error:
        raise UsageError(f"ASYNCPAR_TRANSPORT: {str(error).removeprefix('transport: ')}") from error


def attach_launched(
    environment: LaunchEnvironment, transport: str | None, serving: Serving, blocked_after: float | None
) -> Attach:
    """Return the attachment to the world of a launched job."""

    async def attach(stack: AsyncExitStack) -> WorldBootstrap:
        credentials = read_credentials(environment)
        pinned = parse_transport(transport) or _transport_of(environment)
        arena = arena_settings(os.environ, pinned)
        gateway = ActorGateway()
        line = open_agent_line(stack, environment)  # before anything slow: it reports the reason if the job ends
        serving_links = serve_links(
            stack, credentials, bind=environment.bind, transport=pinned, serving=serving, gateway=gateway
        )
        server, connector = await line.unless_lost(serving_links, "serving links")
        request = _join_request(environment, address=server.address, settings=describe_settings(pinned, arena))
        observer = RankObserver(environment.rank)
        observer.warn_after = parse_wait_warning(os.environ.get(WAIT_WARNING))
        observer.reporter = line.reporter
        role = rendezvous_role(environment)
        joining = join_world(environment.rendezvous, credentials, request, observer, served_by=role)
        world = await line.unless_lost(joining, "join")
        return WorldBootstrap(
            world=world,
            rank=environment.rank,
            connector=connector,
            join=connector.join,
            server=server,
            pin=read_pin(os.environ),
            lane=pinned,
            secret=credentials.secret,
            arena=arena,
            gateway=gateway,
            blocked_after=blocked_after,
            line=line,
        )

    return attach


def open_agent_line(stack: AsyncExitStack, environment: LaunchEnvironment) -> AgentLine:
    """Open the line to the agent that launched this rank, and return it; ``stack`` closes it.

    From now on the agent can query the state of this process.
    Raises ``UsageError`` if a pipe to or from the agent is named, but not open.
    """
    answer_agent(os.environ)
    reporter = Reporter.from_environment(os.environ)
    if environment.notice_descriptor is not None:
        record_failures(reporter)  # the program may not use ``asyncpar.run``
    line = AgentLine(reporter, _notice_descriptor(environment), generation=environment.generation)
    line.open()
    stack.callback(line.close)
    return line


def answer_agent(environment: Mapping[str, str]) -> None:
    """Answer queries of the agent that started this process from now on; without an agent do nothing."""
    if environment.get(OBSERVE_FD) and not is_open():
        from asyncpar.observe.rank_view import provide_process  # a rank without an agent reports to nobody

        provide_process()
        open_stack_dump(environment)
        open_service(environment)


def _notice_descriptor(environment: LaunchEnvironment) -> int | None:
    """Return the descriptor of the pipe from the agent.  Raises ``UsageError`` if it is named, but not open."""
    descriptor = environment.notice_descriptor
    if descriptor is not None:
        try:
            os.fstat(descriptor)
        except OSError as error:
            raise UsageError(
                f"ASYNCPAR_NOTICE_FD: descriptor {descriptor} is not open ({os_reason(error)}); a program that a rank "
                "starts is no rank: start it without the ASYNCPAR_ variables"
            ) from error
    return descriptor


def arena_settings(environment: Mapping[str, str], transport: str | None) -> ArenaSettings | None:
    """Return the settings of memory shared by ranks of one host; None if ``transport`` pins another kind of lane."""
    if transport is not None and not lane_kind(transport).shares_memory:
        return None
    return ArenaSettings.from_mapping(environment, machine=platform.machine(), required=transport is not None)


def describe_settings(transport: str | None, arena: ArenaSettings | None) -> str:
    """Return the settings that must be equal on all ranks, as text; how they wait is up to each host."""
    size = "" if arena is None else f", arena={'off' if arena.is_off else arena.bytes}"
    return f"transport={transport or 'any'}{size}"


def _join_request(environment: LaunchEnvironment, *, address: str, settings: str) -> JoinRequest:
    member = Member(
        rank=environment.rank,
        host=environment.host,
        host_id=environment.host_id,
        local_rank=environment.local_rank,
        address=address,
    )
    return JoinRequest(
        member=member,
        world_size=environment.world_size,
        generation=environment.generation,
        job=environment.job,
        settings=settings,
        timeout=environment.timeout,
    )


async def serve_links(
    stack: AsyncExitStack,
    credentials: Credentials,
    *,
    bind: str,
    transport: str | None,
    serving: Serving = Serving(),  # noqa: B008  # immutable
    gateway: ActorGateway | None = None,
) -> tuple[RpcServer, GrpcConnector]:
    """Start a gRPC server that accepts links; ``stack`` stops it."""
    host, port = serving.place(bind=bind)
    if spell_host(host) != spell_host(bind):
        raise UsageError(f"serve: in a launched job expected the address that the launcher chose, {bind}, got {host}")
    link_timeout = parse_link_timeout(os.environ.get(_LINK_TIMEOUT))
    server = serving.open_server(credentials, bind=bind, port=port, link_timeout=link_timeout)
    processors = min(count_cores(), core_quota())
    connector = GrpcConnector(
        credentials=credentials,
        transport=transport,
        bind=bind,
        processors=processors,
        connections=parse_connections(os.environ.get(_CONNECTIONS)),
        link_timeout=link_timeout,
        checks_payloads=parse_checksums(os.environ.get(_CHECKSUMS)),
    )
    connector.register(server)
    if gateway is not None:
        gateway.register(server)
    serving.register(server)
    await server.start()
    stack.push_async_callback(server.stop)
    await connector.start()
    stack.push_async_callback(connector.stop)
    return server, connector
