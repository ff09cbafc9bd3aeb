"""Bound the connections of strangers to a listening socket of an event loop.

A stranger is a connection that has not proved anything.  It may stay for a few seconds; only so many may be there, in
all and from one address; and none takes one of the last descriptors of the process.  When there are too many, one
leaves, and chance says who.  If it were the oldest, a flood could keep out everybody who needs longer for a request
than the flood for its next ``limit`` connections; so everybody has a chance, at each try.
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
"""Most connections of strangers to one listener; fewer in a process that may have few descriptors."""

MAX_PER_ADDRESS: Final = 48
"""Most of them from one address, so that a flood from there leaves some places for everybody else."""

STRANGER_SECONDS: Final = 15.0
"""How long a stranger may stay."""

MOST_AT_ONCE: Final = 32
"""Most connections that are accepted in one turn of the loop, so that a flood does not keep it from everything else."""

T = TypeVar("T")


def stranger_places() -> tuple[int, int]:
    """Return the most connections of strangers to one listener of this process, and the most from one address."""
    total = places(MAX_STRANGERS, descriptor_limit())
    return total, min(total, MAX_PER_ADDRESS * total // MAX_STRANGERS)


def turn_backlog() -> int:
    """Return the backlog for a listening socket of a loop, which accepts as many connections in one turn."""
    return accepted_at_once(MOST_AT_ONCE, descriptor_limit())


class PendingConnections(Generic[T]):
    """A bounded set of those who wait, by the address from which they came."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._waiting: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._waiting))

    def enter(self, who: T, *, limit: int, address: str = "", per_address: int | None = None) -> T | None:
        """Let ``who`` wait; return who must leave for it, None while there is room for ``limit``.

        One of the same ``address`` leaves if ``per_address`` wait from there, else one of the address with most.
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
        """Remove ``who``, which does not wait any more, if it ever did."""
        self._waiting.pop(who, None)

    def _choose(self, address: str) -> T:
        pushed = self._dice.choice([who for who, origin in self._waiting.items() if origin == address])
        del self._waiting[pushed]
        return pushed


class Doorkeeper:
    """Stands before the protocols of a listening socket, and closes connections that the limits do not allow."""

    def __init__(self, *, seconds: float = STRANGER_SECONDS, dice: random.Random | None = None) -> None:
        self.seconds = seconds
        self._strangers = PendingConnections[_Visit](dice or random.SystemRandom())
        self._visits: dict[asyncio.BaseTransport, _Visit] = {}
        self.refused = 0
        """Connections that were closed because of a limit."""

    @property
    def strangers(self) -> int:
        """Open connections that were not trusted."""
        return len(self._strangers)

    def before(self, make: Callable[[], asyncio.BaseProtocol]) -> Callable[[], asyncio.Protocol]:
        """Return a factory of protocols, for a listening socket, that pass what is allowed on to those of ``make``."""
        return lambda: _Visit(self, make)

    def trust(self, transport: asyncio.BaseTransport | None) -> None:
        """Let a connection stay that has shown that it may; no limit of strangers applies to it any more."""
        visit = None if transport is None else self._visits.get(transport)
        if visit is not None:
            visit.is_trusted = True
            self._strangers.leave(visit)

    def admit(self, visit: _Visit, transport: asyncio.BaseTransport) -> bool:
        """Return whether a fresh connection may stay; closes another one if that makes room."""
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
    """One connection; ``make`` gives the protocol behind it if the connection is admitted."""

    def __init__(self, keeper: Doorkeeper, make: Callable[[], asyncio.BaseProtocol]) -> None:
        self._keeper = keeper
        self._make = make
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_trusted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # what uvloop passes is none by inheritance
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

    Every connection is a stranger to the end, which comes after ``seconds``.  Raises ``OSError`` where the
    address cannot be bound.
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
