"""The source of worlds as a rank uses it: join, report the state when a world ends, and get the next world.

``LoneWorld`` and ``LaunchedWorld`` have one world and no next one; ``pipe.py`` has those of a director.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from asyncpar.bootstrap import Attach, attach_alone, attach_world
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.rank_place import ForeignPlace
from asyncpar.elasticity.donors import Donor, SnapshotShelf
from asyncpar.errors import LaunchError
from asyncpar.hosts.lineage import Decision, Lineage, MemberReport
from asyncpar.hosts.messages import WorldChange
from asyncpar.net.transport.serving import Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The place of one member in a world.  ``lineage`` is that of all its members when they begin."""

    generation: int
    rank: int
    size: int
    attach: Attach
    lineage: Lineage
    decision: Decision
    change: WorldChange


OnRevoked: TypeAlias = Callable[[int, BaseException | None], None]
"""Called, on the event loop, with the generation that is over, and the reason; None for a planned change."""


class WorldSource(Protocol):
    """Gives one process its worlds, one after another."""

    async def donors(self) -> Sequence[Donor] | None:
        """Return the members that can give the state; empty if no world has begun, None if the job is complete.

        A spare waits here until there is a place for it.
        """
        ...

    async def join(self, lineage: Lineage, shelf: SnapshotShelf, *, is_healed: bool) -> Membership:
        """Return the first world of this process.

        The process is ready with ``lineage``; others can be healed from ``shelf``.  Raises ``LaunchError`` or
        ``UsageError`` if there is no place for it.
        """
        ...

    def progress(self, lineage: Lineage) -> None:
        """Report, while ``join`` waits, that this process has reached ``lineage``."""
        ...

    async def withdraw(self) -> None:
        """Withdraw the last ``join``, which was cancelled: the process joins again once it has fetched the state anew.

        After this has returned, no world is given that was formed for the former state.
        """
        ...

    def refused(self, why: str) -> None:
        """Report that this process, which was to join, is refused: it would not be the same training.  It then ends."""
        ...

    async def next_world(self, report: MemberReport) -> Membership | None:
        """Return the successor of a world that is over for this member; None if it is to leave (it was drained).

        Raises ``StaleGeneration`` when the others have gone on without it, ``LaunchError`` when the job is over.
        """
        ...

    def on_revoked(self, callback: OnRevoked) -> None:
        """Call ``callback`` whenever a world of this process is revoked."""
        ...

    def has_pending(self, generation: int) -> bool:
        """Return whether a change waits that ends the world after the next commit: a newcomer, or a drained rank."""
        ...

    async def hold_lease(self) -> None:
        """Return when this process may commit a step: the others have not gone on without its host.

        It waits after a pause (of this process, of its agent, of its host) until the others are known to count on it,
        and while they cannot be reached.  Everything done before the next ``await`` is within the lease.  Raises as
        ``next_world`` does when nothing may be committed any more.
        """
        ...

    async def leave(self, failed: tuple[int | None, str] | None = None) -> None:
        """Leave for good: this process is done, or has ``failed``: the step, None outside one, and why.  Idempotent."""
        ...


class LoneWorld:
    """See ``WorldSource``: the world of one process without a launcher.  It never changes."""

    async def donors(self) -> Sequence[Donor] | None:
        return ()

    async def join(self, lineage: Lineage, shelf: SnapshotShelf, *, is_healed: bool) -> Membership:  # noqa: ARG002
        return _only_world(attach_alone(Serving(), None), lineage, rank=0, size=1, generation=0)

    def progress(self, lineage: Lineage) -> None:
        pass

    async def withdraw(self) -> None:
        pass

    def refused(self, why: str) -> None:
        pass

    async def next_world(self, report: MemberReport) -> Membership:
        raise LaunchError(f"generation {report.generation}: a world of one has no successor")

    def on_revoked(self, callback: OnRevoked) -> None:
        pass

    def has_pending(self, generation: int) -> bool:  # noqa: ARG002
        return False

    async def hold_lease(self) -> None:
        pass  # no other goes on without it

    async def leave(self, failed: tuple[int | None, str] | None = None) -> None:
        pass


class LaunchedWorld(LoneWorld):
    """The world that a launcher made.  When a rank is lost the launcher ends or restarts all of them."""

    def __init__(self, environment: LaunchEnvironment | ForeignPlace) -> None:
        self._environment = environment

    async def join(self, lineage: Lineage, shelf: SnapshotShelf, *, is_healed: bool) -> Membership:  # noqa: ARG002
        place = self._environment
        attach = attach_world(place, None, Serving(), None)
        return _only_world(attach, lineage, rank=place.rank, size=place.world_size, generation=place.generation)

    async def next_world(self, report: MemberReport) -> Membership:
        lost = "; ".join(f"rank {rank}: {why}" for rank, why in report.suspects) or "it was revoked"
        raise LaunchError(
            f"generation {report.generation} is over ({lost}), and this launcher makes no other without a restart"
        )


def _only_world(attach: Attach, lineage: Lineage, *, rank: int, size: int, generation: int) -> Membership:
    return Membership(
        generation=generation,
        rank=rank,
        size=size,
        attach=attach,
        lineage=lineage,
        decision=Decision.ABORT,
        change=WorldChange(generation=generation),
    )
