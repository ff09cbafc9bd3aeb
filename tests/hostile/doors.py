"""Listening doors of a node, for strangers to knock at."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asyncpar.errors import PeerLost
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connect import TCP, UNIX, TcpListener, UnixListener, dial_tcp, dial_unix
from asyncpar.net.transport.handshaking import Porter
from asyncpar.net.transport.stream import StreamLane
from asyncpar.net.wire.handshake import LinkTerms
from tests.net.transport.pairs import SECRET, TERMS

OVER = PeerLost("the test is over", cause="the test is over")
Find = Callable[[bytes], LinkTerms | None]


def find_agreed(token: bytes) -> LinkTerms | None:
    """Return what was agreed under ``token``: there is one agreement."""
    return TERMS if token == TERMS.token else None


@dataclass
class Door:
    """A listener of kind ``tcp`` or ``unix``, the lanes that came in, and the reasons why others did not."""

    kind: str
    listener: TcpListener | UnixListener
    porter: Porter
    lanes: asyncio.Queue[StreamLane]
    refused: list[Exception]

    def knock(self) -> socket.socket:
        """Return a socket that is being connected, and does not block."""
        sock = socket.socket(socket.AF_INET if isinstance(self.listener, TcpListener) else socket.AF_UNIX)
        sock.setblocking(False)
        try:
            if isinstance(self.listener, TcpListener):
                sock.connect(("127.0.0.1", self.listener.port))
            else:
                sock.connect(b"\0" + self.listener.name.encode())
        except BlockingIOError:
            pass
        return sock

    async def dial(self, terms: LinkTerms = TERMS, secret: bytes = SECRET) -> StreamLane:
        """Come in as a peer does."""
        if isinstance(self.listener, TcpListener):
            return await dial_tcp("127.0.0.1", self.listener.port, terms, secret=secret, busy_poll=BusyPoll())
        return await dial_unix(self.listener.name, terms, secret=secret, busy_poll=BusyPoll())

    async def let_in(self) -> None:
        """A peer with secret and agreement gets in, now."""
        async with asyncio.timeout(30):
            one = await self.dial()
            other = await self.lanes.get()
        one.abort(OVER)
        other.abort(OVER)


@asynccontextmanager
async def open_door(kind: str, *, secret: bytes = SECRET, find_terms: Find = find_agreed) -> AsyncIterator[Door]:
    """Listen as a node does."""
    lanes: asyncio.Queue[StreamLane] = asyncio.Queue()
    refused: list[Exception] = []
    porter = Porter(
        TCP if kind == "tcp" else UNIX,
        secret=secret,
        busy_poll=BusyPoll(),
        find_terms=find_terms,
        on_lane=lambda _, lane: lanes.put_nowait(lane),
        on_refused=refused.append,
        dice=random.Random(3),
    )
    listener = TcpListener(porter, bind="127.0.0.1") if kind == "tcp" else UnixListener(porter)
    await listener.start()
    try:
        yield Door(kind, listener, porter, lanes, refused)
    finally:
        await listener.stop()
        while not lanes.empty():
            lanes.get_nowait().abort(OVER)
        for _ in range(10):
            await asyncio.sleep(0)  # what was accepted last becomes a transport, and closes, in callbacks


async def say(sock: socket.socket, content: bytes) -> None:
    """Send ``content``, or as much of it as the other side takes before it closes."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await asyncio.get_running_loop().sock_sendall(sock, content)


async def read_all(sock: socket.socket) -> bytes:
    """Return all that the other side says until it closes."""
    loop = asyncio.get_running_loop()
    said = b""
    async with asyncio.timeout(30):
        try:
            while part := await loop.sock_recv(sock, 65536):
                said += part
        except ConnectionResetError:
            pass
    return said
