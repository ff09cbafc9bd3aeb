"""The world: immutable membership of one generation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank of a world.

    ``host`` is the name shown in texts, ``host_id`` is equal exactly for ranks of one host (chosen by the launcher),
    and ``address`` is the ``host:port`` of the rank's gRPC server (empty for ranks within a single process).
    """

    rank: int
    host: str = "localhost"
    host_id: str = "localhost"
    local_rank: int = 0
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class World:
    """The members by rank, for one generation.  ``members[r].rank == r``."""

    members: tuple[Member, ...]
    generation: int = 0
    job: str = "local"

    def __post_init__(self) -> None:
        if not self.members:
            raise UsageError("members: a world needs at least one member, got none")
        ranks = [member.rank for member in self.members]
        if ranks != list(range(len(ranks))):
            raise UsageError(f"members: expected ranks 0..{len(ranks) - 1} in order, got {ranks}")

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Ranks grouped by host, hosts in order of their lowest rank."""
        groups: dict[str, list[int]] = {}
        for member in self.members:
            groups.setdefault(member.host_id, []).append(member.rank)
        return tuple(tuple(group) for group in groups.values())


def world_of_one(*, host: str = "localhost") -> World:
    """Return the world of a process without a launcher: one rank."""
    return World(members=(Member(rank=0, host=host, host_id=host),))
