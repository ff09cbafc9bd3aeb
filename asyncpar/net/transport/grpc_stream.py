"""Bidirectional gRPC streams of raw bytes, with the same interface at both ends, and gRPC's errors translated."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import grpc
import grpc.aio

from asyncpar.errors import AuthenticationError
from asyncpar.net.wire.handshake import Handshake

SERVICE = "asyncpar.v1.Link"
FRAMES_METHOD = "Frames"

Call = grpc.aio.StreamStreamCall[bytes, bytes]
Context = grpc.aio.ServicerContext[bytes, bytes]
_ACCEPTED = "asyncpar-accepted"  # sent by the server of a stream before its first message
_BROKEN = (grpc.aio.AioRpcError, grpc.aio.BaseError, grpc.aio.InternalError, asyncio.InvalidStateError)


class StreamEnded(Exception):  # noqa: N818
    """The stream is over; the message gives the reason, for people."""


class ByteStream(ABC):
    """One end of a bidirectional stream of messages."""

    @abstractmethod
    async def agree(self) -> None:
        """Accept the call, or wait until the peer accepts it, before the first message.  Raises ``StreamEnded``.

        gRPC replaces the status of a call by an internal error when a message is written between the end of the call
        and the arrival of its status, so a caller that wrote at once would not learn why it was refused.
        """

    @abstractmethod
    async def read(self) -> bytes:
        """Return the next message.  Raises ``StreamEnded``."""

    @abstractmethod
    async def write(self, message: bytes) -> None:
        """Send one message; return when there is room for another.  Raises ``StreamEnded``."""

    @abstractmethod
    def cancel(self) -> None:
        """End the stream at once.  Idempotent."""


class ClientStream(ByteStream):
    """The caller's end.

    gRPC keeps the connection of a closed channel for as long as a call on it exists, so ``cancel`` drops the call.
    """

    def __init__(self, call: Call) -> None:
        self._open: Call | None = call

    async def agree(self) -> None:
        try:
            metadata = await self._call().initial_metadata()
        except _BROKEN as error:
            raise StreamEnded(_describe(error)) from error
        if _ACCEPTED not in metadata:
            await self.read()  # raises the error that ended the call
            raise StreamEnded("the peer did not accept the stream")

    async def read(self) -> bytes:
        try:
            message = await self._call().read()
        except _BROKEN as error:
            raise StreamEnded(_describe(error)) from error
        if isinstance(message, bytes):
            return message
        raise StreamEnded("the peer closed the stream")

    async def write(self, message: bytes) -> None:
        try:
            await self._call().write(message)
        except _BROKEN as error:
            raise StreamEnded(_describe(error)) from error

    def cancel(self) -> None:
        call, self._open = self._open, None
        if call is not None:
            call.cancel()

    def _call(self) -> Call:
        if self._open is None:
            raise StreamEnded("the stream was cancelled")
        return self._open


class ServerStream(ByteStream):
    """The server's end.  It ends when the handler returns."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def agree(self) -> None:
        try:
            await self._context.send_initial_metadata(((_ACCEPTED, "1"),))
        except _BROKEN as error:
            raise StreamEnded(_describe(error)) from error

    async def read(self) -> bytes:
        try:
            message = await self._context.read()
        except _BROKEN as error:
            raise StreamEnded(_describe(error)) from error
        if isinstance(message, bytes):
            return message
        raise StreamEnded("the peer closed the stream")

    async def write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except _BROKEN as error:
            raise StreamEnded(_describe(error)) from error

    def cancel(self) -> None:
        """End the stream; the handler does it by returning."""


def call_frames(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> ClientStream:
    """Open the stream of frames to the server of ``channel``."""
    untyped: Any = channel  # the stubs support neither raw bytes nor the read/write form of a call
    frames = untyped.stream_stream(f"/{SERVICE}/{FRAMES_METHOD}")
    return ClientStream(frames(metadata=metadata))  # does not wait for a server that has gone


async def shake_hands(stream: ByteStream, handshake: Handshake) -> None:
    """Run the handshake over ``stream``, one message each.

    Raises ``AuthenticationError``, ``StreamEnded``.
    """
    await stream.agree()
    if handshake.opening:
        await stream.write(handshake.opening)
    while not handshake.is_complete:
        message = await stream.read()
        place = handshake.buffer()
        if len(message) != len(place):
            raise AuthenticationError(f"handshake: expected a message of {len(place)} bytes, got {len(message)}")
        place[:] = message
        answer = handshake.advance(len(message))
        if answer:
            await stream.write(answer)


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.INTERNAL:
        return "the peer ended the stream"  # the error of a write that comes too late
    if isinstance(error, grpc.aio.AioRpcError):
        return f"the stream broke: {error.code().name} {error.details() or ''}".rstrip()
    return f"the stream broke: {str(error) or type(error).__name__}"
