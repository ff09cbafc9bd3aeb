"""Decisions on whether the ranks of one host get an arena: all of them or none.  Sans-I/O: feed events, obey commands.

The messages of a formation are here, too; file descriptors are sent beside them.

The lowest rank, the *leader*, decides for all, itself included.  Every rank makes an offer; when all offers are there,
every rank gets the roster; when all have mapped it, there is an arena.  Any failure before that ends the formation, and
nothing that happens later changes the verdict.  Ranks that come late to a failed formation are still notified, so that
they need not wait for their own deadline.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias

import msgspec

from asyncpar.core.config.world import World
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import ProtocolError
from asyncpar.net.arena.segment import NONCE_BYTES
from asyncpar.net.wire.handshake import TOKEN_BYTES, LinkTerms

MAX_MESSAGE_BYTES: Final = 64 << 10
MAX_PROBLEM_CHARACTERS: Final = 500
DESCRIPTORS_PER_RANK: Final = 3
"""The segment, the write end of the doorbell, the process."""
OFFERS_PER_MESSAGE: Final = 253 // DESCRIPTORS_PER_RANK
"""A message carries at most 253 descriptors (SCM_MAX_FD)."""

_Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 56)]
_Problem: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_PROBLEM_CHARACTERS)]


class SegmentOffer(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The contribution of one rank; its descriptors come in this order: segment, doorbell, process.

    ``terms`` must be equal on all ranks.  ``nonce`` is the number shown by the segment, ``process`` is equal exactly
    for ranks of one process, ``cores`` has a bit for each processor that the rank may use, ``quota`` is how many it is
    granted.  ``maps_heaps``: it has the address space for the heaps of all.
    """

    rank: _Rank
    terms: Annotated[str, msgspec.Meta(max_length=200)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    control_bytes: _Size
    heap_bytes: _Size
    process: Annotated[str, msgspec.Meta(max_length=100)]
    cores: Annotated[bytes, msgspec.Meta(max_length=128)]
    quota: float
    maps_heaps: bool


class Unable(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The rank cannot take part."""

    problem: _Problem


class Roster(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A part of the offers of all ranks, with descriptors in the same order; sent in as many parts as needed."""

    offers: Annotated[list[SegmentOffer], msgspec.Meta(max_length=OFFERS_PER_MESSAGE)]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The rank has mapped and checked everything."""


class ArenaVerdict(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The outcome: an arena (no ``problem``), or none; ``culprit`` is the rank that is missing or gone."""

    problem: _Problem = ""
    culprit: _Rank | None = None


Message: TypeAlias = SegmentOffer | Unable | Roster | Ready | ArenaVerdict

_DECODER: Final = msgspec.msgpack.Decoder(Message)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode_message(message: Message) -> bytes:
    """Encode ``message`` as the content of one packet."""
    return _ENCODER.encode(message)


def decode_message(content: bytes) -> Message:
    """Decode the message in ``content``.  Raises ``ProtocolError`` if there is none."""
    try:
        message: Message = _DECODER.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise ProtocolError(f"arena: a message cannot be read ({error})") from error
    return message


def describe(error: Exception) -> str:
    """Describe an error as the text of a problem."""
    return shorten(os_reason(error) or type(error).__name__)


def shorten(problem: str) -> str:
    """Return ``problem`` cut to the length that a message may carry."""
    return problem[:MAX_PROBLEM_CHARACTERS]


def encode_cores(cores: frozenset[int]) -> bytes:
    """Encode a set of small numbers as a bit mask; numbers that do not fit are left out."""
    mask = sum(1 << core for core in cores if core < 1024)
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def decode_cores(mask: bytes) -> frozenset[int]:
    """Decode the numbers in a bit mask."""
    number = int.from_bytes(mask, "little")
    return frozenset(core for core in range(number.bit_length()) if number >> core & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The rendezvous of ``ranks``, ascending, which are those of one host; the first leads it.

    The address is an abstract Unix socket: it is no file, it vanishes with its socket, and it contains a MAC, so a
    process without the secret cannot occupy it first.
    """

    job: str
    generation: int
    host_id: str
    ranks: tuple[int, ...]
    secret: bytes = field(repr=False)
    servers: Mapping[int, str] = field(default_factory=dict, repr=False)
    """The address of the gRPC server of each rank that has one."""

    @classmethod
    def of(cls, world: World, rank: int, *, secret: bytes) -> Rendezvous:
        """Return the rendezvous that ``rank`` belongs to."""
        host_id = world.members[rank].host_id
        ranks = tuple(member.rank for member in world.members if member.host_id == host_id)
        return cls(
            job=world.job,
            generation=world.generation,
            host_id=host_id,
            ranks=ranks,
            secret=secret,
            servers={rank: world.members[rank].address for rank in ranks},
        )

    @property
    def leader(self) -> int:
        return self.ranks[0]

    @property
    def address(self) -> bytes:
        """The address of the leader, in this network namespace."""
        return b"\0asyncpar-" + self._mac("address").hex().encode()

    def terms(self, dialer: int) -> LinkTerms:
        """Return the terms that ``dialer`` and the leader prove to each other."""
        token = self._mac("token", dialer)[:TOKEN_BYTES]
        return LinkTerms(job=self.job, generation=self.generation, dialer=dialer, listener=self.leader, token=token)

    def find_terms(self, token: bytes) -> LinkTerms | None:
        """Return the terms that go with ``token``."""
        candidates = (self.terms(rank) for rank in self.ranks[1:])
        return next((terms for terms in candidates if hmac.compare_digest(terms.token, token)), None)

    def _mac(self, *label: object) -> bytes:
        content = msgspec.msgpack.encode((label, self.job, self.generation, self.host_id, self.ranks))
        return hmac.digest(self.secret, b"asyncpar arena\0" + content, hashlib.sha256)


class Came(msgspec.Struct, frozen=True):
    """A rank has connected and authenticated itself."""

    rank: int


class Sent(msgspec.Struct, frozen=True):
    """A rank, or the leader itself, has sent a message."""

    rank: int
    message: SegmentOffer | Unable | Ready


class Gone(msgspec.Struct, frozen=True):
    """The connection to a rank that had come ended (``how``)."""

    rank: int
    how: str


class Expired(msgspec.Struct, frozen=True):
    """The deadline has passed."""


Event = Came | Sent | Gone | Expired


class ShareOffers(msgspec.Struct, frozen=True):
    """Send these offers to all ranks, in order of rank."""

    offers: tuple[SegmentOffer, ...]


class SendVerdict(msgspec.Struct, frozen=True):
    """Send a rank the verdict."""

    rank: int
    verdict: ArenaVerdict


class Conclude(msgspec.Struct, frozen=True):
    """End the formation: all reachable ranks have been notified."""

    verdict: ArenaVerdict


Command = ShareOffers | SendVerdict | Conclude


class Formation:
    """The leader's view of one formation among ``ranks``, ascending, itself first."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._here: set[int] = set()
        self._gone: set[int] = set()
        self._offers: dict[int, SegmentOffer] = {}
        self._ready: set[int] = set()
        self._verdict: ArenaVerdict | None = None
        self._is_finished = False

    def handle(self, event: Event) -> list[Command]:
        """Process an event and return the resulting commands."""
        if isinstance(event, Came):
            self._here.add(event.rank)
        elif isinstance(event, Gone):
            self._gone.add(event.rank)
        if self._verdict is not None:
            return self._handle_late(event, self._verdict)
        match event:
            case Sent(rank, SegmentOffer() as offer):
                return self._take_offer(rank, offer)
            case Sent(rank, Unable(problem)):
                return self._end(f"rank {rank}: {problem}")
            case Sent(rank, Ready()):
                return self._take_ready(rank)
            case Gone(rank, how):
                return self._end(f"rank {rank} is gone: {how}", culprit=rank)
            case Expired():
                return self._expire()
        return []

    def _handle_late(self, event: Event, verdict: ArenaVerdict) -> list[Command]:
        if self._is_finished:
            return []
        verdicts: list[Command] = [SendVerdict(event.rank, verdict)] if isinstance(event, Came) else []
        if isinstance(event, Expired) or self._here | self._gone >= set(self._ranks[1:]):
            self._is_finished = True
            return [*verdicts, Conclude(verdict)]
        return verdicts

    def _take_offer(self, rank: int, offer: SegmentOffer) -> list[Command]:
        if rank != offer.rank or rank in self._offers:
            return self._end(f"rank {rank} offered out of turn, as rank {offer.rank}", culprit=rank)
        self._offers[rank] = offer
        leader = self._offers.get(self._ranks[0])
        if leader is None:
            return []
        for other in self._offers.values():
            if other.terms != leader.terms:
                return self._end(
                    f"the ranks have different settings: rank {leader.rank} {leader.terms}, "
                    f"rank {other.rank} {other.terms}"
                )
        if len(self._offers) < len(self._ranks):
            return []
        return [ShareOffers(tuple(self._offers[member] for member in self._ranks))]

    def _take_ready(self, rank: int) -> list[Command]:
        if len(self._offers) < len(self._ranks) or rank in self._ready:
            return self._end(f"rank {rank} was ready out of turn", culprit=rank)
        self._ready.add(rank)
        return self._end("") if len(self._ready) == len(self._ranks) else []

    def _expire(self) -> list[Command]:
        if len(self._offers) < len(self._ranks):
            missing, what = [rank for rank in self._ranks if rank not in self._offers], "did not come"
        else:
            missing, what = [rank for rank in self._ranks if rank not in self._ready], "did not get ready"
        names = ", ".join(str(rank) for rank in missing)
        ended = self._end(f"rank{'s' if len(missing) > 1 else ''} {names} {what} in time", culprit=missing[0])
        return ended if self._is_finished else [*ended, *self.handle(Expired())]

    def _end(self, problem: str, *, culprit: int | None = None) -> list[Command]:
        """Send the verdict to all ranks that are here."""
        verdict = self._verdict = ArenaVerdict(shorten(problem), culprit)
        verdicts: list[Command] = [SendVerdict(rank, verdict) for rank in sorted(self._here - self._gone)]
        if self._here | self._gone >= set(self._ranks[1:]):
            self._is_finished = True
            return [*verdicts, Conclude(verdict)]
        return verdicts


def check_roster(offers: Sequence[SegmentOffer], *, ranks: Sequence[int], own: SegmentOffer) -> str:
    """Return the fault of a complete roster as received by a rank; empty if there is none."""
    named = [offer.rank for offer in offers]
    if named != list(ranks):
        return f"the roster names ranks {named}, expected {list(ranks)}"
    if own not in offers:
        return f"the roster does not repeat what rank {own.rank} offered"
    return ""
