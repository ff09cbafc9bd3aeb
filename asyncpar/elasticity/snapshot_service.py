"""Snapshots over gRPC: the service of a process for newcomers, and a donor in another process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from asyncpar._proto.asyncpar.v1 import snapshots_pb2 as pb
from asyncpar._proto.asyncpar.v1 import snapshots_pb2_grpc
from asyncpar.core.array_pool import ArrayPool
from asyncpar.elasticity.donors import SnapshotDescription, SnapshotShelf, StepUpdate
from asyncpar.elasticity.lineage import BLOCK_BYTES, ArrayShape
from asyncpar.elasticity.plain import decode_plain, encode_plain
from asyncpar.elasticity.reduction import GradientLayout
from asyncpar.errors import (
    AsyncparError,
    AuthenticationError,
    NotFound,
    PeerLost,
    ProtocolError,
    SnapshotTooLarge,
)
from asyncpar.hosts.lineage import Lineage
from asyncpar.net.security.certificates import Certificates
from asyncpar.net.security.identity import ANY_RANK, Role
from asyncpar.net.transport.rpc import Credentials, open_channel
from asyncpar.net.transport.tls import check_caller
from asyncpar.net.transport.tls_probe import check_tls

T = TypeVar("T")
_log = logging.getLogger(__name__)

_CODES: dict[type[AsyncparError], grpc.StatusCode] = {
    NotFound: grpc.StatusCode.NOT_FOUND,
    SnapshotTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_ERRORS = {code: kind for kind, code in _CODES.items()}
_SERVICE: Final = "asyncpar.v1.Snapshots"
_BLOCK: Final = "Block"
_UPDATE: Final = "Update"
_LINEAGE: Final = "Lineage"


class SnapshotService(snapshots_pb2_grpc.SnapshotsServicer):
    """Serves ``shelf`` to newcomers; with ``certificates``, to those that present one of a rank of the same job."""

    def __init__(self, shelf: SnapshotShelf, certificates: Certificates | None) -> None:
        self._shelf = shelf
        self._job = "" if certificates is None else certificates.identity.job

    async def _check(self, context: Any) -> None:
        try:
            check_caller(context, self._job, ANY_RANK)
        except AuthenticationError as error:
            _log.warning("a newcomer was refused: %s", error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))

    async def Position(self, request: pb.PositionRequest, context: Any) -> pb.PositionReply:  # noqa: N802, ARG002
        """See ``Donor.position``."""
        await self._check(context)
        return pb.PositionReply(step=await _answer(self._shelf.position(), context))

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinReply:  # noqa: N802
        """See ``Donor.pin``."""
        await self._check(context)
        found = await _answer(self._shelf.pin(request.step), context)
        return pb.PinReply(pin=found.pin, description=_describe(found))

    async def block(self, request: pb.BlockRequest, context: Any) -> bytes:
        """See ``Donor.block``."""
        await self._check(context)
        return bytes(await _answer(self._shelf.block(request.pin, request.name, request.number), context))

    async def update(self, request: pb.UpdateRequest, context: Any) -> AsyncIterator[bytes]:
        """See ``Donor.update``: first the description, then the bytes of all arrays, one after another."""
        await self._check(context)
        update = await _answer(self._shelf.update(request.pin, request.number), context)
        yield _described_update(update)
        for content in _contents(update):
            for start in range(0, len(content), BLOCK_BYTES):
                yield bytes(content[start : start + BLOCK_BYTES])

    async def lineage(self, request: pb.UpdateRequest, context: Any) -> bytes:
        """See ``Donor.lineage``: its digest."""
        await self._check(context)
        return (await _answer(self._shelf.lineage(request.pin, request.number), context)).digest

    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinReply:  # noqa: N802
        """See ``Donor.unpin``."""
        await self._check(context)
        await _answer(self._shelf.unpin(request.pin), context)
        return pb.UnpinReply()


def add_snapshot_service(
    server: grpc.aio.Server, shelf: SnapshotShelf, certificates: Certificates | None = None
) -> None:
    """Serve ``shelf`` on ``server``, which authenticates itself with ``certificates``."""
    service = SnapshotService(shelf, certificates)
    snapshots_pb2_grpc.add_SnapshotsServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated
    handlers = {
        _BLOCK: grpc.unary_unary_rpc_method_handler(service.block, request_deserializer=pb.BlockRequest.FromString),
        _UPDATE: grpc.unary_stream_rpc_method_handler(service.update, request_deserializer=pb.UpdateRequest.FromString),
        _LINEAGE: grpc.unary_unary_rpc_method_handler(
            service.lineage, request_deserializer=pb.UpdateRequest.FromString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


class RemoteDonor:
    """The donor ``name`` at ``address`` (``host:port``); ``async with``."""

    def __init__(self, name: str, address: str, credentials: Credentials | None, role: Role | None = None) -> None:
        self.name = name
        self._address = address
        self._credentials = credentials
        self._role = role
        self._memory = ArrayPool(None)
        """Memory of updates: each reuses that of the one before the last."""
        self._stack = AsyncExitStack()
        self._channel: Any = None  # of grpc.aio, whose stubs know no messages of raw bytes

    async def _open(self) -> Any:
        if self._channel is None:
            channel = open_channel(self._address, self._credentials, peer=self._role)
            self._channel = await self._stack.enter_async_context(channel)
        return self._channel

    async def _call(self) -> Any:
        return snapshots_pb2_grpc.SnapshotsStub(await self._open())  # type: ignore[no-untyped-call]  # generated

    async def close(self) -> None:
        """Close the connection."""
        await self._stack.aclose()
        self._channel = None

    async def position(self) -> int:
        """See ``Donor``."""
        return int((await self._result((await self._call()).Position(pb.PositionRequest()))).step)

    async def pin(self, step: int) -> SnapshotDescription:
        """See ``Donor``."""
        reply = await self._result((await self._call()).Pin(pb.PinRequest(step=step)))
        return _described(reply.pin, reply.description)

    async def block(self, pin: int, name: str, number: int) -> bytes:
        """See ``Donor``."""
        call = (await self._open()).unary_unary(
            f"/{_SERVICE}/{_BLOCK}", request_serializer=pb.BlockRequest.SerializeToString
        )
        content: bytes = await self._result(call(pb.BlockRequest(pin=pin, name=name, number=number)))
        return content

    async def update(self, pin: int, number: int) -> StepUpdate:
        """See ``Donor``."""
        call = (await self._open()).unary_stream(
            f"/{_SERVICE}/{_UPDATE}", request_serializer=pb.UpdateRequest.SerializeToString
        )
        coming = _ComingUpdate(self._memory)
        try:
            async for part in call(pb.UpdateRequest(pin=pin, number=number)):
                coming.take(part)
        except grpc.aio.AioRpcError as error:
            await self._raise(error)
        return coming.whole()

    async def lineage(self, pin: int, step: int) -> Lineage:
        """See ``Donor``."""
        call = (await self._open()).unary_unary(
            f"/{_SERVICE}/{_LINEAGE}", request_serializer=pb.UpdateRequest.SerializeToString
        )
        return Lineage(step, await self._result(call(pb.UpdateRequest(pin=pin, number=step))))

    async def unpin(self, pin: int) -> None:
        """See ``Donor``."""
        self._memory = ArrayPool(None)
        await self._result((await self._call()).Unpin(pb.UnpinRequest(pin=pin)))

    async def _result(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            await self._raise(error)

    async def _raise(self, error: grpc.aio.AioRpcError) -> NoReturn:
        details = f"{self.name}: {error.details() or error.code().name}"
        kind = _ERRORS.get(error.code())
        if kind is not None:
            raise kind(details) from error
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            raise AuthenticationError(
                f"healing: {self.name} at {self._address} did not accept our secret or certificate "
                f"({error.details()}); were the files changed on this host? All ranks of a job need the same secret, "
                "and certificates of one `asyncpar certs init`"
            ) from error
        if error.code() == grpc.StatusCode.UNAVAILABLE and self._role is not None:
            await check_tls(self._address, self._credentials, self._role)
        raise PeerLost(f"donor {details}", cause=details) from error


async def _answer(work: Awaitable[T], context: Any) -> T:
    try:
        return await work
    except tuple(_CODES) as error:
        code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
        await context.abort(code, str(error))
        raise


def _describe(found: SnapshotDescription) -> bytes:
    shapes = [[shape.name, shape.dtype, list(shape.shape), shape.nbytes] for shape in found.shapes]
    sums = {name: list(numbers) for name, numbers in found.sums.items()}
    lineage = [found.lineage.step, found.lineage.digest]
    return encode_plain([lineage, found.digest, shapes, sums, dict(found.values), dict(found.settings)], "snapshot")


def _described(pin: int, content: bytes) -> SnapshotDescription:
    try:
        (step, history), digest, shapes, sums, values, settings = decode_plain(content)
        return SnapshotDescription(
            pin=pin,
            lineage=Lineage(step, history),
            digest=digest,
            shapes=tuple(ArrayShape(name, dtype, tuple(shape), nbytes) for name, dtype, shape, nbytes in shapes),
            sums={name: tuple(numbers) for name, numbers in sums.items()},
            values=values,
            settings=settings,
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"snapshot: its description is damaged: {error}") from error


def _plain(layout: tuple[list[str] | None, list[tuple[str, list[int]]]]) -> list[object]:
    names, shapes = layout
    return [names, [[dtype, list(shape)] for dtype, shape in shapes]]


def _described_update(update: StepUpdate) -> bytes:
    values = None if update.values is None else [update.values.dtype.name, update.values.size]
    sums = {name: list(numbers) for name, numbers in update.part_sums.items()}
    described = [update.number, _plain(update.layout), update.loss, sums, update.is_updated, values]
    return encode_plain([*described, sum(map(len, _contents(update)))], "update")


def _contents(update: StepUpdate) -> list[memoryview]:
    arrays = [*update.flats, *([] if update.values is None else [update.values])]
    return [array.view(np.uint8).data for array in arrays]


class _ComingUpdate:
    """An update whose messages arrive one after another, stored in ``memory``."""

    def __init__(self, memory: ArrayPool) -> None:
        self._memory = memory
        self._described: list[Any] = []
        self._content = memoryview(b"")
        self._length = 0

    def take(self, message: bytes) -> None:
        """Take the next message.  Raises ``ProtocolError`` for one that does not fit."""
        if not self._described:
            self._begin(message)
            return
        end = self._length + len(message)
        if end > len(self._content):
            raise ProtocolError(f"update: expected {len(self._content)} bytes, got {end}")
        self._content[self._length : end] = message
        self._length = end

    def _begin(self, description: bytes) -> None:
        try:
            *self._described, nbytes = decode_plain(description)
            self._content = self._memory.empty((nbytes,), np.uint8).data
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"update: its description is damaged: {error}") from error

    def whole(self) -> StepUpdate:
        """Return the update, when all messages have arrived.  Raises ``ProtocolError`` if it is damaged."""
        try:
            number, (names, shapes), loss, sums, is_updated, values = self._described
            described = names, [(dtype, shape) for dtype, shape in shapes]
            content, values_at = self._content[: self._length], self._length
            if values is not None:
                values_at -= np.dtype(values[0]).itemsize * values[1]
            return StepUpdate(
                number=number,
                layout=described,
                flats=[
                    _aligned(flat) for flat in GradientLayout.described(described).trimmed_from(content[:values_at])
                ],
                loss=loss,
                part_sums={name: tuple(numbers) for name, numbers in sums.items()},
                is_updated=is_updated,
                values=None if values is None else np.frombuffer(content, np.dtype(values[0]), offset=values_at),
            )
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"update: it is damaged: {error}") from error


def _aligned(flat: NDArray[Any]) -> NDArray[Any]:
    """Return an array aligned for its dtype: arrays of several dtypes follow one another."""
    return flat if flat.flags.aligned else flat.copy()
