"""Messages with descriptors between processes of one host, over a Unix socket that preserves message boundaries."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from asyncpar.errors import AuthenticationError, ProtocolError
from asyncpar.net.arena.formation_machine import MAX_MESSAGE_BYTES, Message, decode_message, encode_message
from asyncpar.net.wire.handshake import Handshake

MAX_DESCRIPTORS = 253
"""Most descriptors in one message (SCM_MAX_FD)."""

RETRY_SECONDS = 0.01
"""Seconds to wait if too many descriptors are in flight on this host."""

_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR_BYTES = array.array("i").itemsize


def open_socket() -> socket.socket:
    """Return a new socket whose messages arrive whole, in order, or not at all (SOCK_SEQPACKET, unix(7))."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def check_user(sock: socket.socket) -> None:
    """Raise ``AuthenticationError`` unless the process at the other end runs as the same user (SO_PEERCRED)."""
    shown = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(shown)
    if user != os.geteuid():
        raise AuthenticationError(f"arena: expected a process of user {os.geteuid()}, got one of user {user}")


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


class PacketSocket:
    """One end of a connection; owns ``sock``, which must not block.  One reader and one writer at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def shake_hands(self, handshake: Handshake) -> None:
        """Prove that both ends hold the secret, before anything else is read.

        Raises ``AuthenticationError`` if the peer does not, ``OSError`` if the connection ends.
        """
        if handshake.opening:
            await self._send(handshake.opening, [])
        while not handshake.is_complete:
            count = await self._receive_into(handshake.buffer())
            if count == 0:
                raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection during the handshake")
            answer = handshake.advance(count)
            if answer:
                await self._send(answer, [])

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message; the peer gets duplicates of ``descriptors``.  Raises ``OSError`` when the connection ends."""
        await self._send(encode_message(message), descriptors)

    def send_now(self, message: Message) -> None:
        """Send a small message if the connection takes it at once; a peer that is gone does not need it."""
        try:
            self._socket.send(encode_message(message))
        except OSError:
            return

    async def receive(self) -> tuple[Message, list[int]]:
        """Return the next message and its descriptors, which belong to the caller.

        Raises ``ConnectionResetError`` at the end of the connection, ``ProtocolError`` for an invalid message.
        """
        content, descriptors, is_whole = await self._receive()
        try:
            if not is_whole:
                raise ProtocolError("arena: a message, or its descriptors, did not arrive whole")
            if not content:
                raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
            return decode_message(content), descriptors
        except BaseException:
            close_all(descriptors)
            raise

    def close(self) -> None:
        """Close the connection.  Idempotent."""
        self._socket.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _send(self, content: bytes, descriptors: Sequence[int]) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        while True:
            try:
                self._socket.sendmsg([content], ancillary)
                return
            except BlockingIOError:
                await wait_writable(self._socket)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                await asyncio.sleep(RETRY_SECONDS)  # until others have taken theirs

    async def _receive_into(self, buffer: memoryview) -> int:
        while True:
            try:
                return self._socket.recv_into(buffer)  # the kernel closes descriptors that come along
            except BlockingIOError:
                await wait_readable(self._socket)

    async def _receive(self) -> tuple[bytes, list[int], bool]:
        """Return content, descriptors, and whether both are complete."""
        was_reset = False
        while True:
            try:
                content, ancillary, flags, _ = self._socket.recvmsg(
                    MAX_MESSAGE_BYTES,
                    socket.CMSG_SPACE(MAX_DESCRIPTORS * _DESCRIPTOR_BYTES),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                await wait_readable(self._socket)
            except ConnectionResetError:
                if was_reset:
                    raise
                was_reset = True  # the peer closed without reading all; its earlier messages still wait here
            else:
                descriptors = array.array("i")
                for _, _, part in ancillary:
                    descriptors.frombytes(part[: len(part) // _DESCRIPTOR_BYTES * _DESCRIPTOR_BYTES])
                return content, list(descriptors), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)


async def wait_readable(sock: socket.socket) -> None:
    """Wait until reading from ``sock`` does not block."""
    loop = asyncio.get_running_loop()
    await _wait(sock, loop.add_reader, loop.remove_reader)


async def wait_writable(sock: socket.socket) -> None:
    """Wait until writing to ``sock`` does not block."""
    loop = asyncio.get_running_loop()
    await _wait(sock, loop.add_writer, loop.remove_writer)


async def _wait(sock: socket.socket, add: Callable[..., object], remove: Callable[[Any], object]) -> None:
    is_ready = asyncio.Event()
    add(sock, is_ready.set)
    try:
        await is_ready.wait()
    finally:
        remove(sock)
