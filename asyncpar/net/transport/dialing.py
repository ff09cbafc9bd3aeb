"""Connect the lane that two ranks agreed on: the first of the agreed kinds that works.

What fails at once in practice: a rank of the same host that is in another container has no Unix socket here, then TCP
is the lane; TCP does not get through to where gRPC does, then the gRPC stream is.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio

from asyncpar._proto.asyncpar.v1 import link_pb2
from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.errors import PeerLost
from asyncpar.net.security.identity import rank_role
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connect import dial_tcp, dial_unix, tcp_medium
from asyncpar.net.transport.connection import Connection
from asyncpar.net.transport.grpc_lane import GrpcLane
from asyncpar.net.transport.grpc_stream import StreamEnded, call_frames, shake_hands
from asyncpar.net.transport.handshaking import PEER_SECONDS
from asyncpar.net.transport.lane import Lane
from asyncpar.net.transport.protection import Protection
from asyncpar.net.transport.rpc import Credentials, join_address, open_channel, split_address
from asyncpar.net.transport.striped import StripedLane
from asyncpar.net.wire.handshake import NONCE_BYTES, Handshake, LinkTerms

_log = logging.getLogger(__name__)
_NAMES = {"tcp": "TCP", "grpc": "the slower gRPC stream"}


class LaneDialer:
    """Connects lanes, and tells once of each kind that does not get through.

    ``carry`` gets every gRPC lane, to run it for as long as it lives, and its channel, to close it then.
    """

    def __init__(
        self,
        *,
        credentials: Credentials | None,
        busy_poll: BusyPoll,
        carry: Callable[[GrpcLane, grpc.aio.Channel], None],
        link_timeout: float = LINK_SECONDS,
    ) -> None:
        self._carry = carry
        self._link_timeout = link_timeout
        self._tcp = tcp_medium(link_timeout)
        self._credentials = credentials
        self._secret = b"" if credentials is None else credentials.secret
        self._busy_poll = busy_poll
        self._metadata = () if credentials is None else credentials.metadata()
        self._told: set[str] = set()

    async def connect(
        self, address: str, terms: LinkTerms, *, kinds: Sequence[str], accepted: link_pb2.OpenReply.Accepted
    ) -> Lane:
        """Return a lane of the first of ``kinds`` that works, not started yet.

        Raises ``PeerLost`` when the last one does not get through either, ``AuthenticationError`` when the peer cannot
        prove itself.
        """
        rank = terms.listener
        for kind, fallback in zip(kinds, [*kinds[1:], None], strict=True):
            try:
                return await self._connect_kind(kind, address, terms, accepted)
            except OSError as error:
                cause = _attempt(kind, address, accepted, error)
                if fallback is None:
                    raise PeerLost(f"rank {rank}: {cause}", rank=rank, cause=cause) from error
                if kind not in self._told:
                    self._told.add(kind)
                    _log.warning("rank %d: %s; %s is used instead (told once)", rank, cause, _NAMES[fallback])
        raise AssertionError("no kind of lane was agreed on")

    async def _connect_kind(
        self, kind: str, address: str, terms: LinkTerms, accepted: link_pb2.OpenReply.Accepted
    ) -> Lane:
        """Connect a lane of ``kind``.  Raises ``OSError`` when another kind may still work."""
        match kind:
            case "shm":
                return await dial_unix(accepted.unix_name, terms, secret=self._secret, busy_poll=self._busy_poll)
            case "tcp":
                host, _ = split_address(address)
                port = accepted.tcp_port
                return await _dial_all(
                    terms,
                    lambda terms: dial_tcp(
                        host, port, terms, secret=self._secret, busy_poll=self._busy_poll, medium=self._tcp
                    ),
                )
        return await _dial_all(terms, lambda terms: self._dial_stream(address, terms))

    async def _dial_stream(self, address: str, terms: LinkTerms) -> GrpcLane:
        """Open a stream on a channel of its own: streams of one channel share its TCP connection.

        The token goes with the call, because interceptors slow streams down.
        """
        channel = open_channel(
            address,
            self._credentials,
            peer=rank_role(terms.listener),
            adds_token=False,
            link_timeout=self._link_timeout,
        )
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
                await channel.close(None)
        is_encrypted = self._credentials is not None and self._credentials.certificates is not None
        protection = Protection(handshake, may_damage=not is_encrypted)
        lane = GrpcLane(stream, protection, link_timeout=self._link_timeout)
        self._carry(lane, channel)
        return lane


async def _dial_all(terms: LinkTerms, dial: Callable[[LinkTerms], Coroutine[Any, Any, Connection]]) -> Lane:
    """Return the lane of as many connections as was agreed on.  Raises what the first dial that failed raised."""
    dials: list[asyncio.Task[Connection]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            parts = (replace(terms, connection=index) for index in range(terms.connections))
            dials.extend(tasks.create_task(dial(part)) for part in parts)
    except BaseException as error:
        for made in dials:
            if made.done() and not made.cancelled() and made.exception() is None:
                made.result().abort(PeerLost("another connection of its lane failed", cause="another failed"))
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise
    connections = [dial.result() for dial in dials]
    return connections[0] if len(connections) == 1 else StripedLane(connections)


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
