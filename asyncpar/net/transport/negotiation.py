"""Links between processes: agreement by gRPC, then connection of the agreed lane.

``machine`` holds the rules; this module makes the calls.  Possible outcomes of a dial, and their time limits:

- no server listens at the peer's address: its server was there when it joined, so it is gone; lost at once;
- nothing answers at that address: lost after ``REACH_SECONDS``;
- connections are accepted and end: tried again for ``CROWDED_SECONDS``, since strangers may crowd the peer's server;
- the peer is alive but busy, or not yet in its world: waited for, ``LINK_UP_SECONDS`` at most;
- the TLS handshake fails: an error that says why, at once (see ``tls_probe``);
- a lane does not get through although gRPC does: the next best is used (see ``dialing``); if there is none, because one
  is pinned, the peer is notified at once, and both are lost to each other.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from asyncpar._proto.asyncpar.v1 import link_pb2, link_pb2_grpc
from asyncpar.core.addresses import loopback, split_address
from asyncpar.core.concurrency.streams import close_stream
from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.core.config.world import World
from asyncpar.errors import AsyncparError, AuthenticationError, PeerLost, StaleGeneration, UsageError
from asyncpar.net.security.identity import rank_role
from asyncpar.net.transport.acceptor import Acceptor
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.dialing import LaneDialer, describe_failure
from asyncpar.net.transport.grpc_lane import GrpcLane
from asyncpar.net.transport.lane import Lane
from asyncpar.net.transport.lane_kinds import lane_kind, parse_transport, usable_lanes
from asyncpar.net.transport.links import Connector, Links
from asyncpar.net.transport.machine import Negotiator, Proposal, describe_versions
from asyncpar.net.transport.rpc import Credentials, RpcServer, open_channel
from asyncpar.net.transport.tls_probe import check_tls
from asyncpar.net.wire.handshake import TOKEN_BYTES, LinkTerms

REACH_SECONDS = 5.0
"""Seconds within which a peer's host must answer at all."""

CROWDED_SECONDS = 20.0
"""Seconds for which a peer's server may turn connections away before the peer is declared lost."""

LINK_UP_SECONDS = 60.0
"""Seconds within which a live peer must make a link."""

WAIT_SECONDS = 1.0
"""Seconds to wait for a lane that the peer connects before checking whether the peer is still there."""

WITHDRAW_SECONDS = 1.0
"""Seconds for notifying a peer that no lane to it gets through."""

RETRY_SECONDS = 0.05

_Refused = link_pb2.OpenReply.Refused


