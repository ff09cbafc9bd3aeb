"""The registry of lanes between processes, and the lanes that come with asyncpar: shm, tcp, grpc.

``register_lane`` makes a kind of lane known in this process, which uses it with all ranks that know it, too.
"""

from __future__ import annotations

import asyncio
import importlib
import os

from asyncpar.core.addresses import join_address
from asyncpar.core.config.registry import Registry
from asyncpar.core.config.transport import LaneCosts, split_lane_reference
from asyncpar.errors import PeerLost, UsageError
from asyncpar.net.transport.connect import (
    UNIX,
    TcpListener,
    UnixListener,
    dial_tcp,
    dial_unix,
    has_abstract_sockets,
    tcp_medium,
)
from asyncpar.net.transport.grpc_lane import GrpcLane
from asyncpar.net.transport.grpc_stream import StreamEnded, call_frames, shake_hands
from asyncpar.net.transport.handshaking import PEER_SECONDS, Medium, Porter
from asyncpar.net.transport.lane_kind import LaneDial, LaneGate, LaneKind
from asyncpar.net.transport.protection import Protection
from asyncpar.net.transport.rpc import open_channel
from asyncpar.net.transport.stream import StreamLane
from asyncpar.net.wire.handshake import NONCE_BYTES, Handshake

_LARGEST_PORT = 65_535
_PORT_DIGITS = 5


def register_lane(kind: LaneKind) -> None:
    """Register ``kind`` under its name.  Raises ``UsageError`` for a name that is taken."""
    LANES.register(kind)


def unregister_lane(name: str) -> None:
    """Unregister the lane called ``name``.  Raises ``UsageError`` if there is none."""
    LANES.unregister(name)


def parse_transport(name: str | None, *, besides: tuple[str, ...] = ()) -> str | None:
    """Return the name of the lane kind ``name``; None for None and the empty string: choose the best.

    ``package.module:NAME`` imports the module and registers its ``LaneKind`` called NAME.  ``besides`` are other names
    that the caller knows.  Raises ``UsageError`` for an unknown name.
    """
    if not name:
        return None
    reference = split_lane_reference(name)
    if reference is not None:
        return _register_from(*reference)
    known = (*besides, *LANES.names)
    if name not in known:
        raise UsageError(
            f"transport: expected one of {', '.join(known)}, got {name!r}; package.module:NAME names any other LaneKind"
        )
    return name


