"""The actors of a world as the gRPC service ``asyncpar.v1.Actors``, for other languages.

The promises to callers are in ``proto/asyncpar/v1/actors.proto``.  Their calls are handled like any other call, with
the same checks and limits.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
import msgspec
import numpy as np
from msgspec.msgpack import Ext

from asyncpar._proto.asyncpar.v1 import actors_pb2, actors_pb2_grpc
from asyncpar.actors.runtime.gateway_streams import CallStreams
from asyncpar.actors.runtime.ref import ActorRef, NoSuchEndpoint
from asyncpar.actors.runtime.stream_ends import close_iterator
from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.errors import AsyncparError, MailboxFull, NotFound, PeerError, PeerTimeout, RemoteError, UsageError
from asyncpar.net.transport.rpc import RpcServer
from asyncpar.net.wire.array import AnyArray, find_dtype, type_name

LARGEST_CONTENT: Final = (8 << 20) - (4 << 10)
"""Maximum number of bytes of a result: the size of a gRPC message, less its framing."""

_ARRAY_EXTENSION: Final = 1
_PLACE = struct.Struct("<I")
_MOST_DIMENSIONS: Final = 64
_ANSWER_SHARE, _ANSWER_SECONDS = 0.1, 0.25
"""Time before the deadline at which an unfinished call is answered: as a share of its time, and seconds at most."""

Value = actors_pb2.Value


class ResultTooLarge(UsageError):  # noqa: N818
    """The result does not fit into one message."""


def read_value(value: Value, *, what: str) -> object:
    """Decode ``value``; arrays are views of it.  Raises ``UsageError`` naming ``what``."""
    kind = value.WhichOneof("kind")
    try:
        match kind:
            case "msgpack":
                return msgspec.msgpack.decode(value.msgpack, ext_hook=_array_finder(value, what))
            case "json":
                return msgspec.json.decode(value.json)
            case "array":
                return _read_array(value.array, what)
            case "stream":
                raise UsageError(f"{what}: is a stream; call Feed, or Converse, whose messages bring its items")
    except UsageError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise UsageError(
            f"{what}: expected one value of {value.WhichOneof('kind')}, got other bytes: {error}"
        ) from error
    raise UsageError(f"{what}: expected msgpack, json or an array, got an empty value")


def make_value(result: object, form: int, *, what: str) -> Value:
    """Encode ``result`` in the form that the caller asked for.

    Raises ``UsageError`` naming ``what`` if it has no such form, and ``ResultTooLarge``.
    """
    if isinstance(result, np.ndarray):
        value = Value(array=_make_array(result, what))
    elif form == actors_pb2.ActorCall.JSON:
        value = Value(json=_encode(lambda: msgspec.json.encode(result, enc_hook=_lower_for_json(what)), what).decode())
    elif form == actors_pb2.ActorCall.MSGPACK:
        value = _make_msgpack(result, what)
    else:
        raise UsageError(f"format: expected MSGPACK or JSON, got {form}")
    size = value.ByteSize()
    if size > LARGEST_CONTENT:
        raise ResultTooLarge(f"{what}: at most {LARGEST_CONTENT} bytes fit into one message, got {size}")
    return value


def _array_finder(value: Value, what: str) -> Callable[[int, memoryview], AnyArray]:
    def find(code: int, content: memoryview) -> AnyArray:
        if code != _ARRAY_EXTENSION or len(content) != _PLACE.size:
            raise UsageError(
                f"{what}: expected extension type {_ARRAY_EXTENSION} with {_PLACE.size} bytes, got {code} with "
                f"{len(content)}"
            )
        (place,) = _PLACE.unpack(content)
        if place >= len(value.arrays):
            raise UsageError(f"{what}: it names array {place}, but comes with {len(value.arrays)}")
        return _read_array(value.arrays[place], f"{what}, array {place}")

    return find


def _read_array(array: actors_pb2.Array, what: str) -> AnyArray:
    dtype, shape = find_dtype(array.dtype), tuple(array.shape)
    if dtype is None:
        raise UsageError(f"{what}: expected a dtype that actors know, such as float32, got {array.dtype!r}")
    if len(shape) > _MOST_DIMENSIONS:
        raise UsageError(f"{what}: expected at most {_MOST_DIMENSIONS} dimensions, got {len(shape)}")
    size = math.prod(shape) * dtype.itemsize
    if size != len(array.content):
        raise UsageError(f"{what}: expected {size} bytes for shape {shape} of {dtype}, got {len(array.content)}")
    try:
        return np.ndarray(shape, dtype, buffer=array.content) if size else np.empty(shape, dtype)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{what}: shape {shape} of {dtype}: {error}") from error


def _make_array(array: AnyArray, what: str) -> actors_pb2.Array:
    if array.nbytes > LARGEST_CONTENT:
        raise ResultTooLarge(f"{what}: at most {LARGEST_CONTENT} bytes fit into one message, got {array.nbytes}")
    dtype = find_dtype(array.dtype.name)
    if dtype is None:
        raise UsageError(f"{what}: an array of dtype {array.dtype} cannot be sent")
    content = array.astype(dtype, copy=False).tobytes()
    return actors_pb2.Array(dtype=dtype.name, shape=array.shape, content=content)


def _make_msgpack(result: object, what: str) -> Value:
    arrays: list[actors_pb2.Array] = []

    def lower(value: object) -> object:
        if isinstance(value, np.ndarray):
            arrays.append(_make_array(value, what))
            return Ext(_ARRAY_EXTENSION, _PLACE.pack(len(arrays) - 1))
        return _lower(value, what)

    encoded = _encode(lambda: msgspec.msgpack.encode(result, enc_hook=lower), what)
    return Value(msgpack=encoded, arrays=arrays)


def _lower_for_json(what: str) -> Callable[[object], object]:
    def lower(value: object) -> object:
        if isinstance(value, np.ndarray):
            raise UsageError(f"{what}: there are arrays inside, which JSON cannot hold; ask for MSGPACK")
        return _lower(value, what)

    return lower


def _lower(value: object, what: str) -> object:
    """Convert types that only actors know into plain data."""
    if isinstance(value, ActorRef):
        return {"actor": value.name, "rank": value.rank}
    raise UsageError(f"{what}: a value of type {type_name(type(value))} cannot be sent")


def _encode(encode: Callable[[], bytes], what: str) -> bytes:
    try:
        encoded = encode()
    except UsageError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{what}: it cannot be sent: {error}") from error
    if len(encoded) > LARGEST_CONTENT:
        raise ResultTooLarge(f"{what}: at most {LARGEST_CONTENT} bytes fit into one message, got {len(encoded)}")
    return encoded


Context = grpc.aio.ServicerContext[Any, Any]

ERROR_KEY: Final = "asyncpar-error-bin"
_LONGEST_DETAILS: Final = 256
_LONGEST_TEXT: Final = 1024
_LONGEST_TRACEBACK: Final = 2048
"""In bytes.  Trailing metadata are limited to 8 KiB in all; tracebacks travel in base64, and details with escapes."""


class _Request(msgspec.Struct, frozen=True):
    """A call with decoded arguments."""

    ref: ActorRef[Any]
    endpoint: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class ActorGateway(actors_pb2_grpc.ActorsServicer):
    """Serves the actors of one node's world from ``open`` to ``close``."""

    def __init__(self) -> None:
        self._system: ActorSystem | None = None

    def register(self, server: RpcServer) -> None:
        """Add the service to ``server``, which must not be started yet."""
        actors_pb2_grpc.add_ActorsServicer_to_server(self, server.server)  # type: ignore[no-untyped-call]  # generated

    def open(self, system: ActorSystem) -> None:
        """Accept calls."""
        self._system = system

    def close(self) -> None:
        """Refuse later calls."""
        self._system = None

    # -- service -----------------------------------------------------------------------------------------------------

    async def Ask(self, call: actors_pb2.ActorCall, context: Context) -> actors_pb2.ActorResult:  # noqa: N802
        async with _answering(context) as answered:
            system = self._find_system()
            request = answered.call = _read(system, call)
            result = await system.ask(request.ref, request.endpoint, request.arguments, request.keywords, as_plain=True)
            return _make_result(call, result, "the result")
        raise AssertionError("unreachable: errors end the call")

    async def Tell(self, call: actors_pb2.ActorCall, context: Context) -> actors_pb2.ActorTold:  # noqa: N802
        async with _answering(context) as answered:
            system = self._find_system()
            request = answered.call = _read(system, call)
            await system.tell(request.ref, request.endpoint, request.arguments, request.keywords)
        return actors_pb2.ActorTold()

    async def Stream(self, call: actors_pb2.ActorCall, context: Context) -> None:  # noqa: N802
        async with _answering(context) as answered:
            system = self._find_system()
            request = answered.call = _read(system, call)
            await _write_items(system, call, request, context)

    async def Feed(  # noqa: N802
        self, parts: AsyncIterable[actors_pb2.ActorPart], context: Context
    ) -> actors_pb2.ActorResult:
        async with _answering(context) as answered:
            system, streams = self._find_system(), _streams_of(parts)
            call = await streams.call()
            request = answered.call = _read(system, call, streams)
            work = system.ask(request.ref, request.endpoint, request.arguments, request.keywords, as_plain=True)
            return _make_result(call, await streams.beside(work), "the result")
        raise AssertionError("unreachable: errors end the call")

    async def Converse(self, parts: AsyncIterable[actors_pb2.ActorPart], context: Context) -> None:  # noqa: N802
        async with _answering(context) as answered:
            system, streams = self._find_system(), _streams_of(parts)
            call = await streams.call()
            request = answered.call = _read(system, call, streams)
            await streams.beside(_write_items(system, call, request, context))

    def _find_system(self) -> ActorSystem:
        if self._system is None:
            raise NotInWorld("this node is not in its world, or leaves it; ask again or elsewhere")
        return self._system


