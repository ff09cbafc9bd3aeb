"""Connected lanes over real sockets of this machine, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import grpc.aio

from asyncpar.errors import PeerLost
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connect import TCP, UNIX, TcpListener, UnixListener, dial_tcp, dial_unix
from asyncpar.net.transport.grpc_lane import GrpcLane
from asyncpar.net.transport.grpc_stream import FRAMES_METHOD, SERVICE, Context, ServerStream, call_frames
from asyncpar.net.transport.handshaking import Medium, Porter
from asyncpar.net.transport.protection import Protection
from asyncpar.net.transport.rpc import RpcServer, open_channel
from asyncpar.net.transport.stream import StreamLane
from asyncpar.net.transport.striped import StripedLane
from asyncpar.net.wire.handshake import NONCE_BYTES, Handshake, LinkTerms

SECRET = b"s" * 32
TERMS = LinkTerms(job="job", generation=3, dialer=1, listener=0, token=b"t" * 16)
_OVER = PeerLost("the test is over", cause="the test is over")


def protections(terms: LinkTerms = TERMS, *, may_damage: bool = True) -> tuple[Protection, Protection]:
    """Return the protections of dialer and listener, as after the handshake for ``terms``."""
    dialer = Handshake.dial(terms, secret=SECRET, nonce=bytes(NONCE_BYTES))
    listener = Handshake.listen(lambda _: terms, secret=SECRET, nonce=bytes(NONCE_BYTES))
    challenge = _deliver(listener, dialer.opening)
    _deliver(listener, _deliver(dialer, challenge))
    return Protection(dialer, may_damage=may_damage), Protection(listener, may_damage=may_damage)


def _deliver(side: Handshake, message: bytes) -> bytes:
    side.buffer()[:] = message
    return side.advance(len(message))


def _accepting(medium: Medium) -> tuple[Porter, asyncio.Future[StreamLane]]:
    """Return a porter for one lane, and the lane to come."""
    accepted: asyncio.Future[StreamLane] = asyncio.get_running_loop().create_future()
    porter = Porter(
        medium,
        secret=SECRET,
        busy_poll=BusyPoll(),
        find_terms=lambda token: TERMS if token == TERMS.token else None,
        on_lane=lambda _, lane: accepted.set_result(lane),
    )
    return porter, accepted


@asynccontextmanager
async def _while_open(
    one: StreamLane, other: StreamLane, listener: TcpListener | UnixListener
) -> AsyncIterator[tuple[StreamLane, StreamLane]]:
    try:
        yield one, other
    finally:
        one.abort(_OVER)
        other.abort(_OVER)
        await listener.stop()
        await asyncio.sleep(0)  # transports close in a callback


@asynccontextmanager
async def open_tcp_pair() -> AsyncIterator[tuple[StreamLane, StreamLane]]:
    """Yield dialer and listener."""
    porter, accepted = _accepting(TCP)
    listener = TcpListener(porter, bind="127.0.0.1")
    await listener.start()
    one = await dial_tcp("127.0.0.1", listener.port, TERMS, secret=SECRET, busy_poll=BusyPoll())
    async with _while_open(one, await accepted, listener) as pair:
        yield pair


@asynccontextmanager
async def open_striped_pair(count: int = 3) -> AsyncIterator[tuple[StripedLane, StripedLane]]:
    """Yield two lanes of ``count`` connections each, dialer and listener."""
    async with AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(open_tcp_pair()) for _ in range(count)]
        one, other = (StripedLane(ends) for ends in zip(*pairs, strict=True))
        try:
            yield one, other
        finally:
            one.abort(_OVER)
            other.abort(_OVER)


@asynccontextmanager
async def open_unix_pair() -> AsyncIterator[tuple[StreamLane, StreamLane]]:
    """Yield dialer and listener."""
    porter, accepted = _accepting(UNIX)
    listener = UnixListener(porter)
    await listener.start()
    one = await dial_unix(listener.name, TERMS, secret=SECRET, busy_poll=BusyPoll())
    async with _while_open(one, await accepted, listener) as pair:
        yield pair


@asynccontextmanager
async def open_grpc_pair() -> AsyncIterator[tuple[GrpcLane, GrpcLane, RpcServer]]:
    """Yield caller, callee and the callee's server."""
    accepted: asyncio.Future[GrpcLane] = asyncio.get_running_loop().create_future()
    dialer, listener = protections()

    async def frames(_: object, context: Context) -> None:
        lane = GrpcLane(ServerStream(context), listener)
        accepted.set_result(lane)
        await lane.run()

    server = RpcServer(None)
    handler = grpc.stream_stream_rpc_method_handler(frames)
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {FRAMES_METHOD: handler}),))
    await server.start()
    async with asyncio.TaskGroup() as tasks:
        channel = open_channel(server.address, None)
        one = GrpcLane(call_frames(channel, ()), dialer)
        tasks.create_task(one.run())
        try:
            other = await accepted
            yield one, other, server
            other.abort(_OVER)
        finally:
            one.abort(_OVER)
            await channel.close(None)
            await server.stop(grace=0)
