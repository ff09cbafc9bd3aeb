"""Socket options, and the distinction of a dead peer from a busy one.

An idle connection is watched by keepalive probes.  One with unacknowledged bytes could be watched by TCP_USER_TIMEOUT,
but that also kills a connection whose peer acknowledges every probe and merely has not read for a while: a rank that
computes.  So ``Pulse`` checks when the kernel last received an acknowledgement, and declares a peer dead only if the
kernel is probing and gets no answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable

from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.net.transport.lane import CarriedBytes

KEEPALIVE_OPTIONS = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1))
"""One second idle, then a probe per second, until the link's timeout has passed."""

PULSE_SECONDS = 1.0

_OUTGOING = struct.Struct("i")
_log = logging.getLogger(__name__)

_TCP_INFO_BYTES = 60
_LEAST_ROUND_TRIP = struct.Struct("=148xI")  # tcpi_min_rtt of struct tcp_info in linux/tcp.h
_DELIVERY = struct.Struct("=7xB112xQ40xQQ")
"""tcpi_delivery_rate_app_limited (the lowest bit), tcpi_bytes_acked, tcpi_busy_time, tcpi_rwnd_limited."""

_RETRANSMITS = struct.Struct("<xxBB")
_LAST_ACK = struct.Struct("<56xI")


BACKLOG = 4096
"""Most connections that may wait to be accepted, as far as ``net.core.somaxconn`` allows.

In a flood a peer waits in this queue, and has shown the secret by the time it is accepted; with a short queue, the
kernel would turn the peer away, to try again after one, two and four seconds.
"""

UNIX_SEND_BYTES = 4 * 1024 * 1024
"""Capacity of a Unix socket: with the default of 208 KiB the two ends take turns."""


def lengthen_queue(server: asyncio.Server) -> None:
    """Let ``BACKLOG`` connections wait at the sockets of ``server``; its loop still accepts its own backlog at once."""
    for sock in server.sockets:
        with socket.socket(fileno=os.dup(sock.fileno())) as duplicate:
            duplicate.listen(BACKLOG)


def tune_tcp(sock: socket.socket, link_timeout: float = LINK_SECONDS) -> None:
    """Make a socket send small frames at once, and detect a dead peer while idle within ``link_timeout`` seconds.

    Buffer sizes are left to the kernel, which grows them as needed; fixing them would disable that.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*KEEPALIVE_OPTIONS, ("TCP_KEEPCNT", max(1, round(link_timeout) - 1))):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if sock.getpeername()[0] == sock.getsockname()[0]:
        _forgo_pacing(sock)


def _forgo_pacing(sock: socket.socket) -> None:
    """Turn off pacing (BBR's, where that is the default): inside a host nothing is lost and no path is shared.

    Reno is the one congestion control that every Linux has and lets every process choose.
    """
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is not None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, option, b"reno")
        except OSError as error:
            _log.debug("the congestion control of a connection inside this host stays as it is: %s", error)


def tune_unix(sock: socket.socket) -> None:
    """Let a Unix socket hold enough for both ends to work at once, as far as ``net.core.wmem_max`` allows."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BYTES)


def read_tcp_info(sock: socket.socket) -> bytes:
    """Return the kernel's ``struct tcp_info`` (Linux), empty if there is none."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return b""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO_BYTES)
    except OSError:
        return b""


def read_round_trip(sock: socket.socket) -> float | None:
    """Return the shortest round trip that the kernel has recently seen on a TCP connection, in seconds (Linux).

    None if there is none: Unix sockets, other systems, connections that have sent nothing.
    """
    option = getattr(socket, "TCP_INFO", None)
    if option is None or sock.family == socket.AF_UNIX:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, option, _LEAST_ROUND_TRIP.size)
    except OSError:
        return None
    micros = int(_LEAST_ROUND_TRIP.unpack(info)[0]) if len(info) == _LEAST_ROUND_TRIP.size else 0
    return None if micros in (0, 0xFFFFFFFF) else micros * 1e-6


def read_delivery(sock: socket.socket) -> CarriedBytes | None:
    """Return the traffic of a TCP connection so far.

    The kernel (Linux) keeps the time in which bytes were in transit, separate from that in which the peer's window was
    shut; the rate of its last few segments, which it keeps as well, is far off where processors are shared.  None where
    nothing is known, as for ``read_round_trip``.
    """
    option = getattr(socket, "TCP_INFO", None)
    if option is None or sock.family == socket.AF_UNIX:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, option, _DELIVERY.size)
    except OSError:
        return None
    if len(info) != _DELIVERY.size:
        return None
    flags, nbytes, busy, shut = _DELIVERY.unpack(info)
    return CarriedBytes(nbytes, (busy - shut) * 1e-6, not flags & 1) if busy else None


def count_unacknowledged(sock: socket.socket) -> int:
    """Return the number of bytes of ``sock`` that the peer's kernel has not acknowledged (Linux); 0 if unknown."""
    if sys.platform != "linux":
        return 0
    import fcntl  # not every system that imports this module has them
    import termios

    answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_OUTGOING.size))  # for sockets it is SIOCOUTQ
    return int(_OUTGOING.unpack(answer)[0])


class Pulse:
    """Decides whether the peer's host is dead; call it once every ``PULSE_SECONDS``.

    ``is_silent`` is true if the kernel was repeating itself (retransmissions, probes of a closed window) at two checks
    in a row, and no acknowledgement came for ``link_timeout`` less half a second before the second.
    """

    def __init__(self, read: Callable[[], bytes], link_timeout: float = LINK_SECONDS) -> None:
        self._seconds = link_timeout - PULSE_SECONDS / 2
        self._read = read
        self._was_asking = False

    def is_silent(self) -> bool:
        """Check once."""
        state = self._read()
        if len(state) < _TCP_INFO_BYTES:
            return False
        retransmits, probes = _RETRANSMITS.unpack_from(state)
        silent_for = _LAST_ACK.unpack_from(state)[0] / 1000
        is_asking = retransmits + probes > 0
        was_asking, self._was_asking = self._was_asking, is_asking
        return was_asking and is_asking and silent_for >= self._seconds