class NotInWorld(AsyncparError):  # noqa: N818
    """No actors can be reached here now."""


async def _write_items(system: ActorSystem, call: actors_pb2.ActorCall, request: _Request, context: Context) -> None:
    """Write the items of the stream that an endpoint yields."""
    items = system.stream(request.ref, request.endpoint, request.arguments, request.keywords, as_plain=True)
    try:
        async for item in items:
            await context.write(_make_result(call, item, "an item"))
    finally:
        await close_iterator(items)


def _streams_of(parts: AsyncIterable[actors_pb2.ActorPart]) -> CallStreams:
    return CallStreams(parts, lambda value, what: read_value(value, what=what))


class _AnsweredCall:
    """A call that is being answered; ``call`` is set once it was read."""

    call: _Request | None = None


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[_AnsweredCall]:
    """Answer with the status of any exception, and before the client's deadline, so that it learns the reason."""
    found: Any = context.time_remaining()  # None without a deadline, which the stubs do not declare
    answered, left = _AnsweredCall(), found
    limit = asyncio.timeout(None if left is None else left - min(left * _ANSWER_SHARE, _ANSWER_SECONDS))
    try:
        async with limit:
            yield answered
    except (AsyncparError, TimeoutError) as error:
        await _refuse(context, _deadline(answered.call, left) if limit.expired() and left is not None else error)


