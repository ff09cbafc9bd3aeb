"""Closing of unauthenticated connections to this process's gRPC servers before they exhaust what peers need.

gRPC accepts connections itself and only limits their number: once strangers hold them all, no peer gets in, and data
that a stranger sends before its first call costs memory (an endless header block).  The sockets are descriptors of this
process, though.  A thread inspects them: those that lead to a port of ours and have made no call with the job's
token are unauthenticated, and ``stranger_limits.choose_evictions`` decides which of them to close.  Shutting a socket
down is enough; gRPC then ends the connection as if the peer had.

There is one thread for the process, as there is one table of descriptors, and it runs while there is a server.  It does
not depend on an event loop, so a flood during a long computation is bounded, too; but the time that a connection waits
counts only while its server's event loop takes calls and the process is not stopped, or peers would pass for strangers.
It needs no new descriptor, so it goes on when none is left.  Where descriptors cannot be listed (``/dev/fd`` does not
exist) there is no thread, and only gRPC's own limits apply.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterable

import msgspec

from asyncpar.core.addresses import place_of_peer, spell_host
from asyncpar.core.descriptors import SpareDescriptor, descriptor_limit, is_exhausted
from asyncpar.core.heap import give_back_free_memory
from asyncpar.net.transport.stranger_limits import Stranger, choose_evictions

CALM_SECONDS = 0.5
"""Seconds between two inspections while every connection is authenticated."""

BUSY_SECONDS = 0.05
"""Seconds between two inspections while some are not."""

FLOOD_SECONDS = 0.01
"""Seconds between two inspections while some send more than a peer does before its first call."""

_FLOOD_BYTES = 1 << 16
_TRIM_SECONDS = 0.5
_LAST_TRIM_SECONDS = 16.0
_DESCRIPTORS = "/dev/fd"
_MOST_TRIED = 1 << 16
_REPORT_SECONDS = 60.0
_BYTES_RECEIVED = struct.Struct("=128xQ")  # of struct tcp_info in linux/tcp.h
_TCP_INFO = getattr(socket, "TCP_INFO", None)

_log = logging.getLogger(__name__)

Peer = tuple[str, int]
"""Address and port of the other end of a connection; IPv4 addresses in IPv4 form even if IPv6 carries them."""


class _Connection(msgspec.Struct):
    port: int
    peer: Peer
    waited: float | None = None
    """Seconds in which it could have made a call; None before its first inspection."""


class ServerConnections:
    """The connections of one server, and which of them have made a call that the server, on ``loop``, accepted."""

    def __init__(self, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.port = port
        self._loop = loop
        self._has_answered = True
        self._accepted: dict[Peer, float] = {}
        self.open_strangers = 0
        """Unauthenticated connections at the last inspection."""
        self._evicted = 0
        self._reported_at = float("-inf")

    @property
    def evicted(self) -> int:
        """Number of connections closed because they had made no accepted call."""
        return self._evicted

    def accept(self, peer: str) -> None:
        """Note that a call of ``peer`` (gRPC's form: ``ipv4:127.0.0.1:4000``) was accepted.  Any thread."""
        place = parse_peer(peer)
        if place is not None:  # updated each time: it may be a new connection from the same place
            self._accepted[place] = time.monotonic()

    def takes_calls(self) -> bool:
        """Return whether the event loop has run since this was last called."""
        has_answered = self._has_answered
        if has_answered:
            self._has_answered = False
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # it is closed, and the server soon will be
                return False
        return has_answered

    def _answer(self) -> None:
        self._has_answered = True

    def is_accepted(self, peer: Peer) -> bool:
        """Return whether the connection from ``peer`` has made an accepted call."""
        return peer in self._accepted

    def forget_closed(self, live: set[Peer], *, before: float) -> None:
        """Forget peers accepted ``before`` that are no longer among the ``live`` connections."""
        for peer, since in tuple(self._accepted.items()):
            if since < before and peer not in live:
                del self._accepted[peer]

    def count_evicted(self, count: int, *, now: float) -> None:
        """Count closed connections, and log them once a minute."""
        self._evicted += count
        if now - self._reported_at >= _REPORT_SECONDS:
            self._reported_at = now
            _log.warning(
                "port %d: closed %d connections that had made no call with the job's token (%d in all; reported once a "
                "minute); somebody else on the network connects to it",
                self.port,
                count,
                self._evicted,
            )


class ConnectionWatch:
    """A thread that inspects the connections of registered servers as long as there is one."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._changed = threading.Condition()
        self._servers: dict[int, ServerConnections] = {}
        self._seen: dict[int, _Connection | None] = {}
        self._closing: set[int] = set()
        self._looked_at = float("-inf")
        self._heap = _Heap()
        self._spare: SpareDescriptor | None = None
        self._thread: threading.Thread | None = None

    def register(self, port: int) -> ServerConnections:
        """Start to watch the server at ``port`` of the running event loop, before it takes its first call."""
        server = ServerConnections(port, asyncio.get_running_loop())
        with self._changed:
            self._servers[port] = server
            self._seen.clear()  # sockets of this port may have been inspected before it was ours
            if os.path.isdir(_DESCRIPTORS) and (self._thread is None or not self._thread.is_alive()):
                self._spare = self._spare or SpareDescriptor()
                self._thread = threading.Thread(target=self._run, name="asyncpar connection watch", daemon=True)
                self._thread.start()
        return server

    def unregister(self, server: ServerConnections) -> None:
        """Stop watching ``server``; the thread ends with the last one."""
        with self._changed:
            if self._servers.get(server.port) is server:
                del self._servers[server.port]
            thread = None if self._servers else self._thread
            if thread is not None:
                self._thread = None
                self._changed.notify_all()
        if thread is not None:
            thread.join()
            self._release()

    def _release(self) -> None:
        """Close the spare descriptor, unless another server was registered meanwhile."""
        with self._changed:
            spare, self._spare = self._spare, None if self._thread is None else self._spare
        if spare is not None and spare is not self._spare:
            spare.close()

    @property
    def servers(self) -> int:
        """Number of watched servers."""
        return len(self._servers)

    def _run(self) -> None:
        with self._changed:
            while self._servers and self._thread is threading.current_thread():
                self._changed.wait(self._look(time.monotonic()))

    def _look(self, now: float) -> float:
        """Close excess connections; return the seconds until the next inspection."""
        descriptors = self._list()
        passed, self._looked_at = min(now - self._looked_at, 2 * CALM_SECONDS), now  # more: the process was stopped
        live: dict[int, dict[Peer, int]] = {port: {} for port in self._servers}
        for inode, descriptor in descriptors.items():
            if inode not in self._seen:
                self._seen[inode] = self._inspect(descriptor)
            connection = self._seen[inode]
            if connection is not None and connection.port in live:
                live[connection.port][connection.peer] = inode
        for inode in self._seen.keys() - descriptors.keys():
            del self._seen[inode]
        self._closing &= descriptors.keys()
        is_busy, is_flood = False, False
        for port, server in self._servers.items():
            server.forget_closed(set(live[port]), before=now)
            waiting = {peer: inode for peer, inode in live[port].items() if not server.is_accepted(peer)}
            server.open_strangers = len(waiting)
            is_busy |= bool(waiting)
            is_flood |= self._evict(server, waiting, descriptors, now, passed) > _FLOOD_BYTES
        self._heap.look(is_flood=is_flood, now=now)
        return FLOOD_SECONDS if is_flood else BUSY_SECONDS if is_busy else CALM_SECONDS

    def _list(self) -> dict[int, int]:
        """Return one descriptor of each open socket of this process, by inode."""
        sockets = {}
        for descriptor in _open_descriptors():
            try:
                status = os.fstat(descriptor)
            except OSError:  # it is closed
                continue
            if stat.S_ISSOCK(status.st_mode):
                sockets[status.st_ino] = descriptor
        return sockets

    def _duplicate(self, descriptor: int) -> _Duplicate:
        assert self._spare is not None, "the thread starts with it"
        return _Duplicate(self._spare, descriptor)

    def _inspect(self, descriptor: int) -> _Connection | None:
        """Return the connection behind ``descriptor`` if it leads to a server of ours."""
        with self._duplicate(descriptor) as sock:
            if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            try:
                port = sock.getsockname()[1]
                if port not in self._servers:
                    return None
                return _Connection(port, _place(sock.getpeername()))
            except OSError:  # it listens, or is closed already
                return None

    def _evict(
        self,
        server: ServerConnections,
        waiting: dict[Peer, int],
        descriptors: dict[int, int],
        now: float,
        passed: float,
    ) -> int:
        """Close the excess of ``waiting``; return the number of bytes that all of them have sent."""
        strangers = []
        counted = passed if waiting and server.takes_calls() else 0.0
        for peer, inode in waiting.items():
            connection = self._seen[inode]
            assert connection is not None
            with self._duplicate(descriptors[inode]) as sock:
                received = 0 if sock is None else _bytes_received(sock)
            strangers.append(Stranger(peer=peer, seconds=connection.waited or 0.0, received=received))
            connection.waited = 0.0 if connection.waited is None else connection.waited + counted
        # its first call may have been accepted meanwhile: a peer may then send as much as it likes
        evicted = [peer for peer in choose_evictions(strangers, self._dice) if not server.is_accepted(peer)]
        fresh = [peer for peer in evicted if waiting[peer] not in self._closing]
        if fresh:
            server.count_evicted(len(fresh), now=now)
        for peer in evicted:
            self._closing.add(waiting[peer])
            with self._duplicate(descriptors[waiting[peer]]) as sock:
                if sock is not None:
                    _end(sock, peer)
        return sum(stranger.received for stranger in strangers)


class _Heap:
    """Releases memory after floods: the allocator of the C library keeps memory that many threads have freed.

    gRPC frees it during a flood and for seconds after its end, so the last trims come at growing intervals.
    """

    def __init__(self) -> None:
        self._pause = float("inf")
        self._trimmed_at = float("-inf")

    def look(self, *, is_flood: bool, now: float) -> None:
        """Note whether there is a flood now; trim at intervals during one, and a few times after it."""
        if is_flood:
            self._pause = _TRIM_SECONDS
        if self._pause <= _LAST_TRIM_SECONDS and now >= self._trimmed_at + self._pause:
            give_back_free_memory()
            self._trimmed_at = now
            if not is_flood:
                self._pause *= 2


def _end(sock: socket.socket, peer: Peer) -> None:
    """Shut down the connection to ``peer``; gRPC detects its end and closes it."""
    try:
        if _place(sock.getpeername()) == peer:  # the descriptor may be another's by now
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed meanwhile
        return


def _open_descriptors() -> Iterable[int]:
    """Return the open descriptors of this process, or all that may be open if it can open no more."""
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError as error:
        if not is_exhausted(error):
            raise
    return range(min(descriptor_limit(), _MOST_TRIED))


class _Duplicate:
    """A socket object for a duplicate of a descriptor inside ``with``; None if it is closed or not a socket."""

    def __init__(self, spare: SpareDescriptor, descriptor: int) -> None:
        self._spare = spare
        self._descriptor = descriptor
        self._socket: socket.socket | None = None

    def __enter__(self) -> socket.socket | None:
        try:
            copy = self._spare.lend(self._descriptor)
        except OSError:
            return None
        try:
            self._socket = socket.socket(fileno=copy)
        except OSError:
            self._spare.take_back()
        return self._socket

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.detach()
            self._spare.take_back()


def _bytes_received(sock: socket.socket) -> int:
    """Return the number of bytes that the peer has sent; 0 if the system does not report it."""
    if _TCP_INFO is None:
        return 0
    try:
        status = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED.size)
    except OSError:
        return 0
    return int(_BYTES_RECEIVED.unpack(status)[0]) if len(status) == _BYTES_RECEIVED.size else 0


def parse_peer(peer: str) -> Peer | None:
    """Return the address and port of gRPC's ``peer``; None if it is not an internet address."""
    place = place_of_peer(peer)
    return None if place is None else _place(place)


def _place(name: tuple[str, int] | tuple[str, int, int, int]) -> Peer:
    """Return address and port in canonical form, however the system spells them."""
    return spell_host(name[0].partition("%")[0]), name[1]


WATCH = ConnectionWatch(random.SystemRandom())
"""The watch of this process."""
