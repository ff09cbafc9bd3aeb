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
from asyncpar.net.membership.lineage import Decision, Lineage, MemberReport
from asyncpar.net.membership.world_messages import WorldChange
from asyncpar.net.transport.serving import Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The place of one member in a world.  ``lineage`` is what all its members have when they begin."""

    generation: int
    rank: int
    size: int
    attach: Attach
    lineage: Lineage
    decision: Decision
    change: WorldChange


OnRevoked: TypeAlias = Callable[[int, BaseException | None], None]
"""Called with the generation that is over, and why, None for a planned change; on the event loop."""


class WorldSource(Protocol):
    """Gives one process its worlds, one after another."""

    async def donors(self) -> Sequence[Donor] | None:
        """Return the members that can give the state; empty if no world has begun, None if the job is complete.

        A spare waits here until there is a place for it.
        """
        ...

    async def join(self, lineage: Lineage, shelf: SnapshotShelf, *, is_healed: bool) -> Membership:
        """Return the first world of this process.

        It is ready with ``lineage``; ``shelf`` is what others can be healed from.  Raises ``LaunchError`` or
        ``UsageError`` if there is no place for it.
        """
        ...

    def progress(self, lineage: Lineage) -> None:
        """Tell, while ``join`` waits, that this process has come to ``lineage``."""
        ...

    async def withdraw(self) -> None:
        """Take the last ``join`` back, which was cancelled: the state has to be fetched anew, and then it joins again.

        No world that was formed for the former state is given after this has returned.
        """
        ...

    def refused(self, why: str) -> None:
        """Report that this process, which was to join, is refused: it would not be the same training.  It ends then."""
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
        """Whether a change waits that lets the world end after the next commit: a newcomer, or one who drains."""
        ...

    async def hold_lease(self) -> None:
        """Return when this process may commit a step: nobody has gone on without its host.

        It waits after a pause (of this process, of its agent, of its host) until the others are known to count on it,
        and while they cannot be reached.  What is done before the next ``await`` is within the lease.  Raises as
        ``next_world`` does when nothing may be committed any more.
        """
        ...

    async def leave(self, failed: tuple[int | None, str] | None = None) -> None:
        """Leave for good: this process is done, or has ``failed``, in which step if in one, and why.  Idempotent."""
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
        pass  # nobody goes on without it

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