class GrpcConnector(Connector):
    """Connects ranks of different processes (or of one) over the best lane that works: Unix socket, TCP, gRPC stream.

    Use in this order: ``register`` on the node's server, start that server, ``await start()``, and ``join`` once the
    world is known.  Calls from faster ranks are kept waiting.  Call ``await stop()`` after the links are closed.

    ``processors`` is the number that this process may use: if it is enough for all ranks of the host, lanes over
    sockets stay awake for answers.  ``connections`` is the number used by a TCP or gRPC lane, if the other side wants
    as many.  ``checks_payloads`` False omits the checksums of payloads that leave the host, if the other side agrees.
    """

    def __init__(
        self,
        *,
        credentials: Credentials | None,
        transport: str | None = None,
        bind: str | None = None,
        processors: float = 0.0,
        connections: int = 1,
        checks_payloads: bool = True,
        link_timeout: float = LINK_SECONDS,
    ) -> None:
        self._checks_payloads = checks_payloads
        self._is_encrypted = credentials is not None and credentials.certificates is not None
        self._is_pinned = parse_transport(transport) is not None
        self._lanes = usable_lanes(parse_transport(transport))
        self._connections = connections
        self._processors = processors
        self._busy_poll = BusyPoll()
        self._credentials = credentials
        self._secret = b"" if credentials is None else credentials.secret
        self._role_of = rank_role if credentials is None else credentials.role_of
        self._metadata = () if credentials is None else credentials.metadata()
        self._acceptor = Acceptor(
            secret=self._secret,
            bind=loopback() if bind is None else bind,
            lanes=self._lanes,
            busy_poll=self._busy_poll,
            is_encrypted=self._is_encrypted,
            role_of=self._role_of,
            link_timeout=link_timeout,
        )
        self._tasks = asyncio.TaskGroup()
        self._carriers: set[asyncio.Task[None]] = set()
        self._has_started = False
        self._dialer = LaneDialer(
            credentials=credentials, busy_poll=self._busy_poll, carry=self._carry, link_timeout=link_timeout
        )

    def register(self, server: RpcServer) -> None:
        """Add the services that accept links to ``server``, which must not be started yet."""
        self._acceptor.register(server.server)

    async def start(self) -> None:
        """Start to listen.  Raises ``UsageError`` if the bind address is not ours, or a pinned lane cannot work."""
        await self._acceptor.start()
        self._lanes = self._acceptor.lanes
        await self._tasks.__aenter__()
        self._has_started = True

    def join(self, links: Links) -> None:
        """Accept links for ``links`` from now on.

        Raises ``UsageError`` if a lane that stays inside a host is pinned, and the world spans several hosts.
        """
        world = links.world
        if all(lane_kind(name).is_local for name in self._lanes):
            _check_one_host(world, self._lanes[0])
        near = next(ranks for ranks in world.hosts if links.rank in ranks)
        self._busy_poll.is_allowed = len(near) <= self._processors
        negotiator = Negotiator(
            job=world.job,
            generation=world.generation,
            rank=links.rank,
            size=world.size,
            lanes=self._lanes,
            near=frozenset(near),
            connections=self._connections,
            far=self._far_lanes(),
            checks_payloads=self._checks_payloads,
        )
        self._acceptor.join(links, negotiator)

    async def stop(self) -> None:
        """Stop accepting and end all streams.  Idempotent."""
        await self._acceptor.stop()
        for carrier in self._carriers:
            carrier.cancel()
        if self._has_started:
            self._has_started = False
            await self._tasks.__aexit__(None, None, None)

    def default_lane(self, rank: int) -> str:
        return self._acceptor.negotiator.lanes_to(rank)[0]

    async def connect(self, links: Links, rank: int) -> None:
        """Bring up the link to ``rank``, as ``Connector.connect`` specifies.

        Raises ``PeerLost``; for incompatible settings ``UsageError`` or ``StaleGeneration``.
        """
        negotiator = self._acceptor.negotiator
        try:
            async with asyncio.timeout(LINK_UP_SECONDS):
                while not links.is_up(rank) and rank not in links.lost and not links.is_closing:
                    if negotiator.is_accepting(rank):
                        await self._wait_for_peer(links, rank)
                    else:
                        await self._dial(links, negotiator, rank)
        except TimeoutError as error:
            cause = f"it made no link in {LINK_UP_SECONDS:.0f} s"
            raise PeerLost(f"rank {rank}: {cause}", rank=rank, cause=cause) from error

    def _far_lanes(self) -> tuple[str, ...]:
        """Return the kinds for ranks of other hosts.

        In a job with certificates, traffic that leaves a host is encrypted.  A pinned lane is the user's decision.
        """
        must_encrypt = self._is_encrypted and not self._is_pinned
        kinds = [lane_kind(name) for name in self._lanes]
        return tuple(kind.name for kind in kinds if not kind.is_local and (kind.is_encrypted or not must_encrypt))

    # -- dialing -----------------------------------------------------------------------------------------------------

    async def _dial(self, links: Links, negotiator: Negotiator, rank: int) -> None:
        """Send the peer one proposal, and act on its answer."""
        address = links.world.members[rank].address
        proposal = negotiator.propose(rank)
        channel = open_channel(address, self._credentials, peer=self._role_of(rank), adds_token=False)
        try:
            reply = await self._ask(channel, address, proposal)
            match reply.WhichOneof("outcome"):
                case "accepted":
                    links.adopt(rank, await self._connect_or_withdraw(channel, address, proposal, reply.accepted))
                case "deferred":
                    negotiator.end_dial(rank)
                    await self._wait_for_peer(links, rank)
                case "refused":
                    raise _refusal(rank, reply.refused)
                case _:
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            negotiator.end_dial(rank)
            await channel.close(None)

    async def _ask(self, channel: grpc.aio.Channel, address: str, proposal: Proposal) -> link_pb2.OpenReply:
        """Return the peer's answer.

        Raises ``PeerLost`` if it cannot be reached, and ``AuthenticationError`` if either side cannot authenticate
        itself.
        """
        rank = proposal.listener
        request = link_pb2.OpenRequest(
            job=proposal.job,
            generation=proposal.generation,
            from_rank=proposal.dialer,
            to_rank=rank,
            lanes=proposal.lanes,
            connections=proposal.connections,
            checks_payloads=proposal.checks_payloads,
            wire_version=proposal.wire_version,
        )
        stub = link_pb2_grpc.LinkStub(channel)  # type: ignore[no-untyped-call]  # generated
        loop = asyncio.get_running_loop()
        give_up = loop.time() + CROWDED_SECONDS
        while True:
            await _reach(rank, address)
            try:
                reply: link_pb2.OpenReply = await stub.Open(request, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                is_transient = error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
                if not is_transient or loop.time() > give_up:
                    raise _no_answer(rank, address, error) from error
                await check_tls(address, self._credentials, self._role_of(rank))
            else:
                return reply
            await asyncio.sleep(RETRY_SECONDS)

    async def _connect_or_withdraw(
        self, channel: grpc.aio.Channel, address: str, proposal: Proposal, accepted: link_pb2.OpenReply.Accepted
    ) -> Lane:
        """Connect the agreed lane; if none gets through, notify the peer, which waits for it."""
        try:
            return await self._connect_lane(address, proposal, accepted)
        except Exception as error:
            cause = error.cause if isinstance(error, PeerLost) and error.cause else f"{type(error).__name__}: {error}"
            stub = link_pb2_grpc.LinkStub(channel)  # type: ignore[no-untyped-call]  # generated
            request = link_pb2.WithdrawRequest(token=accepted.token, cause=cause)
            try:
                await stub.Withdraw(request, metadata=self._metadata, timeout=WITHDRAW_SECONDS)
            except grpc.aio.AioRpcError as failure:  # it lets the agreement expire after a while
                error.add_note(f"rank {proposal.listener} could not be notified: {failure.code().name}")
            raise

    async def _connect_lane(self, address: str, proposal: Proposal, accepted: link_pb2.OpenReply.Accepted) -> Lane:
        """Connect the agreed lane.  Raises ``UsageError`` if the peer has another version."""
        rank = proposal.listener
        if accepted.wire_version != proposal.wire_version:
            raise UsageError(describe_versions(proposal.dialer, rank, accepted.wire_version))
        kinds = [kind for kind in dict.fromkeys(accepted.lanes) if kind in proposal.lanes]
        if not kinds or len(accepted.token) != TOKEN_BYTES:
            raise PeerLost(f"rank {rank} accepted, but no lane", rank=rank, cause="it accepted, but no lane")
        terms = LinkTerms(
            job=proposal.job,
            generation=proposal.generation,
            dialer=proposal.dialer,
            listener=rank,
            token=accepted.token,
            connections=max(1, min(accepted.connections, proposal.connections)),
            checks_payloads=accepted.checks_payloads or proposal.checks_payloads,
        )
        return await self._dialer.connect(address, terms, kinds=kinds, accepted=accepted)

    def _carry(self, lane: GrpcLane, channel: grpc.aio.Channel) -> None:
        """Run ``lane`` as long as it lives."""

        async def carry() -> None:
            try:
                await lane.run()
            finally:
                await channel.close(None)

        carrier = self._tasks.create_task(carry(), name="asyncpar grpc lane")
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)

    async def _wait_for_peer(self, links: Links, rank: int) -> None:
        """Wait for the lane that the peer connects for a while, then check that the peer is still there."""
        if not links.is_up(rank):
            await self._acceptor.wait_for(rank, seconds=WAIT_SECONDS)
        if not links.is_up(rank):
            await _reach(rank, links.world.members[rank].address)


