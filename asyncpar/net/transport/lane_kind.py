"""A kind of lane: its name, its costs, and the functions that dial and accept a lane of it.

``lane_kinds`` has the registry.  Two ranks first agree by gRPC on the kinds that both can use (see ``negotiation``).
The accepting side then waits at its listeners, and the dialing side tries the kinds in turn.  Both prove to each other
that they hold the secret (``wire.handshake``) before a lane is handed over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio

from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import UsageError
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.grpc_lane import GrpcLane
from asyncpar.net.transport.lane import Lane
from asyncpar.net.transport.rpc import Credentials
from asyncpar.net.wire.handshake import LinkTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDial:
    """One lane, or one connection of a lane, to be dialed.

    ``host`` and ``server`` (``host:port``) are the peer's, as reached from this rank.  ``place`` is the address claimed
    by the peer's listener of this kind, not trusted; empty if it has none.  ``terms`` are proved in the handshake.
    ``carry`` runs a gRPC lane as long as it lives and closes its channel then.
    """

    host: str
    server: str
    place: str
    terms: LinkTerms
    secret: bytes
    credentials: Credentials | None
    busy_poll: BusyPoll
    link_timeout: float
    carry: Callable[[GrpcLane, grpc.aio.Channel], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneGate:
    """The settings and callbacks of a listener.

    ``bind`` is the address to listen at.  ``find_terms`` returns the terms agreed on under a token; ``on_lane``
    receives each lane whose peer is authenticated, and ``on_refused`` the error of any other.
    """

    bind: str
    secret: bytes
    busy_poll: BusyPoll
    link_timeout: float
    find_terms: Callable[[bytes], LinkTerms | None]
    on_lane: Callable[[LinkTerms, Lane], None]
    on_refused: Callable[[Exception], None]


class LaneListener(ABC):
    """Accepts the lanes of one kind."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The address at which a dialer finds the listener: a port, a name.  Known after the start."""

    @abstractmethod
    async def start(self) -> None:
        """Start to listen.  Raises ``OSError`` if this kind does not work, ``UsageError`` for a wrong setting."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop accepting and end all handshakes.  Idempotent; lanes live on."""


def _is_there() -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneKind:
    """A kind of lane, to be passed to ``lane_kinds.register_lane``.

    ``name`` is the name that users write after ``transport=``, and ``Lane.kind`` of its lanes.  ``costs`` are used by
    the cost model if the kind is pinned; of the kinds that two ranks share, the one of least latency is tried first.
    ``dial`` connects a lane that is not started yet: it raises ``OSError`` if another kind may still work.  ``listen``
    makes the listener; None: lanes come in through the node's gRPC server.

    ``title`` is its name in log messages.  ``is_local``: it joins ranks of one host only.  ``is_encrypted``: it uses
    the certificates of the job, so it may leave the host if there are some.  ``is_striped``: its lanes are of type
    ``Connection``, of which several may form one lane.  ``shares_memory``: ranks that pin it want shared memory, too.
    ``absence`` returns the reason why it cannot be used on this machine, or an empty text.  ``attempt`` describes a
    failed attempt, for people.
    """

    name: str
    costs: LaneCosts
    dial: Callable[[LaneDial], Awaitable[Lane]]
    listen: Callable[[LaneGate], LaneListener] | None
    title: str = ""
    is_local: bool = False
    is_encrypted: bool = False
    is_striped: bool = False
    shares_memory: bool = False
    absence: Callable[[], str] = _is_there
    attempt: Callable[[LaneDial, OSError, str], str] | None = None

    def __post_init__(self) -> None:
        what = f"lane {self.name!r}"
        if not isinstance(self.costs, LaneCosts):
            raise UsageError(f"{what}: costs: expected LaneCosts, got {self.costs!r}")
        if not callable(self.dial):
            raise UsageError(f"{what}: dial: expected a coroutine function that connects a lane, got {self.dial!r}")
        if self.listen is not None and not callable(self.listen):
            raise UsageError(f"{what}: listen: expected a function that makes a LaneListener, got {self.listen!r}")
        lacking = ", ".join(sorted(getattr(self.listen, "__abstractmethods__", ())))
        if lacking:
            raise UsageError(f"{what}: its listener lacks {lacking}; define what is missing")

    @property
    def described(self) -> str:
        """The name in log messages."""
        return self.title or self.name

    def describe_attempt(self, dial: LaneDial, error: OSError, why: str) -> str:
        """Describe the failed attempt, and ``why`` it failed."""
        if self.attempt is not None:
            return self.attempt(dial, error, why)
        return f"no {self.described} connection to {dial.place or dial.server} ({why})"
