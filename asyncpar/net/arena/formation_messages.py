"""What the ranks of one host say to each other while they form an arena; descriptors travel beside."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias

import msgspec

from asyncpar.core.config.world import World
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


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What a rank brings, as its descriptors in this order: segment, doorbell, process.

    ``terms`` must be equal on all ranks.  ``nonce`` is what the segment shows, ``process`` is equal exactly for ranks
    of one process, ``cores`` has a bit for each processor the rank may use, ``quota`` is how many it is granted.
    ``maps_heaps`` says whether it has the address space for the heaps of all.
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
    """A part of what all ranks bring, descriptors in the same order; sent in as many parts as it takes."""

    offers: Annotated[list[Offer], msgspec.Meta(max_length=OFFERS_PER_MESSAGE)]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The rank has mapped and checked everything."""


class Verdict(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """There is an arena (no ``problem``), or there is none; ``culprit`` is the rank that is missing or gone."""

    problem: _Problem = ""
    culprit: _Rank | None = None


Message: TypeAlias = Offer | Unable | Roster | Ready | Verdict

_DECODER: Final = msgspec.msgpack.Decoder(Message)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode_message(message: Message) -> bytes:
    """Return ``message`` as the content of one packet."""
    return _ENCODER.encode(message)


def decode_message(content: bytes) -> Message:
    """Return the message in ``content``.  Raises ``ProtocolError`` if there is none."""
    try:
        message: Message = _DECODER.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise ProtocolError(f"arena: a message cannot be read ({error})") from error
    return message


def describe(error: Exception) -> str:
    """Return an error as the text of a problem."""
    return shorten((error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__)


def shorten(problem: str) -> str:
    """Return ``problem`` cut to what a message may carry."""
    return problem[:MAX_PROBLEM_CHARACTERS]


def encode_cores(cores: frozenset[int]) -> bytes:
    """Return a set of small numbers as a bit mask; what does not fit is left out."""
    mask = sum(1 << core for core in cores if core < 1024)
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def decode_cores(mask: bytes) -> frozenset[int]:
    """Return the numbers in a bit mask."""
    number = int.from_bytes(mask, "little")
    return frozenset(core for core in range(number.bit_length()) if number >> core & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The rendezvous of ``ranks``, ascending, which are those of one host; the first leads it.

    The address is an abstract Unix socket: it is no file, it vanishes with its socket, and it holds a MAC, so that
    nobody without the secret can be there first.
    """

    job: str
    generation: int
    host_id: str
    ranks: tuple[int, ...]
    secret: bytes = field(repr=False)
    servers: Mapping[int, str] = field(default_factory=dict, repr=False)
    """Where each rank has its gRPC server; not for those that have none."""

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
        """Where the leader listens, in this network namespace."""
        return b"\0asyncpar-" + self._mac("address").hex().encode()

    def terms(self, dialer: int) -> LinkTerms:
        """Return what ``dialer`` and the leader prove to each other."""
        token = self._mac("token", dialer)[:TOKEN_BYTES]
        return LinkTerms(job=self.job, generation=self.generation, dialer=dialer, listener=self.leader, token=token)

    def find_terms(self, token: bytes) -> LinkTerms | None:
        """Return the terms that go with ``token``."""
        candidates = (self.terms(rank) for rank in self.ranks[1:])
        return next((terms for terms in candidates if hmac.compare_digest(terms.token, token)), None)

    def _mac(self, *label: object) -> bytes:
        content = msgspec.msgpack.encode((label, self.job, self.generation, self.host_id, self.ranks))
        return hmac.digest(self.secret, b"asyncpar arena\0" + content, hashlib.sha256)
