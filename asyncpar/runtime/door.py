"""The door for other languages: the actors of a world as the gRPC service ``asyncpar.v1.Actors``.

What callers may rely on is said in ``proto/asyncpar/v1/actors.proto``.  Their calls go the way of any other caller's,
so that they meet the same checks and limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from asyncpar._proto.asyncpar.v1 import actors_pb2, actors_pb2_grpc
from asyncpar.errors import AsyncparError, MailboxFull, NotFound, PeerError, PeerTimeout, RemoteError, UsageError
from asyncpar.runtime.door_values import ResultTooLarge, make_value, read_value
from asyncpar.runtime.ref import ActorRef, NoSuchEndpoint
from asyncpar.runtime.streams.producing import close_iterator
from asyncpar.runtime.system import ActorSystem
from asyncpar.transport.rpc import RpcServer
from asyncpar.wire.array import type_name

Context = grpc.aio.ServicerContext[Any, Any]

ERROR_KEY: Final = "asyncpar-error-bin"
_LONGEST_DETAILS: Final = 256
_LONGEST_TEXT: Final = 1024
_LONGEST_TRACEBACK: Final = 2048
"""In bytes.  Trailing metadata are limited to 8 KiB in all; they travel in base64, and details with escapes."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A call whose arguments were read."""

    ref: ActorRef[Any]
    endpoint: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class Door(actors_pb2_grpc.ActorsServicer):
    """Serves the actors of one node's world from ``open`` to ``close``."""

    def __init__(self) -> None:
        self._system: ActorSystem | None = None

    def register(self, server: RpcServer) -> None:
        """Add the service to ``server``, which must not be started yet."""
        actors_pb2_grpc.add_ActorsServicer_to_server(self, server.server)  # type: ignore[no-untyped-call]  # generated

    def open(self, system: ActorSystem) -> None:
        """Let callers in."""
        self._system = system

    def close(self) -> None:
        """Let nobody in any more."""
        self._system = None

    # -- service -----------------------------------------------------------------------------------------------------

    async def Ask(self, call: actors_pb2.ActorCall, context: Context) -> actors_pb2.ActorResult:  # noqa: N802
        async with _answering(context), asyncio.timeout(context.time_remaining()):
            system = self._find_system()
            request = _read(system, call)
            result = await system.ask(request.ref, request.endpoint, request.arguments, request.keywords, as_plain=True)
            return _make_result(call, result, "the result")
        raise AssertionError("unreachable: errors end the call")

    async def Tell(self, call: actors_pb2.ActorCall, context: Context) -> actors_pb2.ActorTold:  # noqa: N802
        async with _answering(context), asyncio.timeout(context.time_remaining()):
            system = self._find_system()
            request = _read(system, call)
            await system.tell(request.ref, request.endpoint, request.arguments, request.keywords)
        return actors_pb2.ActorTold()

    async def Stream(self, call: actors_pb2.ActorCall, context: Context) -> None:  # noqa: N802
        async with _answering(context), asyncio.timeout(context.time_remaining()):
            system = self._find_system()
            request = _read(system, call)
            items = system.stream(request.ref, request.endpoint, request.arguments, request.keywords, as_plain=True)
            try:
                async for item in items:
                    await context.write(_make_result(call, item, "an item"))
            finally:
                await close_iterator(items)

    def _find_system(self) -> ActorSystem:
        if self._system is None:
            raise NotInWorld("this node is not in its world, or leaves it; ask again or elsewhere")
        return self._system


class NotInWorld(AsyncparError):  # noqa: N818
    """There are no actors to be reached here now."""


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    """Answer with the status of what is raised."""
    try:
        yield
    except (AsyncparError, TimeoutError) as error:
        await _refuse(context, error)


def _read(system: ActorSystem, call: actors_pb2.ActorCall) -> _Request:
    if call.endpoint.startswith("_") or not call.endpoint:
        raise NoSuchEndpoint(f"endpoint: {call.endpoint!r} cannot be called from outside")
    return _Request(
        system.ref(call.actor, call.rank if call.HasField("rank") else None),
        call.endpoint,
        tuple(read_value(value, what=f"argument {place}") for place, value in enumerate(call.arguments, start=1)),
        {name: read_value(value, what=f"argument {name!r}") for name, value in call.keywords.items()},
    )


def _make_result(call: actors_pb2.ActorCall, result: object, what: str) -> actors_pb2.ActorResult:
    return actors_pb2.ActorResult(value=make_value(result, call.format, what=f"{what} of {call.endpoint}()"))


async def _refuse(context: Context, error: Exception) -> NoReturn:
    """End the call with the status and the description of ``error``."""
    described = describe(error)
    details = _head(f"{described.type}: {described.message}", _LONGEST_DETAILS)
    await context.abort(status_of(error), details, ((ERROR_KEY, described.SerializeToString()),))
    raise AssertionError("unreachable: abort raises")


def status_of(error: Exception) -> grpc.StatusCode:
    """Return the status that stands for ``error``: see ``actors.proto``."""
    match error:
        case NotFound():
            return grpc.StatusCode.NOT_FOUND
        case ResultTooLarge() | MailboxFull():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case PeerTimeout() | TimeoutError():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case UsageError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case RemoteError():
            return grpc.StatusCode.UNKNOWN
        case PeerError() | NotInWorld():
            return grpc.StatusCode.UNAVAILABLE
        case _:
            return grpc.StatusCode.INTERNAL


def describe(error: Exception) -> actors_pb2.ActorError:
    """Return ``error`` as it travels, short enough for trailing metadata."""
    rank = getattr(error, "rank", None)
    if isinstance(error, RemoteError):
        described = actors_pb2.ActorError(
            type=_head(error.type_name, _LONGEST_DETAILS),
            message=_head(error.message, _LONGEST_TEXT),
            traceback=error.remote_traceback.encode()[-_LONGEST_TRACEBACK:].decode(errors="ignore"),
        )
    else:
        name = type(error).__name__ if isinstance(error, AsyncparError) else type_name(type(error))
        described = actors_pb2.ActorError(type=name, message=_head(str(error), _LONGEST_TEXT))
    if rank is not None:
        described.rank = rank
    return described


def _head(text: str, most: int) -> str:
    """Return the beginning of ``text``, ``most`` bytes of UTF-8 at most."""
    return text.encode(errors="backslashreplace")[:most].decode(errors="ignore")
