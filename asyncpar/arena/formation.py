"""Form the arena of one host: its ranks meet, exchange descriptors, prove that they share memory; all of them or none.

Theory of operation.  The ranks whose ``host_id`` is equal are candidates, and the lowest, the convener, listens on an
abstract Unix socket whose name only those can compute who hold the job secret.  The others connect.  Both ends ask the
kernel who the other is (the same user), and then prove that they hold the secret, before a byte is parsed.  After that:

    attendee to convener     Offer, with descriptors of its segment, doorbell and process; or Unable, which says why
    convener to attendees    Roster: all offers, all descriptors; then everyone maps all segments
    attendee to convener     Ready, or Unable
    convener to attendees    Verdict; then everyone closes its socket

A host is proved by reading: each rank finds in each segment it has mapped the random number that the owner wrote there
and told the convener on another way.  Nobody uses the arena before a good verdict, so either all ranks have it or none.
(The one exception is no exception for those who work with it: a rank that dies or gives up while the verdict travels is
seen as lost, or as having left, by those who have an arena.)

Nothing leaks: memory has no name, sockets are abstract, every descriptor is closed on exec, and whoever owns one here
closes it when the formation ends, in whatever way, cancellation included.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from asyncpar.arena.arena import Arena
from asyncpar.arena.attendee import Attendee
from asyncpar.arena.contribution import Contribution, OnLeft, OnLost, assemble, contribute
from asyncpar.arena.convener import Convener
from asyncpar.arena.formation_messages import Offer, Unable, Verdict, describe
from asyncpar.arena.meeting import Meeting
from asyncpar.arena.settings import ArenaSettings
from asyncpar.config.world import World
from asyncpar.errors import AsyncparError, PeerLost, UsageError

_log = logging.getLogger(__name__)

Contribute = Callable[[int, ArenaSettings], Contribution]


async def form_arena(
    *,
    world: World,
    rank: int,
    secret: bytes,
    settings: ArenaSettings,
    on_lost: OnLost,
    on_left: OnLeft,
    contribute: Contribute = contribute,
) -> Arena | None:
    """Return the arena of the host of ``rank``; all its ranks call this with equal ``settings``, and get one or none.

    None: there is none, because it is turned off, the rank is alone on its host, or it is impossible; the lowest rank
    of the host logs why.  If ``settings`` require one, ``UsageError`` or ``PeerLost`` says why instead.

    Afterwards ``on_lost`` is called, with a cause, when a peer's process ends, and ``on_left`` when a peer has closed
    its arena: at most one of them, once, per peer, on the event loop.
    """
    meeting = Meeting.of(world, rank, secret=secret)
    idle = _reason_for_none(meeting, settings)
    if idle:
        if settings.required and world.size > 1:
            raise UsageError(f"arena: {idle}")
        if rank == meeting.convener:
            _log.info("no arena on host %s: %s", world.members[rank].host, idle)
        return None
    forming = _Forming(meeting, rank, settings, on_lost=on_lost, on_left=on_left)
    try:
        return await forming.run(contribute)
    except (AsyncparError, OSError) as error:
        if settings.required:
            raise _typed(error, world) from error
        if rank == meeting.convener:
            _log.warning("no arena on host %s, lanes will do: %s", world.members[rank].host, describe(error))
        return None


class _Forming:
    """One rank's part in a formation: what it owns until the verdict."""

    def __init__(
        self, meeting: Meeting, rank: int, settings: ArenaSettings, *, on_lost: OnLost, on_left: OnLeft
    ) -> None:
        self._meeting = meeting
        self._rank = rank
        self._settings = settings
        self._on_lost = on_lost
        self._on_left = on_left
        self._contribution: Contribution | None = None
        self._arena: Arena | None = None

    async def run(self, contribute: Contribute) -> Arena:
        """Take part.  Raises ``AsyncparError`` or ``OSError`` that says why there is no arena."""
        if sys.platform != "linux":
            raise UsageError(f"it needs Linux, this is {sys.platform}")
        try:
            verdict = await self._meet(self._contribute(contribute))
            if verdict.problem:
                raise _error(verdict)
            assert self._arena is not None, "a good verdict needs every rank's Ready"
            assert self._contribution is not None
            self._contribution.lent.close()
            self._arena.watch()
            return self._arena
        except BaseException:
            self._let_go()
            raise

    def _contribute(self, contribute: Contribute) -> Offer | Unable:
        try:
            self._contribution = contribute(self._rank, self._settings)
        except (AsyncparError, OSError) as error:
            return Unable(describe(error))
        return self._contribution.offer

    async def _meet(self, own: Offer | Unable) -> Verdict:
        descriptors = () if self._contribution is None else self._contribution.descriptors
        seconds = self._settings.seconds
        if self._rank == self._meeting.convener:
            return await Convener(self._meeting, own, descriptors, assemble=self._assemble).convene(seconds=seconds)
        attendee = Attendee(self._meeting, self._rank, own, descriptors, assemble=self._assemble)
        return await attendee.attend(seconds=seconds)

    def _assemble(self, offers: Sequence[Offer], descriptors: dict[int, list[int]]) -> None:
        assert self._contribution is not None, "a roster needs every rank's offer"
        self._arena = assemble(
            self._contribution,
            offers,
            descriptors,
            polls=self._settings.polls,
            on_lost=self._on_lost,
            on_left=self._on_left,
        )

    def _let_go(self) -> None:
        """Close everything; peers who have an arena all the same see that this rank has left."""
        if self._arena is not None:
            self._arena.close()
        if self._contribution is not None:
            self._contribution.close()


def _reason_for_none(meeting: Meeting, settings: ArenaSettings) -> str:
    if settings.is_off:
        return "it is turned off (ASYNCPAR_ARENA_BYTES)"
    if len(meeting.ranks) == 1:
        return f"rank {meeting.convener} is alone there"
    return ""


def _error(verdict: Verdict) -> AsyncparError:
    if verdict.culprit is None:
        return UsageError(verdict.problem)
    return PeerLost(verdict.problem, rank=verdict.culprit, operation="forming the arena", cause=verdict.problem)


def _typed(error: Exception, world: World) -> AsyncparError:
    """Return the error of a formation as whoever must act should see it."""
    problem = f"arena: {describe(error)}"
    if isinstance(error, PeerLost) and error.rank is not None:
        host = world.members[error.rank].host
        return PeerLost(problem, rank=error.rank, host=host, operation=error.operation, cause=error.cause)
    return UsageError(problem)
