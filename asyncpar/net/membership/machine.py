"""Decisions on when the ranks of a generation form a world, and answers to waiting ranks if they never do.

Sans-I/O: feed events, obey commands.  A *call* is one waiting request; the machine answers each call exactly once, with
``Welcome`` or ``RefuseRank``, unless it left.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from asyncpar.core.config.world import Member, World


class RefusalKind(StrEnum):
    """Reasons why a rank gets no world."""

    USAGE = "usage"
    STALE = "stale"
    TIMEOUT = "timeout"
    LOST = "lost"
    CLOSED = "closed"


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A rank requests the world of ``generation`` and waits until ``deadline``.

    ``settings`` must be equal on all ranks: they are compared and quoted, never parsed.  ``session`` is the same when a
    rank repeats its request because its connection broke; empty: not known.
    """

    call: int
    job: str
    generation: int
    world_size: int
    member: Member
    settings: str
    deadline: float
    session: str = ""


class Leave(msgspec.Struct, frozen=True):
    """The caller of ``call`` is gone and needs no answer."""

    call: int


class Open(msgspec.Struct, frozen=True):
    """``generation``, of ``world_size`` ranks, is in force from now on; ``job`` "": the same job."""

    generation: int
    world_size: int
    job: str = ""


class Exited(msgspec.Struct, frozen=True):
    """The process of ``rank`` ended (``how``: "exited with code 3"), as seen by its agent."""

    generation: int
    rank: int
    how: str


class DeadlineTick(msgspec.Struct, frozen=True):
    """Time has passed."""


class Close(msgspec.Struct, frozen=True):
    """No world will be formed any more."""

    reason: str


Event = Join | Leave | Open | Exited | DeadlineTick | Close


class Welcome(msgspec.Struct, frozen=True):
    """Answer ``call`` with ``world``."""

    call: int
    world: World


class Refusal(msgspec.Struct, frozen=True):
    """The answer to a rank that gets no world; ``ranks`` are missing or at fault."""

    kind: RefusalKind
    message: str
    ranks: tuple[int, ...] = ()


class RefuseRank(msgspec.Struct, frozen=True):
    """Answer ``call`` with ``refusal``."""

    call: int
    refusal: Refusal


Command = Welcome | RefuseRank


