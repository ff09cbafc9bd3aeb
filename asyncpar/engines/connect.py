"""``ap.connect``: a client that is not a rank calls the actors of a running job, and subscribes to their streams.

It speaks the published protocol (``proto/asyncpar/v1/actors.proto``), as clients in other languages do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from asyncpar import errors
from asyncpar._proto.asyncpar.v1 import actors_pb2, actors_pb2_grpc
from asyncpar.actors.runtime.gateway import ERROR_KEY, make_value, read_value
from asyncpar.core.addresses import split_address
from asyncpar.core.config.secret import Secret
from asyncpar.errors import (
    ActorDown,
    AuthenticationError,
    MailboxFull,
    NotFound,
    PeerError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    RemoteError,
    UsageError,
)
from asyncpar.net.membership.credentials import read_secret
from asyncpar.net.transport.rpc import Credentials, open_channel

_BY_STATUS: Final[dict[grpc.StatusCode, type[Exception]]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: MailboxFull,
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerTimeout,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.UNAVAILABLE: PeerLost,
}


class JobConnection:
    """A connection to one rank of a job, through which all its actors are reached: ``async with ap.connect(...)``.

    ``address`` is the ``host:port`` of a node (``node.address``), ``secret`` the job's, or the file that holds it.
    Arguments, results and items are plain data and arrays, 8 MiB each at most; weights go in parts.
    """

    def __init__(self, address: str, secret: bytes | str | Path) -> None:
        split_address(address)
        content = Secret(secret) if isinstance(secret, bytes) else read_secret(secret)
        self.address = address
        self._credentials = Credentials(content)
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    async def __aenter__(self) -> JobConnection:
        self._channel = open_channel(self.address, self._credentials)
        self._stub = actors_pb2_grpc.ActorsStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls, and the connection.  Idempotent."""
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close(None)

    def ref(self, name: str, rank: int | None = None) -> ClientRef:
        """Return the actor called ``name`` on ``rank`` (None: the rank that is connected to); nothing is sent."""
        if rank is not None and rank < 0:
            raise UsageError(f"rank: expected 0 or more, got {rank}")
        return ClientRef(self, name, rank)

    @property
    def stub(self) -> Any:
        """The stub of the service.  Raises ``UsageError`` outside the block."""
        if self._stub is None:
            raise UsageError("connect: the connection is not open; use async with ap.connect(...) as job")
        return self._stub


class ClientRef:
    """An actor of a job in which this process takes no part.  Its endpoints are attributes, as in ``ActorRef``."""

    def __init__(self, connection: JobConnection, name: str, rank: int | None) -> None:
        self._connection = connection
        self.name = name
        self.rank = rank

    def __getattr__(self, endpoint: str) -> ClientEndpoint:
        if endpoint.startswith("_"):
            raise AttributeError(endpoint)
        return ClientEndpoint(self._connection, self, endpoint)

    def __repr__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"<actor {self.name!r}{where} at {self._connection.address}>"


class ClientEndpoint:
    """One endpoint: call it for its result, ``tell`` it, or read its ``stream``.

    Errors are those of ``ActorRef``, with the rank that is the cause where it is known; ``AuthenticationError`` for a
    wrong secret, and ``PeerLost`` if the node cannot be reached.
    """

    def __init__(self, connection: JobConnection, ref: ClientRef, name: str) -> None:
        self._connection = connection
        self._ref = ref
        self._name = name

    async def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the endpoint, and return its result."""
        call = self._call(arguments, keywords)
        with self._translating():
            answer = await self._connection.stub.Ask(call)
            return read_value(answer.value, what=f"the result of {self._name}")

    async def tell(self, *arguments: Any, **keywords: Any) -> None:
        """Send a call without a reply; return when it has been sent and the mailbox has room."""
        call = self._call(arguments, keywords)
        with self._translating():
            await self._connection.stub.Tell(call)

    async def stream(self, *arguments: Any, **keywords: Any) -> AsyncIterator[Any]:
        """Yield the items of a stream, which advances only as fast as they are read."""
        call = self._call(arguments, keywords)
        with self._translating():
            items = self._connection.stub.Stream(call)
            try:
                async for item in items:
                    yield read_value(item.value, what=f"an item of {self._name}")
            finally:
                items.cancel()

    def _call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> actors_pb2.ActorCall:
        form = actors_pb2.ActorCall.MSGPACK
        return actors_pb2.ActorCall(
            actor=self._ref.name,
            endpoint=self._name,
            rank=self._ref.rank,
            arguments=[
                make_value(value, form, what=f"argument {place}") for place, value in enumerate(arguments, start=1)
            ],
            keywords={name: make_value(value, form, what=f"argument {name!r}") for name, value in keywords.items()},
        )

    @contextmanager
    def _translating(self) -> Any:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            _raise(error, f"{self._name} of {self._ref!r}")


def _raise(error: grpc.aio.AioRpcError, what: str) -> NoReturn:
    """Raise the typed error that the node has described, or the one for the status."""
    described = actors_pb2.ActorError()
    metadata: Any = error.trailing_metadata()  # pairs, contrary to its stub
    for key, value in metadata or ():
        if key == ERROR_KEY and isinstance(value, bytes):
            described.ParseFromString(value)
    rank = described.rank if described.HasField("rank") else None
    code = error.code()
    if code is grpc.StatusCode.UNKNOWN and described.type:
        traceback = described.traceback
        raise RemoteError(
            described.message, rank=rank or 0, type_name=described.type, remote_traceback=traceback
        ) from error
    kind = getattr(errors, described.type, None) if described.type else None
    if not (isinstance(kind, type) and issubclass(kind, UsageError | PeerError)):
        kind = _BY_STATUS.get(code, ProtocolError)
    message = f"{what}: {described.message or error.details() or code.name}"
    if kind in (PeerLost, PeerTimeout, ActorDown, MailboxFull):
        raise kind(message, rank=rank) from error
    raise (UsageError if issubclass(kind, UsageError) and kind is not NotFound else kind)(message) from error


connect = JobConnection
