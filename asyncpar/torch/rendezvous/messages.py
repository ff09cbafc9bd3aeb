"""The messages of a rendezvous through a store, and their consequences.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import msgspec

from asyncpar.core.config.world import Member, World
from asyncpar.errors import AsyncparError, PeerLost, PeerTimeout, ProtocolError, UsageError

T = TypeVar("T")

_OPERATION = "the rendezvous"
_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello:
    """Introduction of one rank: ``host`` is for people, ``host_id`` is equal exactly for ranks of one host.

    ``terms`` are settings that must be equal on all ranks; they are compared and quoted, never parsed.  ``attempt`` is
    the number of restarts of the rank; ``job_rank`` is its rank in the job of `asyncpar launch` (None: no job).
    """

    rank: int
    host: str
    host_id: str
    terms: dict[str, str]
    attempt: int = 0
    job_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClaim:
    """The claim of a process to be a rank: ``token`` is unique, ``name`` describes the process for people."""

    token: str
    name: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldIdentity:
    """The name and generation of a world, and its secret as hexadecimal digits (empty: each rank has it already)."""

    job: str
    generation: int
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Participants:
    """All ranks of a rendezvous, in order, before their addresses are known."""

    hellos: tuple[RankHello, ...]
    identity: WorldIdentity

    @property
    def is_one_host(self) -> bool:
        return len({hello.host_id for hello in self.hellos}) == 1

    @property
    def has_ranks_of_job(self) -> bool:
        """Whether every rank has the same number here as in the job."""
        return all(hello.job_rank == hello.rank for hello in self.hellos)


class RendezvousFailureKind(StrEnum):
    """Reasons for the failure of a rendezvous."""

    USAGE = "usage"
    TWICE = "twice"
    ABSENT = "absent"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousFailure:
    """The reason why there will be no world; ``ranks`` are the missing or responsible ones.

    ``attempt`` is the start of the ranks that it belongs to.
    """

    kind: RendezvousFailureKind
    message: str
    ranks: tuple[int, ...] = ()
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousResult:
    """The result of a rendezvous: the address of each rank, or a failure."""

    addresses: tuple[str, ...] = ()
    failure: RendezvousFailure | None = None


def encode(message: RankClaim | RankHello | Participants | RendezvousResult) -> str:
    """Return ``message`` encoded for a store."""
    return msgspec.json.encode(message).decode()


def decode(content: bytes, kind: type[T]) -> T:
    """Return the message of ``kind`` in ``content``.  Raises ``ProtocolError`` if there is none."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the store holds a value that is no {kind.__name__}: {error}") from error


def find_disagreement(hellos: Sequence[RankHello]) -> RendezvousFailure | None:
    """Return the first difference between the terms of the lowest rank and those of another; None if they are equal."""
    if not hellos:
        return None
    first, *others = sorted(hellos, key=lambda hello: hello.rank)
    for other in others:
        for name in {**first.terms, **other.terms}:
            one, two = first.terms.get(name, "none"), other.terms.get(name, "none")
            if one != two:
                message = (
                    f"{name}: rank {first.rank} has {one}, rank {other.rank} has {two}; it must be equal on all ranks"
                )
                return RendezvousFailure(
                    kind=RendezvousFailureKind.USAGE, message=message, ranks=(first.rank, other.rank)
                )
    return None


def find_unreachable(participants: Participants, are_loopback: Sequence[bool]) -> RendezvousFailure | None:
    """Return the rank that others cannot reach: one of several hosts listens on its loopback, and another does not."""
    if participants.is_one_host or len(set(are_loopback)) == 1:
        return None
    near = participants.hellos[are_loopback.index(True)]
    far = participants.hellos[are_loopback.index(False)]
    message = (
        f"ASYNCPAR_BIND: rank {near.rank} on {near.host} listens on its loopback, where rank {far.rank} on {far.host} "
        f"cannot reach it; set it on {near.host} to the address that other hosts see"
    )
    return RendezvousFailure(kind=RendezvousFailureKind.USAGE, message=message, ranks=(near.rank, far.rank))


def absent(missing: Sequence[int], *, size: int, timeout: float, done: str) -> RendezvousFailure:
    """Return the failure of ``missing``, of ``size`` ranks, which have not ``done`` their part in time."""
    have = "has" if len(missing) == 1 else "have"
    message = f"{name_ranks(missing)} of {size} {have} not {done} within {timeout:.1f} s"
    return RendezvousFailure(kind=RendezvousFailureKind.ABSENT, message=message, ranks=tuple(missing))


def failed(rank: int, error: BaseException) -> RendezvousFailure:
    """Return the failure that ``rank`` takes no part because of ``error``."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return RendezvousFailure(kind=RendezvousFailureKind.FAILED, message=f"rank {rank} gave up: {reason}", ranks=(rank,))


def ended(rank: int) -> RendezvousFailure:
    """Return the failure that the process of ``rank`` has ended."""
    message = f"the process of rank {rank} ended before the world was complete"
    return RendezvousFailure(kind=RendezvousFailureKind.FAILED, message=message, ranks=(rank,))


def duplicated(rank: int, places: Sequence[str]) -> RendezvousFailure:
    """Return the failure that ``rank`` is present at each of ``places``."""
    message = f"rank: {rank} came twice, as {', and as '.join(places)}; each rank needs a number of its own"
    return RendezvousFailure(kind=RendezvousFailureKind.TWICE, message=message, ranks=(rank,))


def abandoned(rank: int) -> RendezvousFailure:
    """Return the failure that ``rank`` was present, but is not any more."""
    return RendezvousFailure(
        kind=RendezvousFailureKind.ABANDONED, message=f"rank {rank} was present and no longer answers", ranks=(rank,)
    )


def error_of(failure: RendezvousFailure, *, rank: int, hosts: Mapping[int, str], note: str = "") -> AsyncparError:
    """Return the error that ``rank`` raises for ``failure``; ``hosts`` has the hosts of the ranks that arrived."""
    blamed = failure.ranks[0] if failure.ranks else None
    host = None if blamed is None else hosts.get(blamed)
    match failure.kind:
        case RendezvousFailureKind.USAGE | RendezvousFailureKind.TWICE:
            return UsageError(failure.message)
        case RendezvousFailureKind.ABSENT:
            late = " came too late:" if rank in failure.ranks else ":"
            message = f"rank {rank}{late} {failure.message}{note}"
            return PeerTimeout(message, rank=blamed, host=host, operation=_OPERATION, cause=failure.message)
        case RendezvousFailureKind.FAILED | RendezvousFailureKind.ABANDONED:
            message = f"rank {rank}: no world was formed: {failure.message}"
            return PeerLost(message, rank=blamed, host=host, operation=_OPERATION, cause=failure.message)


def found_world(participants: Participants, addresses: Sequence[str]) -> World:
    """Return the world of the participants.  Local ranks follow the order of the ranks of a host."""
    hosts = [hello.host_id for hello in participants.hellos]
    members = tuple(
        Member(
            rank=hello.rank,
            host=hello.host,
            host_id=hello.host_id,
            local_rank=hosts[:index].count(hello.host_id),
            address=address,
        )
        for index, (hello, address) in enumerate(zip(participants.hellos, addresses, strict=True))
    )
    return World(members=members, generation=participants.identity.generation, job=participants.identity.job)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 1 and 2" or "ranks 1, 2 and 5"; long lists are cut."""
    names = [str(rank) for rank in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        names.append(f"{len(ranks) - _SHOWN} more")
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