def _deadline(call: _Request | None, seconds: float) -> PeerTimeout:
    """Return the error for a call that has no answer after ``seconds``."""
    if call is None:
        return PeerTimeout(f"the call did not come whole within the {seconds:.3g} s that it had", operation="call")
    where = f"{call.endpoint}() of actor {call.ref.name!r} on rank {call.ref.rank}"
    message = f"{where} has not ended within the {seconds:.3g} s that the call had; it was cancelled, or never begun"
    return PeerTimeout(message, rank=call.ref.rank, operation=f"{call.endpoint}()", cause="it has not answered")


def _read(system: ActorSystem, call: actors_pb2.ActorCall, streams: CallStreams | None = None) -> _Request:
    def read(value: Value, what: str) -> object:
        if streams is not None and value.WhichOneof("kind") == "stream":
            return streams.open(value.stream, what)
        return read_value(value, what=what)

    if call.endpoint.startswith("_") or not call.endpoint:
        raise NoSuchEndpoint(f"endpoint: {call.endpoint!r} cannot be called from outside")
    return _Request(
        system.ref(call.actor, call.rank if call.HasField("rank") else None),
        call.endpoint,
        tuple(read(value, f"argument {place}") for place, value in enumerate(call.arguments, start=1)),
        {name: read(value, f"argument {name!r}") for name, value in call.keywords.items()},
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
    """Return the status for ``error``: see ``actors.proto``."""
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
    """Describe ``error`` for the wire, short enough for trailing metadata."""
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
    """Return the beginning of ``text``, at most ``most`` bytes of UTF-8."""
    return text.encode(errors="backslashreplace")[:most].decode(errors="ignore")
