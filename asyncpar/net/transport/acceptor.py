"""The accepting side of links: answers proposals, and puts the resulting lanes into service."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from asyncpar._proto.asyncpar.v1 import link_pb2, link_pb2_grpc
from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.errors import AuthenticationError, PeerLost, UsageError
from asyncpar.net.security.identity import Role, rank_role
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connection import Connection, as_connection
from asyncpar.net.transport.grpc_lane import GrpcLane
from asyncpar.net.transport.grpc_stream import FRAMES_METHOD, SERVICE, Context, ServerStream, StreamEnded, shake_hands
from asyncpar.net.transport.handshaking import PEER_SECONDS
from asyncpar.net.transport.lane import Lane
from asyncpar.net.transport.lane_kind import LaneGate, LaneKind, LaneListener
from asyncpar.net.transport.lane_kinds import lane_kind
from asyncpar.net.transport.links import LEFT, Links
from asyncpar.net.transport.machine import Accept, Answer, Defer, Negotiator, Proposal, Reason, Refuse
from asyncpar.net.transport.protection import Protection
from asyncpar.net.transport.refusals import Refusals
from asyncpar.net.transport.striped import StripedLane
from asyncpar.net.transport.tls import check_caller
from asyncpar.net.wire.handshake import NONCE_BYTES, TOKEN_BYTES, WIRE_VERSION, Handshake, LinkTerms


class StripeAssembler:
    """Holds the connections of a lane until all of them are there."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, str], dict[int, Connection]] = {}

    def add(self, terms: LinkTerms, connection: Connection) -> Lane | None:
        """Add an authenticated connection; return the lane if it was the last one missing."""
        if terms.connections == 1:
            return connection
        present = self._waiting.setdefault((terms.token, connection.kind), {})
        if terms.connection in present:
            connection.abort(_unwanted("there is such a connection already"))
            return None
        present[terms.connection] = connection
        if len(present) < terms.connections:
            return None
        del self._waiting[terms.token, connection.kind]
        return StripedLane([present[index] for index in range(terms.connections)])

    def drop(self, token: bytes) -> None:
        """Close the connections of the lane agreed on under ``token``: it will not be complete."""
        for key in [key for key in self._waiting if key[0] == token]:
            for connection in self._waiting.pop(key).values():
                connection.abort(_unwanted("the other connections of its lane did not come"))

    def drop_all(self) -> None:
        """Close all waiting connections."""
        for token, _ in list(self._waiting):
            self.drop(token)


def _unwanted(cause: str) -> PeerLost:
    return PeerLost(f"the connection is not needed: {cause}", cause=cause)


JOIN_SECONDS = 3.0
"""Seconds for which a call waits for this node to join its world before the caller is asked to try again."""

AGREEMENT_SECONDS = 30.0
"""Seconds within which an accepted rank must connect."""

_log = logging.getLogger(__name__)
_Reply = link_pb2.OpenReply
_REASONS = {reason: getattr(_Reply.Refused, reason.name) for reason in Reason}