class RendezvousMachine:
    """Collects the ranks of one generation at a time.

    A failed generation (a rank is there twice, exited or disagrees on the settings) stays failed: all ranks that wait,
    and all later ones, get the same refusal at once.
    """

    def __init__(self, *, job: str, world_size: int | None = None, generation: int = 0) -> None:
        """``world_size`` None: no rank can join before ``Open``, early ranks wait for it."""
        self._job = job
        self._generation = generation
        self._size = world_size
        self._waiting: dict[int, Join] = {}
        self._world: World | None = None
        self._gone: dict[int, str] = {}
        self._failed: Refusal | None = None
        self._closed: Refusal | None = None

    @property
    def next_deadline(self) -> float | None:
        """The time at which a ``DeadlineTick`` is due, None if no rank waits."""
        return min((join.deadline for join in self._waiting.values()), default=None)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks for which others wait; none if no rank waits, or if the number of ranks is not known."""
        if self._size is None or not self._waiting:
            return ()
        present = {join.member.rank for join in self._waiting.values()}
        return tuple(rank for rank in range(self._size) if rank not in present)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        match event:
            case Join():
                return self._join(event)
            case Leave(call):
                self._waiting.pop(call, None)
            case Open(generation, world_size, job):
                return self._open(generation, world_size, job)
            case Exited(generation, rank, how):
                return self._exited(generation, rank, how)
            case DeadlineTick():
                return self._expire(now)
            case Close(reason):
                self._closed = Refusal(RefusalKind.CLOSED, reason)
                return self._refuse_all(self._closed)
        return []

    def _join(self, join: Join) -> list[Command]:
        refusal = self._closed or self._judge(join)
        if refusal is not None:
            return [RefuseRank(join.call, refusal)]
        if self._size is None:
            self._waiting[join.call] = join
            return []
        trouble = self._misfit(join, self._size)
        if self._world is not None:
            return [RefuseRank(join.call, trouble) if trouble is not None else self._rejoin(join, self._world)]
        if self._failed is not None:
            return [RefuseRank(join.call, self._failed)]
        stale = [call for call, other in self._waiting.items() if join.session and other.session == join.session]
        for call in stale:  # its connection broke, and it repeats the request
            del self._waiting[call]
        trouble = trouble or self._clash(join)
        self._waiting[join.call] = join
        if trouble is not None:
            return self._fail(trouble)
        return self._complete()

    def _judge(self, join: Join) -> Refusal | None:
        """Return the reason why ``join`` does not belong here, None if it does.  Other ranks are not affected."""
        rank = join.member.rank
        if join.job != self._job:
            return Refusal(RefusalKind.USAGE, f"job: expected {self._job!r}, rank {rank} came for {join.job!r}")
        if join.generation < self._generation:
            return Refusal(
                RefusalKind.STALE,
                f"rank {rank} belongs to generation {join.generation}; generation {self._generation} is in force",
            )
        if join.generation > self._generation:
            return Refusal(
                RefusalKind.USAGE,
                f"generation: expected {self._generation}, rank {rank} came for {join.generation}",
            )
        return None

    def _misfit(self, join: Join, size: int) -> Refusal | None:
        """Return the reason why no world of ``size`` ranks can hold ``join``."""
        rank = join.member.rank
        if join.world_size != size:
            message = f"world_size: expected {size}, rank {rank} came with {join.world_size}"
            return Refusal(RefusalKind.USAGE, message, (rank,))
        if not 0 <= rank < size:
            return Refusal(RefusalKind.USAGE, f"rank: expected 0..{size - 1}, got {rank}", (rank,))
        return None

    def _clash(self, join: Join) -> Refusal | None:
        """Return the reason why ``join`` cannot be in one world with the ranks before it."""
        member = join.member
        if member.rank in self._gone:
            return self._lost(member.rank)
        for other in self._waiting.values():
            if other.member.rank == member.rank:
                return Refusal(
                    RefusalKind.USAGE,
                    f"rank: {member.rank} came twice, at {_place(other.member)} and at {_place(member)}; "
                    "each rank of a world needs a number of its own",
                    (member.rank,),
                )
            if other.settings != join.settings:
                return Refusal(
                    RefusalKind.USAGE,
                    f"settings: rank {other.member.rank} has {other.settings!r}, rank {member.rank} has "
                    f"{join.settings!r}; they must be equal on all ranks",
                    (other.member.rank, member.rank),
                )
        return None

    def _rejoin(self, join: Join, world: World) -> Command:
        """Answer a rank that joins a complete world: welcome it if it is a member (its first answer got lost)."""
        if world.members[join.member.rank] == join.member:
            return Welcome(join.call, world)
        there = world.members[join.member.rank]
        message = (
            f"rank: {there.rank} joined this world already, at {_place(there)}, and comes again, at "
            f"{_place(join.member)}; a rank joins once: keep one node for the whole program"
        )
        return RefuseRank(join.call, Refusal(RefusalKind.USAGE, message, (there.rank,)))

    def _complete(self) -> list[Command]:
        if len(self._waiting) != self._size:
            return self._refuse_all(self._lost(next(iter(self._gone)))) if self._gone else []  # the first one lost
        members = sorted((join.member for join in self._waiting.values()), key=lambda member: member.rank)
        self._world = World(members=tuple(members), generation=self._generation, job=self._job)
        calls = list(self._waiting)
        self._waiting.clear()
        return [Welcome(call, self._world) for call in calls]

    def _open(self, generation: int, world_size: int, job: str) -> list[Command]:
        if generation < self._generation or (generation == self._generation and self._size is not None):
            return []
        early = list(self._waiting.values())
        self._generation, self._size, self._job = generation, world_size, job or self._job
        self._waiting, self._gone = {}, {}
        self._world = self._failed = None
        return [command for join in early for command in self._join(join)]

    def _exited(self, generation: int, rank: int, how: str) -> list[Command]:
        if generation != self._generation or self._world is not None:
            return []
        self._gone.setdefault(rank, how)
        return self._fail(self._lost(rank)) if self._waiting else []

    def _lost(self, rank: int) -> Refusal:
        message = f"rank {rank} {self._gone[rank]} before it joined the world"
        return Refusal(RefusalKind.LOST, message, (rank,))

    def _expire(self, now: float) -> list[Command]:
        late = [join for join in self._waiting.values() if join.deadline <= now]
        if not late:
            return []
        size = self._size or late[0].world_size
        present = {join.member.rank for join in self._waiting.values()}
        missing = tuple(rank for rank in range(size) if rank not in present)
        message = f"the world of {size} ranks (generation {self._generation}) is not complete; missing {_list(missing)}"
        for join in late:
            del self._waiting[join.call]
        return [RefuseRank(join.call, Refusal(RefusalKind.TIMEOUT, message, missing)) for join in late]

    def _fail(self, refusal: Refusal) -> list[Command]:
        self._failed = refusal
        return self._refuse_all(refusal)

    def _refuse_all(self, refusal: Refusal) -> list[Command]:
        calls = list(self._waiting)
        self._waiting.clear()
        return [RefuseRank(call, refusal) for call in calls]


def _place(member: Member) -> str:
    return f"{member.host} ({member.address or 'no address'})"


def _list(ranks: tuple[int, ...], *, limit: int = 20) -> str:
    """Return "rank 3" or "ranks 1, 2, 5", cut after ``limit``."""
    shown = ", ".join(str(rank) for rank in ranks[:limit])
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
