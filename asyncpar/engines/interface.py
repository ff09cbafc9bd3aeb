"""The interface of engines: find places for ranks, start an agent at each, and tell which places are lost.

A place is where one agent runs: a host, a worker of Dask, an actor of Ray.  Orders and events are frozen values that
have one encoding, so that an engine only has to carry bytes.  The secret travels in an order, over the engine's own
channel: never on a command line and never in an environment.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from asyncpar.core.config.checks import check_count, check_positive
from asyncpar.core.config.secret import SECRET_BYTES, Secret
from asyncpar.core.observe.rank_reports import ProgressRecord
from asyncpar.errors import UsageError
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.options import check_transport


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What is to run: ``ranks`` times the encoded ``program`` (see ``function_call.py``), called ``name`` in messages.

    At most ``per_place`` ranks share a place (None: as many as the engine has slots there).  ``wait`` seconds are
    waited until there are enough places; 0: too few are told at once.  ``timeout`` bounds the wait of ranks for each
    other, ``grace`` what they have to end in, all in seconds.  After a failure the job starts again ``max_restarts``
    times.  ``environment`` is added to that of the places; ``transport`` pins the lane (None: negotiated).  All ranks
    prove that they hold ``secret``, which is made up for each job.

    With ``least`` the job is elastic: its program is one with ``ap.elastic``, it runs on ``least`` to ``ranks`` ranks,
    goes on when places are lost, and gets more when the engine has them.
    """

    program: bytes
    ranks: int
    name: str = "job"
    least: int | None = None
    per_place: int | None = None
    wait: float = 0.0
    timeout: float = 300.0
    grace: float = 5.0
    max_restarts: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    transport: str | None = None
    secret: bytes = field(default_factory=lambda: Secret(secrets.token_bytes(SECRET_BYTES)), repr=False)

    def __post_init__(self) -> None:
        check_count("ranks", self.ranks)
        if self.per_place is not None:
            check_count("per_place", self.per_place)
        if self.least is not None:
            self._check_least(self.least)
        check_count("max_restarts", self.max_restarts, least=0)
        check_positive("timeout", self.timeout, "seconds")
        check_transport(self.transport)

    def _check_least(self, least: int) -> None:
        check_count("ranks", least)
        per_place = self.per_place or 1
        if least > self.ranks or least % per_place or self.ranks % per_place:
            multiples = "" if per_place == 1 else f", both multiples of the {per_place} ranks of a place"
            raise UsageError(f"ranks: expected (least, most){multiples}, got ({least}, {self.ranks})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an agent is to run ``slots`` ranks.

    ``name`` is the engine's word for it, ``host`` what people call the machine, and ``address`` the IP address there
    that the other places reach.
    """

    name: str
    host: str
    address: str
    slots: int


class PlaceOrder(msgspec.Struct, frozen=True, kw_only=True):
    """All that an agent has to know: it is number ``number`` of ``places``, and the first serves the coordinator.

    ``group`` is the address of the caller's agent of an elastic job, which this one joins; "" for other jobs.
    """

    job: str
    number: int
    places: int
    slots: int
    address: str
    secret: bytes
    program: bytes
    timeout: float
    grace: float
    max_restarts: int
    environment: dict[str, str]
    transport: str | None
    group: str = ""

    def __repr__(self) -> str:
        return f"PlaceOrder({self.job!r}, place {self.number} of {self.places}, <secret>)"


class BeginRanks(msgspec.Struct, frozen=True, tag="begin"):
    """The coordinator's address, for the places that do not serve it."""

    coordinator: str


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """End the ranks as Ctrl-C does, once more: kill them."""


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Kill the ranks and end."""


PlaceCommand = BeginRanks | Interrupt | Kill


class PlaceServes(msgspec.Struct, frozen=True, tag="serves"):
    """The first place serves the coordinator at ``address``."""

    address: str


class PlaceOutput(msgspec.Struct, frozen=True, tag="output"):
    """What ranks or the agent have printed; ``is_error``: on stderr, in whole lines.

    ``is_message``: the agent says it, of the job, and those of other places may say the same.
    """

    text: bytes
    is_error: bool
    is_message: bool = False


class PlaceProgress(msgspec.Struct, frozen=True, tag="progress"):
    """The progress of the lowest rank here that reports any."""

    prefix: str
    record: ProgressRecord


class PlaceReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The end of a place: what its ranks returned, by rank, encoded; no process of it is left.

    ``errors`` has exceptions that ranks could pickle.  ``failures`` comes from the first place, and is that of all.
    """

    values: dict[int, bytes] = {}
    errors: dict[int, bytes] = {}
    failures: list[RankEnd] = []
    exit_code: int = 0
    message: str = ""


class PlaceLost(msgspec.Struct, frozen=True, tag="lost"):
    """A place is gone with all that ran there; ``cause`` completes the sentence "Dask's worker X ..."."""

    place: int
    cause: str


PlaceEvent = PlaceServes | PlaceOutput | PlaceProgress | PlaceReport | PlaceLost

_EVENTS = msgspec.msgpack.Decoder(PlaceEvent)
_ORDERS = msgspec.msgpack.Decoder(PlaceOrder)
_COMMANDS = msgspec.msgpack.Decoder(PlaceCommand)
encode = msgspec.msgpack.Encoder().encode
"""Encode an order, a command or an event."""


def decode_event(encoded: bytes) -> PlaceEvent:
    """Return the event that ``encode`` has encoded."""
    event: PlaceEvent = _EVENTS.decode(encoded)
    return event


def decode_order(encoded: bytes) -> PlaceOrder:
    """Return the order that ``encode`` has encoded."""
    return _ORDERS.decode(encoded)


def decode_command(encoded: bytes) -> PlaceCommand:
    """Return the command that ``encode`` has encoded."""
    command: PlaceCommand = _COMMANDS.decode(encoded)
    return command


class Handle(ABC):
    """An agent at a place."""

    @abstractmethod
    async def tell(self, command: PlaceCommand) -> None:
        """Have the agent obey ``command``; one that has ended obeys nothing.

        Raises ``OSError`` if it cannot be reached.
        """


class PlacementEngine(ABC):
    """Places for one job.  Used once: ``allocate``, ``start`` for each place, and ``release`` in any case."""

    @abstractmethod
    async def allocate(self, spec: JobSpec) -> Sequence[Place]:
        """Return places with ``spec.ranks`` slots in all, in the order of ranks.

        Raises ``UsageError`` if there are fewer, after ``spec.wait`` seconds, and for places that cannot run the job.
        """

    @abstractmethod
    async def start(self, place: Place, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> Handle:
        """Start the agent; ``take`` gets its events, the last of which is ``PlaceReport``.

        Raises ``LaunchError`` if that is impossible.
        """

    @abstractmethod
    def failures(self) -> AsyncIterator[PlaceLost]:
        """Yield the places that are lost."""

    @abstractmethod
    async def release(self) -> None:
        """Give the places back, whatever runs there.  Idempotent."""


class GrowingEngine(PlacementEngine):
    """An engine that can give a job more places while it runs, as elastic jobs need."""

    @property
    @abstractmethod
    def caller_address(self) -> str:
        """The IP address of this host that all places reach."""

    @abstractmethod
    async def grow(self, spec: JobSpec, count: int) -> Sequence[Place]:
        """Return ``count`` more places at most, which are free now, in the order in which they will be started.

        Never waits for a place, and never takes one for which another job waits.
        """


def spread(ranks: int, slots: Sequence[int]) -> list[int]:
    """Return how many of ``ranks`` each place gets: filled in order, none beyond its ``slots``.

    Raises ``UsageError`` if there are too few.
    """
    if sum(slots) < ranks:
        raise UsageError(f"ranks: expected at most {sum(slots)}, the slots of {len(slots)} places, got {ranks}")
    counts: list[int] = []
    for free in slots:
        count = min(free, ranks - sum(counts))
        counts.append(count)
    return counts