class Acceptor(link_pb2_grpc.LinkServicer):
    """The servicer of a node's links, and the listeners for the kinds of ``lanes`` that have one.

    After the start, ``lanes`` are those that work.  ``is_encrypted``: its server speaks TLS; ``role_of`` returns the
    role whose certificate a rank has to show.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        bind: str,
        lanes: tuple[str, ...],
        busy_poll: BusyPoll,
        is_encrypted: bool = False,
        role_of: Callable[[int], Role] = rank_role,
        link_timeout: float = LINK_SECONDS,
    ) -> None:
        self._secret = secret
        self._is_encrypted = is_encrypted
        self._role_of = role_of
        self._link_timeout = link_timeout
        self._busy_poll = busy_poll
        self.lanes = lanes
        self._refusals = Refusals()
        self._gathering = StripeAssembler()
        self._listeners: dict[str, LaneListener] = {}
        for name in lanes:
            kind = lane_kind(name)
            if kind.listen is not None:
                self._listeners[name] = kind.listen(self._gate(kind, bind))
        self._links: Links | None = None
        self._negotiator: Negotiator | None = None
        self._joined = asyncio.Event()
        self._news: dict[int, asyncio.Event] = {}
        self._misfits: dict[int, UsageError] = {}
        self._expiries: set[asyncio.TimerHandle] = set()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the services to ``server``."""
        link_pb2_grpc.add_LinkServicer_to_server(self, server)  # type: ignore[no-untyped-call]  # generated
        frames = grpc.stream_stream_rpc_method_handler(self._frames)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {FRAMES_METHOD: frames}),))

    async def start(self) -> None:
        """Start to listen for lanes.  Raises ``UsageError`` if a pinned kind does not work here."""
        for name, listener in list(self._listeners.items()):
            try:
                await listener.start()
            except OSError as error:
                title = lane_kind(name).described
                if self.lanes == (name,):
                    raise UsageError(f"transport: {name} is pinned, but {title} do not work here ({error})") from error
                del self._listeners[name]
                self.lanes = tuple(lane for lane in self.lanes if lane != name)
                where = "between ranks of this host" if lane_kind(name).is_local else "instead"
                instead = lane_kind(self.lanes[0]).described
                _log.warning("%s do not work here (%s); %s is used %s", title, error, instead, where)

    async def stop(self) -> None:
        """Stop accepting.  Idempotent."""
        for listener in self._listeners.values():
            await listener.stop()
        for expiry in self._expiries:
            expiry.cancel()
        self._expiries.clear()
        self._gathering.drop_all()

    def join(self, links: Links, negotiator: Negotiator) -> None:
        """Accept lanes for ``links`` from now on."""
        self._links = links
        self._negotiator = negotiator
        self._joined.set()

    @property
    def negotiator(self) -> Negotiator:
        """The negotiator, once this node is part of a world."""
        assert self._negotiator is not None, "the connector has not joined its links yet"
        return self._negotiator

    async def wait_for(self, rank: int, *, seconds: float) -> None:
        """Wait for a lane from ``rank``, for ``seconds`` at most.

        Raises ``UsageError`` if the proposal of ``rank`` does not fit this node.
        """
        news = self._news.setdefault(rank, asyncio.Event())
        if rank not in self._misfits:
            news.clear()
            try:
                async with asyncio.timeout(seconds):
                    await news.wait()
            except TimeoutError:
                return
        if rank in self._misfits:
            raise self._misfits[rank]

    # -- services ----------------------------------------------------------------------------------------------------

    async def Open(  # noqa: N802
        self, request: link_pb2.OpenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> link_pb2.OpenReply:
        """Answer a proposal; with certificates, only if the caller shows that of the rank it claims to be."""
        try:
            check_caller(context, request.job, self._role_of(request.from_rank))
        except AuthenticationError as error:
            self._refused(error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                await self._joined.wait()
        except TimeoutError:
            return _Reply(not_ready=_Reply.NotReady())
        proposal = Proposal(
            job=request.job,
            generation=request.generation,
            dialer=request.from_rank,
            listener=request.to_rank,
            lanes=tuple(request.lanes),
            connections=max(1, request.connections),
            checks_payloads=request.checks_payloads,
            wire_version=request.wire_version,
        )
        return self._encode(self._answer(proposal))

    async def Withdraw(  # noqa: N802
        self, request: link_pb2.WithdrawRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> link_pb2.WithdrawReply:
        """Receive notice that an accepted rank can connect no lane: the two are lost to each other."""
        terms = self._find_terms(request.token)
        if terms is not None:
            try:
                check_caller(context, terms.job, self._role_of(terms.dialer))
            except AuthenticationError as error:
                self._refused(error)
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            self._give_up(terms, request.cause)
        return link_pb2.WithdrawReply()

    async def _frames(self, _requests: object, context: Context) -> None:
        """Carry a gRPC lane, from its handshake to its end."""
        stream = ServerStream(context)
        handshake = Handshake.listen(self._find_terms, secret=self._secret, nonce=os.urandom(NONCE_BYTES))
        try:
            async with asyncio.timeout(PEER_SECONDS):
                await shake_hands(stream, handshake)
            check_caller(context, handshake.terms.job, self._role_of(handshake.terms.dialer))
        except (AuthenticationError, StreamEnded, TimeoutError) as error:
            self._refused(error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "")
        protection = Protection(handshake, may_damage=not self._is_encrypted)
        lane = GrpcLane(stream, protection, link_timeout=self._link_timeout)
        self._gather(handshake.terms, lane)
        await lane.run()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _gate(self, kind: LaneKind, bind: str) -> LaneGate:
        return LaneGate(
            bind=bind,
            secret=self._secret,
            busy_poll=self._busy_poll,
            link_timeout=self._link_timeout,
            find_terms=self._find_terms,
            on_lane=self._gather if kind.is_striped else self._adopt,
            on_refused=self._refused,
        )

    def _answer(self, proposal: Proposal) -> Answer:
        assert self._links is not None
        links, dialer = self._links, proposal.dialer
        lost = links.lost.get(dialer)
        why = LEFT if links.is_closing else None if lost is None else str(lost)
        answer = self.negotiator.answer(proposal, token=os.urandom(TOKEN_BYTES), is_up=links.is_up(dialer), lost=why)
        if isinstance(answer, Accept):
            self._expire_later(answer.terms)
        elif isinstance(answer, Refuse) and answer.reason is Reason.NO_COMMON_LANE:
            self._misfits[dialer] = UsageError(answer.message)
            self._notify(dialer)
        return answer

    def _encode(self, answer: Answer) -> link_pb2.OpenReply:
        match answer:
            case Accept(terms, lanes):
                accepted = _Reply.Accepted(lanes=lanes, token=terms.token)
                accepted.addresses.update({name: one.place for name, one in self._listeners.items()})
                accepted.connections = terms.connections
                accepted.checks_payloads = terms.checks_payloads
                accepted.wire_version = WIRE_VERSION
                return _Reply(accepted=accepted)
            case Defer():
                return _Reply(deferred=_Reply.Deferred())
            case Refuse(reason, message):
                return _Reply(refused=_Reply.Refused(reason=_REASONS[reason], message=message))

    def _expire_later(self, terms: LinkTerms) -> None:
        def expire() -> None:
            self._expiries.discard(handle)
            self._gathering.drop(terms.token)
            self.negotiator.take(terms)

        handle = asyncio.get_running_loop().call_later(AGREEMENT_SECONDS, expire)
        self._expiries.add(handle)

    def _find_terms(self, token: bytes) -> LinkTerms | None:
        return None if self._negotiator is None else self._negotiator.find(token)

    def _gather(self, terms: LinkTerms, connection: Lane) -> None:
        lane = self._gathering.add(terms, as_connection(connection))
        if lane is not None:
            self._adopt(replace(terms, connection=0), lane)

    def _adopt(self, terms: LinkTerms, lane: Lane) -> None:
        self._gathering.drop(terms.token)
        if self._links is None or not self.negotiator.take(terms):
            lane.abort(PeerLost("the agreement is used up", rank=terms.dialer, cause="the agreement is used up"))
            return
        self._links.adopt(terms.dialer, lane)
        self._notify(terms.dialer)

    def _give_up(self, terms: LinkTerms, cause: str) -> None:
        self._gathering.drop(terms.token)
        if self._links is not None and self.negotiator.take(terms):
            self._links.report_lost(terms.dialer, f"it cannot connect to rank {self._links.rank}: {cause}")
            self._notify(terms.dialer)

    def _notify(self, rank: int) -> None:
        news = self._news.get(rank)
        if news is not None:
            news.set()

    def _refused(self, error: Exception) -> None:
        """Log a failed handshake; the peer does not learn the reason."""
        line = self._refusals.line(error, now=asyncio.get_running_loop().time())
        if line is not None:
            _log.warning("%s", line)