def _register_from(module: str, name: str) -> str:
    """Register the ``LaneKind`` called ``name`` in ``module``, once, and return its own name."""
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise UsageError(
            f"transport: {module}:{name} cannot be imported ({error}); put its folder on PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise UsageError(f"transport: {module}:{name}: the module has no {name}") from error
    if not isinstance(kind, LaneKind):
        raise UsageError(f"transport: {module}:{name}: expected a LaneKind, got {type(kind).__name__}")
    if LANES.get(kind.name) is not kind:
        register_lane(kind)
    return kind.name


def lane_kind(name: str) -> LaneKind:
    """Return the kind called ``name``.  Raises ``UsageError`` if it is unknown."""
    kind = LANES.get(name)
    if kind is None:
        raise UsageError(f"lane: expected one of {', '.join(LANES.names)}, got {name!r}")
    return kind


def usable_lanes(pinned: str | None) -> tuple[str, ...]:
    """Return the names of usable kinds, best first.  Raises ``UsageError`` if a pinned one cannot be used here."""
    if pinned is not None:
        absence = lane_kind(pinned).absence()
        if absence:
            raise UsageError(f"transport: {pinned} is pinned, but {absence}; pin another one, or nothing")
        return (pinned,)
    there = [kind for kind in LANES if not kind.absence()]
    return tuple(kind.name for kind in sorted(there, key=lambda kind: kind.costs.latency))


# -- shm -------------------------------------------------------------------------------------------------------------


async def _dial_shm(dial: LaneDial) -> StreamLane:
    return await dial_unix(dial.place, dial.terms, secret=dial.secret, busy_poll=dial.busy_poll)


def _explain_shm(_dial: LaneDial, error: OSError, why: str) -> str:
    if isinstance(error, ConnectionRefusedError):
        why += ": it has ended, or is in another container or network namespace"
    return f"no Unix-socket connection, although it is on the same host ({why})"


def _porter(gate: LaneGate, medium: Medium) -> Porter:
    return Porter(
        medium,
        secret=gate.secret,
        busy_poll=gate.busy_poll,
        find_terms=gate.find_terms,
        on_lane=gate.on_lane,
        on_refused=gate.on_refused,
    )


SHM = LaneKind(
    name="shm",
    title="Unix sockets",
    costs=LaneCosts(latency=25e-6, bandwidth=2.5e9),
    dial=_dial_shm,
    listen=lambda gate: UnixListener(_porter(gate, UNIX)),
    is_local=True,
    shares_memory=True,
    absence=lambda: "" if has_abstract_sockets() else "it exists on Linux only",
    attempt=_explain_shm,
)
"""Joins ranks of one host: a Unix socket, and shared memory."""


# -- tcp -------------------------------------------------------------------------------------------------------------


async def _dial_tcp(dial: LaneDial) -> StreamLane:
    if not _is_port(dial.place):
        cause = "it accepted, but no lane"
        raise PeerLost(f"rank {dial.terms.listener}: {cause}", rank=dial.terms.listener, cause=cause)
    return await dial_tcp(
        dial.host,
        int(dial.place),
        dial.terms,
        secret=dial.secret,
        busy_poll=dial.busy_poll,
        medium=tcp_medium(dial.link_timeout),
    )


def _is_port(text: str) -> bool:
    is_number = text.isascii() and text.isdecimal() and len(text) <= _PORT_DIGITS
    return is_number and int(text) <= _LARGEST_PORT


TCP = LaneKind(
    name="tcp",
    title="TCP",
    costs=LaneCosts(latency=30e-6, bandwidth=2e9),
    dial=_dial_tcp,
    listen=lambda gate: TcpListener(_porter(gate, tcp_medium(gate.link_timeout)), bind=gate.bind),
    is_striped=True,
    attempt=lambda dial, _error, why: f"no TCP connection to {join_address(dial.host, int(dial.place))} ({why})",
)


# -- grpc ------------------------------------------------------------------------------------------------------------


async def _dial_grpc(dial: LaneDial) -> GrpcLane:
    """Open a stream on a channel of its own: streams of one channel would share its TCP connection.

    The token is passed with the call, because interceptors slow streams down.
    """
    credentials, rank = dial.credentials, dial.terms.listener
    role = None if credentials is None else credentials.role_of(rank)
    channel = open_channel(dial.server, credentials, peer=role, adds_token=False, link_timeout=dial.link_timeout)
    stream = call_frames(channel, () if credentials is None else credentials.metadata())
    handshake = Handshake.dial(dial.terms, secret=dial.secret, nonce=os.urandom(NONCE_BYTES))
    is_done = False
    try:
        async with asyncio.timeout(PEER_SECONDS):
            await shake_hands(stream, handshake)
        is_done = True
    except (StreamEnded, TimeoutError) as error:
        cause = str(error) or "it did not finish the handshake in time"
        raise PeerLost(f"rank {rank}: {cause}", rank=rank, cause=cause) from error
    finally:
        if not is_done:
            stream.cancel()
            await channel.close(None)
    is_encrypted = credentials is not None and credentials.certificates is not None
    lane = GrpcLane(stream, Protection(handshake, may_damage=not is_encrypted), link_timeout=dial.link_timeout)
    dial.carry(lane, channel)
    return lane


GRPC = LaneKind(
    name="grpc",
    title="the slower gRPC stream",
    costs=LaneCosts(latency=140e-6, bandwidth=0.65e9),
    dial=_dial_grpc,
    listen=None,
    is_encrypted=True,
    is_striped=True,
)

LANES: Registry[LaneKind] = Registry("lane", (SHM, TCP, GRPC), reserved=("inproc",))
"""The kinds of lanes by name; ``with LANES.registered(kind):`` adds one temporarily."""
