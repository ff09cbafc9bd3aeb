"""Connect the lane that two ranks agreed on: the first of the agreed kinds that works.

What fails at once in practice: a rank of the same host that is in another container has no Unix socket here, then TCP
is the lane; TCP does not get through to where gRPC does, then the gRPC stream is.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import grpc.aio

from asyncpar._proto.asyncpar.v1 import link_pb2
from asyncpar.errors import PeerLost
from asyncpar.transport.grpc_lane import GrpcLane
from asyncpar.transport.grpc_stream import StreamEnded, call_frames, shake_hands
from asyncpar.transport.handshaking import PEER_SECONDS
from asyncpar.transport.lane import Lane
from asyncpar.transport.rpc import join_address, split_address
from asyncpar.transport.stream import StreamLane
from asyncpar.transport.striped import StripedLane
from asyncpar.transport.tcp_connect import dial_tcp
from asyncpar.transport.unix_connect import dial_unix
from asyncpar.transport.vigil import Vigil
from asyncpar.wire.handshake import NONCE_BYTES, Handshake, LinkTerms

_log = logging.getLogger(__name__)
_NAMES = {"tcp": "TCP", "grpc": "the slower gRPC stream"}


class LaneDialer:
    """Connects lanes, and tells once of each kind that does not get through."""

    def __init__(self, *, secret: bytes, metadata: tuple[tuple[str, str], ...], vigil: Vigil) -> None:
        self._secret = secret
        self._vigil = vigil
        self._metadata = metadata
        self._told: set[str] = set()

    async def connect(
        self,
        channel: grpc.aio.Channel,
        address: str,
        terms: LinkTerms,
        *,
        kinds: Sequence[str],
        accepted: link_pb2.OpenReply.Accepted,
    ) -> Lane:
        """Return a lane of the first of ``kinds`` that works, not started yet.

        Raises ``PeerLost`` when the last one does not get through either, ``AuthenticationError`` when the peer cannot
        prove itself.
        """
        rank = terms.listener
        for kind, fallback in zip(kinds, [*kinds[1:], None], strict=True):
            try:
                return await self._connect_kind(kind, channel, address, terms, accepted)
            except OSError as error:
                cause = _attempt(kind, address, accepted, error)
                if fallback is None:
                    raise PeerLost(f"rank {rank}: {cause}", rank=rank, cause=cause) from error
                if kind not in self._told:
                    self._told.add(kind)
                    _log.warning("rank %d: %s; %s is used instead (told once)", rank, cause, _NAMES[fallback])
        raise AssertionError("no kind of lane was agreed on")

    async def _connect_kind(
        self,
        kind: str,
        channel: grpc.aio.Channel,
        address: str,
        terms: LinkTerms,
        accepted: link_pb2.OpenReply.Accepted,
    ) -> Lane:
        """Connect a lane of ``kind``.  Raises ``OSError`` when another kind may still work."""
        match kind:
            case "shm":
                return await dial_unix(accepted.unix_name, terms, secret=self._secret, vigil=self._vigil)
            case "tcp":
                host, _ = split_address(address)
                return await self._dial_connections(host, accepted.tcp_port, terms)
        return await self._dial_stream(channel, terms)

    async def _dial_connections(self, host: str, port: int, terms: LinkTerms) -> Lane:
        """Return the TCP lane of as many connections as was agreed on.  Raises as ``dial_tcp`` does."""
        dials: list[asyncio.Task[StreamLane]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(terms.connections):
                    dial = dial_tcp(
                        host, port, replace(terms, connection=index), secret=self._secret, vigil=self._vigil
                    )
                    dials.append(tasks.create_task(dial))
        except BaseException as error:
            for made in dials:
                if made.done() and not made.cancelled() and made.exception() is None:
                    made.result().abort(PeerLost("another connection of its lane failed", cause="another failed"))
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        connections = [dial.result() for dial in dials]
        return connections[0] if len(connections) == 1 else StripedLane(connections)

    async def _dial_stream(self, channel: grpc.aio.Channel, terms: LinkTerms) -> GrpcLane:
        stream = call_frames(channel, self._metadata)
        handshake = Handshake.dial(terms, secret=self._secret, nonce=os.urandom(NONCE_BYTES))
        is_done = False
        try:
            async with asyncio.timeout(PEER_SECONDS):
                await shake_hands(stream, handshake)
            is_done = True
        except (StreamEnded, TimeoutError) as error:
            cause = str(error) or "it did not finish the handshake in time"
            raise PeerLost(f"rank {terms.listener}: {cause}", rank=terms.listener, cause=cause) from error
        finally:
            if not is_done:
                stream.cancel()
        return GrpcLane(stream)


def describe_failure(error: OSError) -> str:
    """Say why there is no connection, for people."""
    if isinstance(error, TimeoutError):
        return "no answer"
    return os.strerror(error.errno) if error.errno else str(error)


def _attempt(kind: str, address: str, accepted: link_pb2.OpenReply.Accepted, error: OSError) -> str:
    """Say what was tried in vain, and why it failed."""
    why = describe_failure(error)
    if kind != "shm":
        host, _ = split_address(address)
        return f"no TCP connection to {join_address(host, accepted.tcp_port)} ({why})"
    if isinstance(error, ConnectionRefusedError):
        why += ": it seems to be in another container or network namespace"
    return f"no Unix-socket connection, although it is on the same host ({why})"
