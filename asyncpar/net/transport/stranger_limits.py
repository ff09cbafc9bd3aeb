"""Limits on unauthenticated connections to a gRPC server."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import msgspec

from asyncpar.core.descriptors import spare_descriptors

HANDSHAKE_SECONDS: Final = 5.0
"""Seconds within which a connection must become one of HTTP/2, TLS included; gRPC alone would wait two minutes."""

IDLE_SECONDS: Final = 60.0
"""Seconds for which a connection may stay without a call; our channels reconnect when they need to."""

STREAMS: Final = 1024
"""Most calls at once over one connection; our channels let further ones wait."""

MAX_STRANGERS: Final = 64
"""Most connections of one server that have made no accepted call; beyond that, some of them are closed."""

STRANGER_SECONDS: Final = 15.0
"""Seconds for which a connection may stay without an accepted call."""

STRANGER_BYTES: Final = 1 << 20
"""Most bytes that may arrive over a connection before its first accepted call."""

STRANGERS_BYTES: Final = 1 << 20
"""Most bytes that may have arrived over all such connections to one server; beyond that, the largest are closed."""

MAX_PER_ADDRESS: Final = 48
"""Most of them from one address, so that a flood from there leaves places for others."""

LEAST_CONNECTIONS: Final = 8
_MOST_HALVINGS: Final = 3


def server_limits(descriptors: int, others: int = 0) -> list[tuple[str, int]]:
    """Return the options of a gRPC server in a process with a limit of ``descriptors``.

    The first server may use half of those that the process does not need for itself; one that starts beside ``others``
    half as many as the one before it, so that floods of all of them leave enough for everything else.
    """
    connections = max(LEAST_CONNECTIONS, spare_descriptors(descriptors) >> min(others + 1, _MOST_HALVINGS))
    return [
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1000)),
        ("grpc.max_concurrent_streams", STREAMS),
        ("grpc.max_allowed_incoming_connections", min(connections, 1 << 30)),
    ]


class Stranger(msgspec.Struct, frozen=True, kw_only=True):
    """A connection without an accepted call: its peer, its age in ``seconds``, and the bytes ``received`` so far."""

    peer: tuple[str, int]
    seconds: float
    received: int


def choose_evictions(strangers: Iterable[Stranger], dice: random.Random) -> list[tuple[str, int]]:
    """Return the peers whose connections are to be closed.

    These are the ones that stayed too long or sent too much, alone or together; some of an address that has more than
    ``MAX_PER_ADDRESS``; and while more than ``MAX_STRANGERS`` are left, one of the address with the most.  They are
    chosen at random.  So a flood from one address pushes out none from another, and a peer that shares the address of a
    flood gets in after a few tries.
    """
    evicted, crowds, left, received = [], defaultdict[str, list[tuple[str, int]]](list), 0, 0
    for stranger in sorted(strangers, key=lambda stranger: stranger.received):
        received += stranger.received
        is_late = stranger.seconds > STRANGER_SECONDS
        if is_late or stranger.received > STRANGER_BYTES or received > STRANGERS_BYTES:
            evicted.append(stranger.peer)
        else:
            crowds[stranger.peer[0]].append(stranger.peer)
            left += 1
    for crowd in crowds.values():
        dice.shuffle(crowd)
        left -= max(0, len(crowd) - MAX_PER_ADDRESS)
        evicted += crowd[MAX_PER_ADDRESS:]
        del crowd[MAX_PER_ADDRESS:]
    while left > MAX_STRANGERS:
        evicted.append(max(crowds.values(), key=len).pop())
        left -= 1
    return evicted
