"""Joining a world: one call to the rendezvous, repeated while it cannot be reached, bounded in time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import msgspec

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.addresses import is_loopback, loopback
from asyncpar.core.config.secret import SECRET_BYTES
from asyncpar.core.config.world import Member, World
from asyncpar.core.observe.rank_observer import RankObserver
from asyncpar.core.observe.waits import JOINING, WaitNotice
from asyncpar.errors import (
    AsyncparError,
    AuthenticationError,
    LaunchError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    StaleGeneration,
    UsageError,
)
from asyncpar.net.membership.credentials import load_certificates, read_secret
from asyncpar.net.security.identity import COORDINATOR, Role, rank_role
from asyncpar.net.transport.rpc import Credentials, RpcServer, open_channel
from asyncpar.net.transport.serving import Serving
from asyncpar.net.transport.tls_probe import check_tls

_RETRY_EVERY = 0.1
_ANSWER_MARGIN = 2.0
"""Seconds for which a rank waits longer than the rendezvous, so that the answer with the missing ranks arrives."""


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of one rank to join the world.

    ``settings`` (a transport pin, say) must be equal on all ranks; they are compared and quoted in the error.
    ``timeout`` is the number of seconds after which waiting for the other ranks ends with ``PeerTimeout``.
    """

    member: Member
    world_size: int
    generation: int = 0
    job: str = "local"
    settings: str = ""
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError(f"world_size: expected at least 1, got {self.world_size}")
        if not 0 <= self.member.rank < self.world_size:
            raise UsageError(f"rank: expected 0..{self.world_size - 1}, got {self.member.rank}")
        if not 0.0 < self.timeout < float("inf"):
            raise UsageError(f"timeout: expected a positive number of seconds, got {self.timeout}")


async def join_world(
    rendezvous: str,
    credentials: Credentials | None,
    request: JoinRequest,
    observer: RankObserver | None = None,
    *,
    served_by: Role = COORDINATOR,
) -> World:
    """Return the world of ``request.generation`` once all its ranks have joined at the rendezvous at ``host:port``.

    ``observer`` is notified if it takes long; ``served_by`` is the role in the certificate of the rendezvous.

    Raises, within ``request.timeout`` seconds and a small margin: ``PeerTimeout`` that names the missing ranks,
    ``PeerLost`` if one of them exited, ``UsageError`` if they disagree or a rank is there twice, ``StaleGeneration``,
    ``AuthenticationError``, and ``LaunchError`` if the rendezvous cannot be reached or has ended.
    """
    observer = observer or RankObserver(request.member.rank)
    async with open_channel(rendezvous, credentials, peer=served_by) as channel:

        def look(seconds: float) -> WaitNotice:
            is_there = channel.get_state() is grpc.ChannelConnectivity.READY
            whom = "the other ranks" if is_there else "the rendezvous, which cannot be reached"
            return WaitNotice(operation=f"{JOINING} at {rendezvous}", seconds=seconds, where=whom)

        with observer.reporting(look):
            return await _ask_for_world(
                channel, rendezvous, request, lambda: check_tls(rendezvous, credentials, served_by)
            )


