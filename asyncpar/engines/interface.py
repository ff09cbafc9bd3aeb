"""The interface of engines: find places for ranks, start an agent at each, and report lost places.

A place is where one agent runs: a host, a worker of Dask, an actor of Ray.  Orders and events are frozen values with
one encoding, so an engine only has to carry bytes.  The secret travels in an order, over the engine's own channel:
never on a command line and never in an environment.
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
    """The work to run: ``ranks`` times the encoded ``program`` (see ``function_call.py``), called ``name`` in messages.

    At most ``per_place`` ranks share a place (None: as many as the engine has slots there).  ``wait`` is how long to
    wait for enough places; 0: too few are an error at once.  ``timeout`` bounds the wait of ranks for each other,
    ``grace`` is the time they have to end in, all in seconds.  After a failure the job starts again ``max_restarts``
    times.  ``environment`` is added to that of the places; ``transport`` pins the lane (None: negotiated).  All ranks
    prove that they hold ``secret``, which is generated for each job.

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
    """The place where an agent is to run ``slots`` ranks.

    ``name`` is the engine's name for it, ``host`` the host name of the machine, and ``address`` the IP address there
    that the other places reach.
    """

    name: str
    host: str
    address: str
    slots: int


class PlaceOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order to an agent: it is number ``number`` of ``places``, and the first serves the coordinator.

    ``group`` is the address of the caller's agent of an elastic job, whose group this one joins; "" for other jobs.
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

    @classmethod
    def of(cls, spec: JobSpec, place: Place, *, number: int, places: int, slots: int, group: str = "") -> PlaceOrder:
        """Return the order to ``place``, number ``number`` of ``places``, to run ``slots`` ranks of ``spec``."""
        return cls(
            job=spec.name,
            number=number,
            places=places,
            slots=slots,
            address=place.address,
            secret=bytes(spec.secret),
            program=spec.program,
            timeout=spec.timeout,
            grace=spec.grace,
            max_restarts=spec.max_restarts,
            environment=spec.environment,
            transport=spec.transport,
            group=group,
        )

    def __repr__(self) -> str:
        return f"PlaceOrder({self.job!r}, place {self.number} of {self.places}, <secret>)"


class BeginRanks(msgspec.Struct, frozen=True, tag="begin"):
    """The coordinator's address, for the places that do not serve it."""

    coordinator: str


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """End the ranks as Ctrl-C does; sent again, kill them."""


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Kill the ranks and end."""


PlaceCommand = BeginRanks | Interrupt | Kill


class PlaceServes(msgspec.Struct, frozen=True, tag="serves"):
    """The first place serves the coordinator at ``address``."""

    address: str


class PlaceOutput(msgspec.Struct, frozen=True, tag="output"):
    """Output of ranks or of the agent; ``is_error``: on stderr, in whole lines.

    ``is_message``: it is a message of the agent about the job, which agents of other places may repeat.
    """

    text: bytes
    is_error: bool
    is_message: bool = False


class PlaceProgress(msgspec.Struct, frozen=True, tag="progress"):
    """The progress of the lowest rank here that reports any."""

    prefix: str
    record: ProgressRecord


class PlaceReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The end of a place: the encoded results of its ranks, by rank; no process of it is left.

    ``errors`` has exceptions that ranks could pickle.  ``failures`` comes from the first place, and covers all places.
    """

    values: dict[int, bytes] = {}
    errors: dict[int, bytes] = {}
    failures: list[RankEnd] = []
    exit_code: int = 0
    message: str = ""


class PlaceLost(msgspec.Struct, frozen=True, tag="lost"):
    """A place is gone with everything that ran there; ``cause`` completes the sentence "Dask's worker X ..."."""

    place: int
    cause: str


PlaceEvent = PlaceServes | PlaceOutput | PlaceProgress | PlaceReport | PlaceLost

_EVENTS = msgspec.msgpack.Decoder(PlaceEvent)
_ORDERS = msgspec.msgpack.Decoder(PlaceOrder)
_COMMANDS = msgspec.msgpack.Decoder(PlaceCommand)
encode = msgspec.msgpack.Encoder().encode
"""Encode an order, a command or an event."""


def decode_event(encoded: bytes) -> PlaceEvent:
    """Decode an event of ``encode``."""
    event: PlaceEvent = _EVENTS.decode(encoded)
    return event


def decode_order(encoded: bytes) -> PlaceOrder:
    """Decode an order of ``encode``."""
    return _ORDERS.decode(encoded)


def decode_command(encoded: bytes) -> PlaceCommand:
    """Decode a command of ``encode``."""
    command: PlaceCommand = _COMMANDS.decode(encoded)
    return command


class Handle(ABC):
    """An agent at a place."""

    @abstractmethod
    async def send(self, command: PlaceCommand) -> None:
        """Send ``command`` to the agent; one that has ended ignores it.

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
        """Yield the places as they are lost."""

    @abstractmethod
    async def release(self) -> None:
        """Give the places back, ending everything that runs there.  Idempotent."""


class GrowingEngine(PlacementEngine):
    """An engine that can give a job more places while it runs, as elastic jobs need."""

    @property
    @abstractmethod
    def caller_address(self) -> str:
        """The IP address of this host that all places reach."""

    @abstractmethod
    async def grow(self, spec: JobSpec, count: int) -> Sequence[Place]:
        """Return up to ``count`` more places that are free now, in the order in which they will be started.

        Never waits for a place, and never takes one for which another job waits.
        """


def spread(ranks: int, slots: Sequence[int]) -> list[int]:
    """Return the number of ``ranks`` for each place: filled in order, none beyond its ``slots``.

    Raises ``UsageError`` if there are too few.
    """
    if sum(slots) < ranks:
        raise UsageError(f"ranks: expected at most {sum(slots)}, the slots of {len(slots)} places, got {ranks}")
    counts: list[int] = []
    for free in slots:
        count = min(free, ranks - sum(counts))
        counts.append(count)
    return counts