def _check_one_host(world: World, kind: str) -> None:
    if len(world.hosts) > 1:
        one, other = (world.members[ranks[0]] for ranks in world.hosts[:2])
        raise UsageError(
            f"transport: {kind} is pinned, which joins ranks of one host, but rank {one.rank} is on {one.host} "
            f"and rank {other.rank} on {other.host}; pin tcp, or nothing"
        )


async def _reach(rank: int, address: str) -> None:
    """Check that a server listens at ``address``.  Raises ``PeerLost``; immediately if none does."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(REACH_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        cause = f"no connection to {address} ({describe_failure(error)})"
        raise PeerLost(f"rank {rank}: {cause}", rank=rank, cause=cause) from error
    await close_stream(writer)


def _no_answer(rank: int, address: str, error: grpc.aio.AioRpcError) -> AsyncparError:
    cause = f"it answers {error.code().name} at {address}: {error.details()}"
    if error.code() in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}:
        return AuthenticationError(f"rank {rank}: {cause}")
    return PeerLost(f"rank {rank}: {cause}", rank=rank, cause=cause)


def _refusal(rank: int, refused: link_pb2.OpenReply.Refused) -> AsyncparError:
    match refused.reason:
        case _Refused.STALE_GENERATION:
            return StaleGeneration(refused.message)
        case _Refused.NO_COMMON_LANE | _Refused.WRONG_WORLD:
            return UsageError(refused.message)
        case _:
            return PeerLost(f"rank {rank}: {refused.message}", rank=rank, cause=refused.message)
