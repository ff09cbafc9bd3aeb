"""Snapshots over gRPC: what a process gives to newcomers, and a donor in another process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
import numpy as np

from asyncpar._proto.asyncpar.v1 import snapshots_pb2 as pb
from asyncpar._proto.asyncpar.v1 import snapshots_pb2_grpc
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
    StaleGeneration,
)
from asyncpar.net.membership.lineage import Lineage
from asyncpar.net.security.certificates import Certificates
from asyncpar.net.security.identity import ANY_RANK, Role
from asyncpar.net.transport.rpc import Credentials, open_channel
from asyncpar.net.transport.tls import check_caller
from asyncpar.net.transport.tls_probe import check_tls

T = TypeVar("T")
_log = logging.getLogger(__name__)

_CODES: dict[type[AsyncparError], grpc.StatusCode] = {
    NotFound: grpc.StatusCode.NOT_FOUND,
    StaleGeneration: grpc.StatusCode.FAILED_PRECONDITION,
    SnapshotTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_ERRORS = {code: kind for kind, code in _CODES.items()}


class SnapshotService(snapshots_pb2_grpc.SnapshotsServicer):
    """Gives newcomers what is on ``shelf``: with ``certificates``, those who show one of a rank of the same job."""

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

    async def Block(self, request: pb.BlockRequest, context: Any) -> pb.BlockReply:  # noqa: N802
        """See ``Donor.block``."""
        await self._check(context)
        block = await _answer(self._shelf.block(request.pin, request.name, request.number), context)
        return pb.BlockReply(content=bytes(block))

    async def Update(self, request: pb.UpdateRequest, context: Any) -> AsyncIterator[pb.UpdatePart]:  # noqa: N802
        """See ``Donor.update``."""
        await self._check(context)
        update = await _answer(self._shelf.update(request.pin, request.number), context)
        yield pb.UpdatePart(description=_described_update(update))
        for part in _parts(update):
            yield pb.UpdatePart(content=part)

    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinReply:  # noqa: N802
        """See ``Donor.unpin``."""
        await self._check(context)
        await _answer(self._shelf.unpin(request.pin), context)
        return pb.UnpinReply()


def add_snapshot_service(
    server: grpc.aio.Server, shelf: SnapshotShelf, certificates: Certificates | None = None
) -> None:
    """Serve ``shelf`` on ``server``, which proves itself with ``certificates``."""
    snapshots_pb2_grpc.add_SnapshotsServicer_to_server(  # type: ignore[no-untyped-call]  # generated
        SnapshotService(shelf, certificates), server
    )


class RemoteDonor:
    """The donor ``name`` at ``address`` (``host:port``); ``async with``."""

    def __init__(self, name: str, address: str, credentials: Credentials | None, role: Role | None = None) -> None:
        self.name = name
        self._address = address
        self._credentials = credentials
        self._role = role
        self._stack = AsyncExitStack()
        self._stub: Any = None

    async def _call(self) -> Any:
        if self._stub is None:
            channel = open_channel(self._address, self._credentials, peer=self._role)
            await self._stack.enter_async_context(channel)
            self._stub = snapshots_pb2_grpc.SnapshotsStub(channel)  # type: ignore[no-untyped-call]  # generated
        return self._stub

    async def close(self) -> None:
        """Close the connection."""
        await self._stack.aclose()
        self._stub = None

    async def position(self) -> int:
        """See ``Donor``."""
        return int((await self._result((await self._call()).Position(pb.PositionRequest()))).step)

    async def pin(self, step: int) -> SnapshotDescription:
        """See ``Donor``."""
        reply = await self._result((await self._call()).Pin(pb.PinRequest(step=step)))
        return _described(reply.pin, reply.description)

    async def block(self, pin: int, name: str, number: int) -> bytes:
        """See ``Donor``."""
        request = pb.BlockRequest(pin=pin, name=name, number=number)
        content: bytes = (await self._result((await self._call()).Block(request))).content
        return content

    async def update(self, pin: int, number: int) -> StepUpdate:
        """See ``Donor``."""
        parts, description = bytearray(), b""
        try:
            async for part in (await self._call()).Update(pb.UpdateRequest(pin=pin, number=number)):
                description = part.description or description
                parts += part.content
        except grpc.aio.AioRpcError as error:
            await self._raise(error)
        return _update(description, parts)

    async def unpin(self, pin: int) -> None:
        """See ``Donor``."""
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
    return encode_plain([update.number, _plain(update.layout), update.loss, sums, update.is_updated, values], "update")


def _parts(update: StepUpdate) -> Iterator[bytes]:
    for flat in [*update.flats, *([] if update.values is None else [update.values])]:
        content = flat.view(np.uint8).data
        for start in range(0, len(content), BLOCK_BYTES):
            yield bytes(content[start : start + BLOCK_BYTES])


def _update(description: bytes, content: bytearray) -> StepUpdate:
    try:
        number, (names, shapes), loss, sums, is_updated, values = decode_plain(description)
        described = names, [(dtype, shape) for dtype, shape in shapes]
        tail = 0 if values is None else np.dtype(values[0]).itemsize * values[1]
        flats = GradientLayout.described(described).trimmed_from(memoryview(content)[: len(content) - tail])
        return StepUpdate(
            number=number,
            layout=described,
            flats=flats,
            loss=loss,
            part_sums={name: tuple(numbers) for name, numbers in sums.items()},
            is_updated=is_updated,
            values=None if values is None else np.frombuffer(content, np.dtype(values[0]), offset=len(content) - tail),
        )
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"update: it is damaged: {error}") from error
