"""Limits on the connections of strangers to a listening socket of an event loop.

A stranger is a connection that has not proved anything.  It may stay for a few seconds; their number is limited, in
total and per address; and none takes one of the last descriptors of the process.  When there are too many, one of them
is closed at random.  If it were the oldest, a flood could keep out everybody whose request takes longer than the
flood's next ``limit`` connections; chosen at random, everybody has a chance at each try.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Generic, TypeVar, cast

from asyncpar.core.descriptors import accepted_at_once, descriptor_limit, is_reserved, places

MAX_STRANGERS: Final = 64
"""Most connections of strangers to one listener; fewer in a process with a low limit of descriptors."""

MAX_PER_ADDRESS: Final = 48
"""Most of them from one address, so that a flood from there leaves places for others."""

STRANGER_SECONDS: Final = 15.0
"""Seconds for which a stranger may stay."""

MOST_AT_ONCE: Final = 32
"""Most connections accepted in one turn of the loop, so that a flood does not starve the loop's other work."""

T = TypeVar("T")


def stranger_places() -> tuple[int, int]:
    """Return the limits of strangers' connections to one listener of this process: in total, and from one address."""
    total = places(MAX_STRANGERS, descriptor_limit())
    return total, min(total, MAX_PER_ADDRESS * total // MAX_STRANGERS)


def turn_backlog() -> int:
    """Return the backlog for a loop's listening socket, which accepts that many connections in one turn."""
    return accepted_at_once(MOST_AT_ONCE, descriptor_limit())


class PendingConnections(Generic[T]):
    """A bounded set of waiting connections, with the address of each."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._waiting: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._waiting))

    def enter(self, who: T, *, limit: int, address: str = "", per_address: int | None = None) -> T | None:
        """Add ``who``; return the one that must leave for it, None while there is room for ``limit``.

        One of the same ``address`` leaves if ``per_address`` wait from there, else one of the most frequent address.
        """
        crowds = Counter(self._waiting.values())
        pushed = None
        if per_address is not None and crowds[address] >= per_address:
            pushed = self._choose(address)
        elif len(self._waiting) >= limit:
            pushed = self._choose(crowds.most_common(1)[0][0])
        self._waiting[who] = address
        return pushed

    def leave(self, who: T) -> None:
        """Remove ``who``, which no longer waits, if it is there."""
        self._waiting.pop(who, None)

    def _choose(self, address: str) -> T:
        pushed = self._dice.choice([who for who, origin in self._waiting.items() if origin == address])
        del self._waiting[pushed]
        return pushed


class Doorkeeper:
    """Guards the protocols of a listening socket, and closes connections that exceed the limits."""

    def __init__(self, *, seconds: float = STRANGER_SECONDS, dice: random.Random | None = None) -> None:
        self.seconds = seconds
        self._strangers = PendingConnections[_Visit](dice or random.SystemRandom())
        self._visits: dict[asyncio.BaseTransport, _Visit] = {}
        self.refused = 0
        """Connections that were closed because of a limit."""

    @property
    def strangers(self) -> int:
        """Number of open connections that are not trusted."""
        return len(self._strangers)

    def before(self, make: Callable[[], asyncio.BaseProtocol]) -> Callable[[], asyncio.Protocol]:
        """Return a factory of protocols for a listening socket: they pass admitted connections to those of ``make``."""
        return lambda: _Visit(self, make)

    def trust(self, transport: asyncio.BaseTransport | None) -> None:
        """Exempt a connection that has proved itself from the limits of strangers."""
        visit = None if transport is None else self._visits.get(transport)
        if visit is not None:
            visit.is_trusted = True
            self._strangers.leave(visit)

    def admit(self, visit: _Visit, transport: asyncio.BaseTransport) -> bool:
        """Return whether a new connection may stay; close another one if that makes room."""
        sock = transport.get_extra_info("socket")
        if sock is None or is_reserved(sock.fileno()):
            self.refused += 1
            return False
        total, per_address = stranger_places()
        self._visits[transport] = visit
        pushed = self._strangers.enter(visit, limit=total, address=_origin(transport), per_address=per_address)
        if pushed is not None:
            self.turn_out(pushed)
        return True

    def turn_out(self, visit: _Visit) -> None:
        """Close the connection of a stranger."""
        self.refused += 1
        visit.abort()

    def forget(self, visit: _Visit, transport: asyncio.BaseTransport) -> None:
        """Forget a connection that is closed."""
        self._strangers.leave(visit)
        self._visits.pop(transport, None)


class _Visit(asyncio.Protocol):
    """One connection; ``make`` creates the protocol behind it if the connection is admitted."""

    def __init__(self, keeper: Doorkeeper, make: Callable[[], asyncio.BaseProtocol]) -> None:
        self._keeper = keeper
        self._make = make
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_trusted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        if not self._keeper.admit(self, transport):
            self.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self._keeper.seconds, self._expire)
        self._inner = cast(asyncio.Protocol, self._make())
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._keeper.forget(self, self._transport)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _expire(self) -> None:
        if not self.is_trusted:
            self._keeper.turn_out(self)


def _origin(transport: asyncio.BaseTransport) -> str:
    """Return the address of the peer; "" for a Unix socket."""
    peer = transport.get_extra_info("peername")
    return peer[0] if isinstance(peer, tuple) and peer else ""


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def serve_streams(
    serve: Serve,
    *,
    host: str | None = None,
    port: int = 0,
    listening: socket.socket | None = None,
    longest_line: int = 1 << 16,
    seconds: float = STRANGER_SECONDS,
) -> asyncio.Server:
    """Serve streams as ``asyncio.start_server`` does, at ``host`` and ``port`` or at the ``listening`` Unix socket.

    Every connection stays a stranger, and is closed after ``seconds``.  Raises ``OSError`` if the address cannot be
    bound.
    """
    loop = asyncio.get_running_loop()
    serving = set[asyncio.Task[None]]()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = loop.create_task(serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    def make() -> asyncio.BaseProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=longest_line, loop=loop), begin, loop=loop)

    greet = Doorkeeper(seconds=seconds).before(make)
    if listening is not None:
        return await loop.create_unix_server(greet, sock=listening, backlog=turn_backlog())
    return await loop.create_server(greet, host, port, backlog=turn_backlog())