async def _ask_for_world(
    channel: grpc.aio.Channel, rendezvous: str, request: JoinRequest, check: Callable[[], Awaitable[None]]
) -> World:
    """Repeat the call until the rendezvous answers, the time is over, or ``check`` finds that TLS cannot work."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + request.timeout
    trouble, session = "no answer", secrets.token_hex(16)
    stub = membership_pb2_grpc.RendezvousStub(channel)  # type: ignore[no-untyped-call]  # generated
    while (left := deadline - loop.time()) > 0.0:
        try:
            reply = await stub.Join(_message(request, left, session), timeout=left + _ANSWER_MARGIN)
        except grpc.aio.AioRpcError as error:
            trouble = _may_retry(error, rendezvous)
            await check()
        else:
            return _world(reply, request)
        await asyncio.sleep(min(_RETRY_EVERY, max(0.0, deadline - loop.time())))
    raise LaunchError(
        f"rank {request.member.rank}: the rendezvous at {rendezvous} could not be reached for "
        f"{request.timeout:.1f} s ({trouble})"
    )


def _may_retry(error: grpc.aio.AioRpcError, rendezvous: str) -> str:
    """Return the failure as text if another attempt may help; raise the typed error if not."""
    code, details = error.code(), error.details() or "no details"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return details
    if code == grpc.StatusCode.UNAUTHENTICATED:
        raise AuthenticationError(
            f"the rendezvous at {rendezvous} did not accept this job's secret; all hosts need the same secret file"
        ) from error
    if code == grpc.StatusCode.PERMISSION_DENIED:
        raise AuthenticationError(f"the rendezvous at {rendezvous} refused this rank: {details}") from error
    raise LaunchError(f"the rendezvous at {rendezvous} failed: {code.name}: {details}") from error


def _message(request: JoinRequest, left: float, session: str) -> pb.JoinRequest:
    member = request.member
    return pb.JoinRequest(
        job=request.job,
        generation=request.generation,
        world_size=request.world_size,
        member=pb.Member(
            rank=member.rank,
            host=member.host,
            host_id=member.host_id,
            local_rank=member.local_rank,
            address=member.address,
        ),
        settings=request.settings,
        timeout_seconds=left,
        session=session,
    )


def _world(reply: pb.JoinReply, request: JoinRequest) -> World:
    if reply.HasField("refusal"):
        raise _error(reply.refusal, request)
    members = tuple(
        Member(
            rank=member.rank,
            host=member.host,
            host_id=member.host_id,
            local_rank=member.local_rank,
            address=member.address,
        )
        for member in reply.world.members
    )
    ranks = [member.rank for member in members]
    if ranks != list(range(request.world_size)) or reply.world.generation != request.generation:
        raise ProtocolError(
            f"the rendezvous answered with generation {reply.world.generation}, ranks {ranks}; expected generation "
            f"{request.generation}, ranks 0..{request.world_size - 1}"
        )
    return World(members=members, generation=request.generation, job=reply.world.job)


def _error(refusal: pb.JoinRefusal, request: JoinRequest) -> AsyncparError:
    blamed = refusal.ranks[0] if refusal.ranks else None
    message = f"rank {request.member.rank}: {refusal.message}"
    match refusal.kind:
        case pb.JoinRefusal.KIND_USAGE:
            return UsageError(refusal.message)
        case pb.JoinRefusal.KIND_STALE:
            return StaleGeneration(refusal.message)
        case pb.JoinRefusal.KIND_TIMEOUT:
            waited = f"rank {request.member.rank} waited {request.timeout:.1f} s: {refusal.message}"
            return PeerTimeout(waited, rank=blamed, operation="join", cause="it did not join")
        case pb.JoinRefusal.KIND_LOST:
            return PeerLost(message, rank=blamed, operation="join", cause=refusal.message)
    return LaunchError(message)


_SECRET_FILE = "ASYNCPAR_SECRET_FILE"
_CERTS = "ASYNCPAR_CERTS"


async def serve_alone(
    stack: AsyncExitStack,
    serving: Serving,
    environment: Mapping[str, str],
    *,
    register: Callable[[RpcServer], None],
) -> RpcServer | None:
    """Start the server that ``serving`` describes, with our own services, added by ``register``; ``stack`` stops it.

    Returns None if nothing is to be served.  The secret is the one in the file that ``ASYNCPAR_SECRET_FILE`` names;
    without one it is random, and then only loopback is served: other hosts could not know it.  With certificates, in
    the directory that ``ASYNCPAR_CERTS`` names, the server speaks mutual TLS as rank 0.
    """
    if not serving.is_wanted:
        return None
    bind, port = serving.place(bind=loopback())
    server = serving.open_server(_find_credentials(environment, bind), bind=bind, port=port)
    register(server)
    serving.register(server)
    await server.start()
    stack.push_async_callback(server.stop)
    return server


def _find_credentials(environment: Mapping[str, str], bind: str) -> Credentials:
    path, certs = environment.get(_SECRET_FILE), environment.get(_CERTS)
    certificates = load_certificates(certs, rank_role(0)) if certs else None
    if path:
        return Credentials(read_secret(path), certificates)
    if not is_loopback(bind):
        raise UsageError(
            f"serve: {bind} is not loopback, and its clients need a secret, or anyone could "
            f"pass for one of them; name a file with one in {_SECRET_FILE}, or serve on {loopback()}"
        )
    return Credentials(secrets.token_bytes(SECRET_BYTES), certificates)
