"""gRPC as the control plane: a server and channels that carry the job's credentials on every call.

The job secret itself never travels.  Calls carry ``HMAC-SHA256(secret, "asyncpar rpc token")``; the server compares it
in constant time and answers everything else, health checks included, with UNAUTHENTICATED.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import hmac
import inspect
import selectors
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]  # absent from the stubs

from asyncpar.core.addresses import check_bindable, is_loopback, join_address, loopback
from asyncpar.core.config.secret import SECRET_BYTES, Secret, SecretText
from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.core.descriptors import descriptor_limit
from asyncpar.errors import UsageError
from asyncpar.net.security.certificates import Certificates
from asyncpar.net.security.identity import PeerIdentity, Role, certified_role
from asyncpar.net.transport.connection_watch import WATCH, ServerConnections
from asyncpar.net.transport.stranger_limits import server_limits
from asyncpar.net.transport.tls import channel_credentials, server_credentials

if TYPE_CHECKING:  # generic in the stubs only
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
    _UnaryUnaryInterceptor = grpc.aio.UnaryUnaryClientInterceptor[Any, Any]
    _UnaryStreamInterceptor = grpc.aio.UnaryStreamClientInterceptor[Any, Any]
    _StreamStreamInterceptor = grpc.aio.StreamStreamClientInterceptor[Any, Any]
else:
    _ServerInterceptor = grpc.aio.ServerInterceptor
    _UnaryUnaryInterceptor = grpc.aio.UnaryUnaryClientInterceptor
    _UnaryStreamInterceptor = grpc.aio.UnaryStreamClientInterceptor
    _StreamStreamInterceptor = grpc.aio.StreamStreamClientInterceptor

_TOKEN_KEY = "asyncpar-token"


@atexit.register
def _keep_poller() -> None:
    """Keep gRPC's thread alive to the end of the process, where it waits and holds nothing.

    It ends with the last server or channel, and one may be freed as late as in the interpreter's finalization.  Then
    the thread requests an interpreter lock that is no longer granted, and is unwound while the process exits.  C++ code
    need not survive that: it may end the process ("terminate called without an active exception", SIGABRT).
    """

    async def keep() -> None:
        grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # absent from the stubs

    if any("_poll_wrapper" in thread.name for thread in threading.enumerate()):
        loop = asyncio.SelectorEventLoop(_DeafSelector())  # gRPC counts it for the running loop
        loop.run_until_complete(keep())
        loop.close()


class _DeafSelector(selectors.DefaultSelector):
    """Reports nothing: what gRPC still has for a loop that is closed would be an error of its handler."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:  # noqa: ARG002
        return []


_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_KEEPALIVE,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_channelz", 0),  # its records of ended connections are as large as the data they sent
    ("grpc.max_channel_trace_event_memory_per_node", 0),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
)
_CHANNEL_OPTIONS = (
    *_KEEPALIVE,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # the deadline of one attempt, in fact
    ("grpc.max_reconnect_backoff_ms", 500),
)


