"""What ranks that meet through a store tell each other, and what follows from it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import msgspec

from asyncpar.core.config.world import Member, World
from asyncpar.errors import AsyncparError, PeerLost, PeerTimeout, ProtocolError, UsageError

T = TypeVar("T")

_OPERATION = "meeting the other ranks"
_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who a rank is: ``host`` is for people, ``host_id`` equal exactly for ranks of one host.

    ``terms`` name what must be equal on all ranks; they are compared and quoted, never parsed.  ``attempt`` is which
    start of the rank it comes from; ``job_rank`` is its rank in the job that `asyncpar launch` started (None: no job).
    """

    rank: int
    host: str
    host_id: str
    terms: dict[str, str]
    attempt: int = 0
    job_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """That a rank is there: ``token`` is no other's, ``name`` says for people where its process is."""

    token: str
    name: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Charter:
    """What the world is called, and the secret that its ranks hold, as hexadecimal digits (empty: each has it)."""

    job: str
    generation: int
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """All who came, in the order of their ranks, before anybody knows where the others listen."""

    guests: tuple[Hello, ...]
    charter: Charter

    @property
    def is_one_host(self) -> bool:
        return len({guest.host_id for guest in self.guests}) == 1

    @property
    def has_ranks_of_job(self) -> bool:
        """Has every rank the same number here as in the job?"""
        return all(guest.job_rank == guest.rank for guest in self.guests)


class RefusalKind(StrEnum):
    """Why there will be no world, by who must act."""

    USAGE = "usage"
    TWICE = "twice"
    ABSENT = "absent"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why there will be no world; ``ranks`` are those who are missing or to blame.

    ``attempt`` is which start of the ranks it comes from.
    """

    kind: RefusalKind
    message: str
    ranks: tuple[int, ...] = ()
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a meeting ended: where each rank listens, or why there will be no world."""

    addresses: tuple[str, ...] = ()
    refusal: Refusal | None = None


def encode(message: Place | Hello | Roster | End) -> str:
    """Return ``message`` as a store can hold it."""
    return msgspec.json.encode(message).decode()


def decode(content: bytes, kind: type[T]) -> T:
    """Return the message of ``kind`` in ``content``.  Raises ``ProtocolError`` if it is none."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the store holds something that is no {kind.__name__}: {error}") from error


def find_disagreement(guests: Sequence[Hello]) -> Refusal | None:
    """Return the first difference between the terms of the lowest rank and those of another; None if they are equal."""
    if not guests:
        return None
    first, *others = sorted(guests, key=lambda guest: guest.rank)
    for other in others:
        for name in {**first.terms, **other.terms}:
            one, two = first.terms.get(name, "none"), other.terms.get(name, "none")
            if one != two:
                message = (
                    f"{name}: rank {first.rank} has {one}, rank {other.rank} has {two}; it must be equal on all ranks"
                )
                return Refusal(kind=RefusalKind.USAGE, message=message, ranks=(first.rank, other.rank))
    return None


def find_unreachable(roster: Roster, are_loopback: Sequence[bool]) -> Refusal | None:
    """Return which rank others cannot reach: one of several hosts listens on its loopback, and another does not."""
    if roster.is_one_host or len(set(are_loopback)) == 1:
        return None
    near = roster.guests[are_loopback.index(True)]
    far = roster.guests[are_loopback.index(False)]
    message = (
        f"ASYNCPAR_BIND: rank {near.rank} on {near.host} listens on its loopback, where rank {far.rank} on {far.host} "
        f"cannot reach it; set it on {near.host} to the address that other hosts see"
    )
    return Refusal(kind=RefusalKind.USAGE, message=message, ranks=(near.rank, far.rank))


def absent(missing: Sequence[int], *, size: int, timeout: float, deed: str) -> Refusal:
    """Return that ``missing``, of ``size`` ranks, have not done ``deed`` in time."""
    have = "has" if len(missing) == 1 else "have"
    message = f"{name_ranks(missing)} of {size} {have} not {deed} within {timeout:.1f} s"
    return Refusal(kind=RefusalKind.ABSENT, message=message, ranks=tuple(missing))


def failed(rank: int, error: BaseException) -> Refusal:
    """Return that ``rank`` takes no part because of ``error``."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Refusal(kind=RefusalKind.FAILED, message=f"rank {rank} gave up: {reason}", ranks=(rank,))


def came_twice(rank: int, places: Sequence[str]) -> Refusal:
    """Return that ``rank`` is there at each of ``places``."""
    message = f"rank: {rank} came twice, as {', and as '.join(places)}; each rank needs a number of its own"
    return Refusal(kind=RefusalKind.TWICE, message=message, ranks=(rank,))


def abandoned(rank: int) -> Refusal:
    """Return that ``rank`` was there, but is not any more."""
    return Refusal(kind=RefusalKind.ABANDONED, message=f"rank {rank} was there and answers no more", ranks=(rank,))


def error_of(refusal: Refusal, *, rank: int, hosts: Mapping[int, str], note: str = "") -> AsyncparError:
    """Return what ``rank`` raises because of ``refusal``; ``hosts`` has the hosts of the ranks that came."""
    blamed = refusal.ranks[0] if refusal.ranks else None
    host = None if blamed is None else hosts.get(blamed)
    match refusal.kind:
        case RefusalKind.USAGE | RefusalKind.TWICE:
            return UsageError(refusal.message)
        case RefusalKind.ABSENT:
            late = " came too late:" if rank in refusal.ranks else ":"
            message = f"rank {rank}{late} {refusal.message}{note}"
            return PeerTimeout(message, rank=blamed, host=host, operation=_OPERATION, cause=refusal.message)
        case RefusalKind.FAILED | RefusalKind.ABANDONED:
            message = f"rank {rank}: no world was formed: {refusal.message}"
            return PeerLost(message, rank=blamed, host=host, operation=_OPERATION, cause=refusal.message)


def found_world(roster: Roster, addresses: Sequence[str]) -> World:
    """Return the world of those who came.  Local ranks follow the order of the ranks of a host."""
    hosts = [guest.host_id for guest in roster.guests]
    members = tuple(
        Member(
            rank=guest.rank,
            host=guest.host,
            host_id=guest.host_id,
            local_rank=hosts[:index].count(guest.host_id),
            address=address,
        )
        for index, (guest, address) in enumerate(zip(roster.guests, addresses, strict=True))
    )
    return World(members=members, generation=roster.charter.generation, job=roster.charter.job)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 1 and 2" or "ranks 1, 2 and 5"; long lists are cut."""
    names = [str(rank) for rank in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        names.append(f"{len(ranks) - _SHOWN} more")
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