def _silence(link_timeout: float) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return the options that end a connection over which nothing has come for ``link_timeout`` seconds.

    A ping is sent after one second of silence.  The first option bounds how long the kernel waits for an
    acknowledgement.  If a middlebox acknowledges, only the second counts in gRPC 1.85: how long the answer to a ping
    takes.  That is twice the limit, because on a slow link much data may be in transit before it.
    """
    return (
        ("grpc.keepalive_timeout_ms", round((link_timeout - 1.0) * 1000)),
        ("grpc.http2.ping_timeout_ms", round(2 * link_timeout * 1000)),
    )


class Credentials:
    """Credentials of a node: the secret of its job, 32 bytes or more, and its certificates if the job has any.

    With certificates all servers and channels speak mutual TLS.
    """

    def __init__(
        self, secret: bytes, certificates: Certificates | None = None, *, certified: Sequence[int] | None = None
    ) -> None:
        """``certified`` are the numbers in the certificates of a world's ranks (None: those of the ranks)."""
        if len(secret) < SECRET_BYTES:
            raise UsageError(f"secret: expected at least {SECRET_BYTES} bytes, got {len(secret)}")
        self.secret = Secret(secret)
        self.certificates = certificates
        self._certified = certified
        self._token = SecretText(hmac.new(secret, b"asyncpar rpc token", hashlib.sha256).hexdigest())

    def in_world(self, certified: Sequence[int] | None) -> Credentials:
        """Return these credentials for a world whose ranks have certificates with other numbers than their own."""
        return Credentials(self.secret, self.certificates, certified=certified)

    def role_of(self, rank: int) -> Role:
        """Return the role in the certificate of ``rank``; for a rank outside the world, a role that nobody has."""
        return certified_role(rank, self._certified)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata for each call."""
        return ((_TOKEN_KEY, self._token),)

    def accepts(self, metadata: dict[str, str | bytes]) -> bool:
        """Return whether this metadata proves knowledge of the secret."""
        token = metadata.get(_TOKEN_KEY, "")
        shown = token.encode() if isinstance(token, str) else token
        return hmac.compare_digest(shown, self._token.encode())

    def __repr__(self) -> str:
        return "Credentials(<secret>)"


class _RequireToken(_ServerInterceptor):
    """Answers UNAUTHENTICATED unless the call carries the job's token, or is for a public service.

    Whatever the kind of the method, the refusal is that of a stream, for which gRPC reads no message: without the token
    nobody can make the server store one.
    """

    def __init__(
        self,
        credentials: Credentials,
        public: Collection[str],
        accept: Callable[[str], None],
        refused: Callable[[str, str], None],
    ) -> None:
        self._credentials = credentials
        self._public = frozenset(public)
        self._accept = accept
        self._refused = refused
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        is_ours = self._credentials.accepts(dict(handler_call_details.invocation_metadata or ()))
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.removeprefix("/").rpartition("/")[0]
        if is_ours or service in self._public:
            reporting: grpc.RpcMethodHandler[Any, Any] = _reporting(handler, self._accept)
            return reporting
        return self._refusal

    async def _refuse(self, _requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._refused(context.peer(), "it has another secret")
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call carries no valid token of this job")


def _reporting(handler: Any, accept: Callable[[str], None]) -> Any:
    """Return ``handler`` (None: no such method) wrapped to report its caller to ``accept``: an interceptor lacks that.

    The function keeps its kind (coroutine, asynchronous generator, or plain), by which grpc.aio runs it.
    """
    if handler is None:
        return None
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    serve = getattr(handler, kind)
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    reporting: Callable[[Any, Any], Any]
    if inspect.isasyncgenfunction(serve):

        async def serve_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            accept(context.peer())
            async with aclosing(serve(request, context)) as answers:
                async for answer in answers:
                    yield answer

        reporting = serve_stream
    elif inspect.iscoroutinefunction(serve):

        async def serve_call(request: Any, context: Any) -> Any:
            accept(context.peer())
            return await serve(request, context)

        reporting = serve_call
    else:

        def serve_plainly(request: Any, context: Any) -> Any:
            accept(context.peer())
            return serve(request, context)

        reporting = serve_plainly
    return make(
        reporting, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )


GRACE_SECONDS: Final = 0.5
"""Seconds for which calls may go on when a server stops."""

BROKEN_GRACE_SECONDS: Final = 0.02
"""The same if the world of its node is broken: silent peers would use up all the time they get."""


class RpcServer:
    """A gRPC server with token check and health service.  Add servicers to ``server``, then ``start``.

    ``credentials`` None serves anyone, which is only allowed on loopback, the default of ``bind``.  Calls of the
    services that ``public`` names need no token.
    """

    def __init__(
        self,
        credentials: Credentials | None,
        *,
        bind: str | None = None,
        port: int = 0,
        public: Collection[str] = (),
        link_timeout: float = LINK_SECONDS,
    ) -> None:
        bind = loopback() if bind is None else bind
        if credentials is None and not is_loopback(bind):
            raise UsageError(
                f"bind: {bind} is not loopback, and without a job secret anyone on the network could join; "
                f"give a secret (asyncpar launch makes one) or bind to {loopback()}"
            )
        self.credentials = credentials
        interceptors = [] if credentials is None else [_RequireToken(credentials, public, self._accept, self.refused)]
        options = [*_SERVER_OPTIONS, *_silence(link_timeout), *server_limits(descriptor_limit(), WATCH.servers)]
        self.server = grpc.aio.server(interceptors=interceptors, options=options)
        self.bind = bind
        self.port = port
        self.grace = GRACE_SECONDS
        self._connections: ServerConnections | None = None
        self.on_refused: Callable[[str, str], None] = lambda _peer, _why: None
        """Receives each refused peer (as gRPC names it), and the reason."""
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    @property
    def address(self) -> str:
        """``host:port`` at which peers reach the server (once started)."""
        return join_address(self.bind, self.port)

    async def start(self) -> None:
        """Bind and serve.  Raises ``UsageError`` if the port is in use or the address is not ours."""
        check_bindable(self.bind, self.port)
        certificates = None if self.credentials is None else self.credentials.certificates
        where = join_address(self.bind, self.port)
        try:
            if certificates is None:
                self.port = self.server.add_insecure_port(where)
            else:
                self.port = self.server.add_secure_port(where, server_credentials(certificates))
        except RuntimeError as error:
            raise UsageError(f"port: {where} cannot be bound ({error})") from error
        if self.credentials is not None:
            self._connections = WATCH.register(self.port)  # a peer may call before ``start`` has returned
        starting = asyncio.ensure_future(self.server.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:  # gRPC does not support cancellation there, and complains later
            await asyncio.wait({starting})
            await self.server.stop(None)
            self._unwatch()
            raise
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, *, grace: float | None = None) -> None:
        """Refuse new calls, give running ones ``grace`` seconds (default: those of the server), then end them."""
        await self._health.enter_graceful_shutdown()
        try:
            await self.server.stop(self.grace if grace is None else grace)
        finally:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._connections is not None:
            WATCH.unregister(self._connections)

    def refused(self, peer: str, why: str) -> None:
        """Report that a call of ``peer`` (as gRPC names it) was refused, here or by a service."""
        self.on_refused(peer, why)

    def _accept(self, peer: str) -> None:
        if self._connections is not None:
            self._connections.accept(peer)


def open_channel(
    address: str,
    credentials: Credentials | None,
    *,
    peer: Role | None = None,
    adds_token: bool = True,
    link_timeout: float = LINK_SECONDS,
) -> grpc.aio.Channel:
    """Return a channel to ``address`` whose every call carries the token of ``credentials``.

    With certificates, only the server of ``peer`` is accepted.  ``adds_token`` False leaves the token to each call.
    """
    interceptors = [] if credentials is None or not adds_token else _client_interceptors(credentials)
    certificates = None if credentials is None else credentials.certificates
    if certificates is None:
        return grpc.aio.insecure_channel(
            address, options=[*_CHANNEL_OPTIONS, *_silence(link_timeout)], interceptors=interceptors
        )
    assert peer is not None, "with certificates, a channel leads to one peer"
    name = PeerIdentity(certificates.identity.job, peer).dns_name
    options = [*_CHANNEL_OPTIONS, *_silence(link_timeout), ("grpc.ssl_target_name_override", name)]
    return grpc.aio.secure_channel(
        address, channel_credentials(certificates), options=options, interceptors=interceptors
    )


class _AddToken:
    """Puts the token into the metadata of outgoing calls."""

    def __init__(self, credentials: Credentials) -> None:
        self._metadata = credentials.metadata()

    def _with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._metadata)
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


class _UnaryUnary(_AddToken, _UnaryUnaryInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _UnaryStream(_AddToken, _UnaryStreamInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _StreamStream(_AddToken, _StreamStreamInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(self._with_token(client_call_details), request_iterator)


def _client_interceptors(credentials: Credentials) -> list[Any]:
    return [_UnaryUnary(credentials), _UnaryStream(credentials), _StreamStream(credentials)]
