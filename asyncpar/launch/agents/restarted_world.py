"""A world of a job that starts again with every world: notices among its hosts, and the ends of its ranks.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from asyncpar.core.observe.agent_line import Loss
from asyncpar.core.observe.rank_reports import Phase
from asyncpar.errors import ProtocolError
from asyncpar.hosts.messages import PlacedMember, WorldAnnounced, shown_host
from asyncpar.launch.agents.job_record import JobEnd
from asyncpar.launch.failure import LEFT_EARLY, RankEnd, add_leavers, choose_first, describe
from asyncpar.launch.vitals import NO_LIMITS, Condition, SilentRanks
from asyncpar.launch.wait_board import WaitBoard, WaitReport

_REASON_SECONDS = 0.3
"""Seconds from the failure of a rank until the others are ended, in which those that lost it can report it."""
_BLAME_SECONDS = 1.0
"""Additional seconds for the failure of a rank that others blame, as long as no other failure explains theirs."""


class HostRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that a host adds to a world, as all members receive it; ``rendezvous`` is the one its agent serves.

    Where there are certificates, ``certified`` has the numbers in those of the ranks, and ``role`` the label of the
    role in the agent's.  ``place`` is the place that the host asks for in the first world, ``master`` its
    ``MASTER_ADDR`` ("": the address of the rendezvous).
    """

    slots: int
    rendezvous: str
    certified: tuple[int, ...] | None = None
    role: str | None = None
    place: int | None = None
    master: str = ""


class HostReadiness(msgspec.Struct, frozen=True, kw_only=True):
    """A host is ready for a world: the restarts that it knows of and, on the first host, the port for ``MASTER_PORT``.

    Other hosts say 0.
    """

    restarts: int
    port: int = 0


class EndNotice(msgspec.Struct, frozen=True, tag="end"):
    """The process of a rank has ended; its failure was ``age`` seconds ago, since the clocks of hosts differ.

    ``was_asked``: it was asked to end before that.
    """

    end: RankEnd
    age: float = 0.0
    was_asked: bool = False


class ConditionNotice(msgspec.Struct, frozen=True, tag="condition"):
    """A rank is in a condition that it cannot report itself (``is stopped``); "": it runs."""

    rank: int
    how: str


class LossNotice(msgspec.Struct, frozen=True, tag="loss"):
    """A rank is given up, and will be killed, since it gives no sign of life."""

    loss: Loss


class WaitsNotice(msgspec.Struct, frozen=True, tag="waits"):
    """A rank reports what it waits for."""

    report: WaitReport


class LeftNotice(msgspec.Struct, frozen=True, tag="left"):
    """A rank has left the world; its process still runs."""

    rank: int


class DoneNotice(msgspec.Struct, frozen=True, tag="done"):
    """All ranks of a host have ended with code 0."""


Notice = EndNotice | ConditionNotice | LossNotice | WaitsNotice | LeftNotice | DoneNotice


def name_notice(notice: Notice) -> str:
    """Return the name under which ``notice`` supersedes earlier ones of its member."""
    match notice:
        case EndNotice(end):
            return f"end {end.rank}"
        case ConditionNotice(rank):
            return f"condition {rank}"
        case LossNotice(loss):
            return f"loss {loss.rank}"
        case WaitsNotice(report):
            return f"waits {report.rank}"
        case LeftNotice(rank):
            return f"left {rank}"
        case DoneNotice():
            return "done"


def encode_notice(notice: Notice) -> bytes:
    """Encode ``notice``."""
    return msgspec.msgpack.encode(notice)


def decode_notice(content: bytes) -> Notice:
    """Decode the notice in ``content``.  Raises ``ProtocolError`` if there is none."""
    try:
        notice: Notice = msgspec.msgpack.decode(content, type=Notice)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a notice of another host cannot be read ({error}); all must be of one version") from error
    return notice


@dataclass
class RestartedWorld:
    """A world as one of its hosts knows it, which is ``member``.

    ``failures`` and ``done`` are ranks of all hosts; ``late`` failed after the ranks here were asked to end.
    """

    announced: WorldAnnounced
    member: str
    running: set[int] = field(default_factory=set)
    failures: list[RankEnd] = field(default_factory=list)
    late: list[RankEnd] = field(default_factory=list)
    done: list[RankEnd] = field(default_factory=list)
    done_hosts: set[str] = field(default_factory=set)
    """The members whose ranks have all ended with code 0."""
    left: set[int] = field(default_factory=set)
    """Ranks of all hosts that have left the world."""
    lost_hosts: set[str] = field(default_factory=set)
    given_up: dict[int, str] = field(default_factory=dict)
    """By slot: how a rank was that was killed for it."""
    conditions: dict[int, Condition] = field(default_factory=dict)
    """The conditions of ranks of this host that were reported, by slot."""
    phases: dict[int, Phase | None] = field(default_factory=dict)
    """The phases of ranks of this host, by slot."""
    silent: SilentRanks = field(default_factory=lambda: SilentRanks(NO_LIMITS))
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    """The number of the last notice of each name of each member."""
    waits: WaitBoard = field(default_factory=WaitBoard)
    named: set[int] = field(default_factory=set)
    """The ranks whose wait for the world this host has explained to the others, with the rank that is missing."""
    has_started: bool = False
    is_over: bool = False
    has_announced_stop: bool = False
    signalled_at: float | None = None
    """When the ranks here were asked to end."""
    why: str = ""
    stop_at: float | None = None
    kill_at: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether all ranks here have ended, and none has failed."""
        return self.has_started and not self.running and not self.failures

    @property
    def next_deadline(self) -> float | None:
        """When something is due, None: never."""
        times = (self.stop_at, self.kill_at, self.waits.next_deadline, self.silent.next_deadline)
        return min((at for at in times if at is not None), default=None)

    @property
    def members(self) -> list[str]:
        """The hosts, as members, in the order of their ranks."""
        return [placed.name for placed in self.announced.members]

    @property
    def hosts(self) -> list[HostRanks]:
        """The ranks of each host, in that order."""
        return [msgspec.json.decode(placed.address, type=HostRanks) for placed in self.announced.members]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(ranks.slots for ranks in self.hosts)

    @property
    def offset(self) -> int:
        """The number of the first rank of this host."""
        return sum(ranks.slots for ranks in self.hosts[: self.members.index(self.member)])

    @property
    def certified(self) -> tuple[int, ...] | None:
        """The numbers in the certificates of the ranks, None if there are none."""
        parts = [ranks.certified for ranks in self.hosts]
        return None if None in parts else tuple(number for part in parts if part is not None for number in part)

    def is_new(self, member: str, name: str, number: int) -> bool:
        """Record a notice; return whether it is newer than those of its name that are known."""
        if number <= self.numbers.get((member, name), 0):
            return False
        self.numbers[member, name] = number
        return True

    def was_asked(self, end: RankEnd) -> bool:
        """Return whether a rank of this host has failed after it was asked to end; its process may end later."""
        return self.signalled_at is not None and end.at >= self.signalled_at

    def add_end(self, end: RankEnd, now: float, *, was_asked: bool = False) -> None:
        """Record the end of a rank; of one that ``was_asked`` to end, if it has something to report.

        After a failure the others are to end, once ranks that have lost that one could report it.
        """
        if not end.returncode:
            self.done.append(end)
        elif was_asked:
            self.late += [end] if end.report is not None or end.lost else []
        else:
            self.failures.append(end)
            is_explained = not all(failure.is_peer_error for failure in self.failures)
            stop_at = now + _REASON_SECONDS + (0.0 if is_explained else _BLAME_SECONDS)
            if self.signalled_at is None and not self.is_over:
                self.stop_at = stop_at if self.stop_at is None else min(self.stop_at, stop_at)

    @property
    def all_failures(self) -> tuple[RankEnd, ...]:
        """The ranks that have failed: the one that explains the others, then those in order of time."""
        if not self.failures:
            return ()
        first, _ = self.judge()
        others = [end for end in (*self.failures, *self.late) if end is not first]
        return (first, *sorted(others, key=lambda end: (end.at, end.rank)))

    def blame_leavers(self, now: float) -> None:
        """Add ranks that have left the world and still run to the failures that name them, if nothing else does."""
        ended = {end.rank for end in (*self.failures, *self.late, *self.done)}
        if not self.failures or not all(failure.is_peer_error for failure in self.failures):
            return
        for rank in sorted({failure.blames for failure in self.failures if failure.blames in self.left - ended}):
            self.failures.append(self.lost_rank(rank, LEFT_EARLY, now))

    def lose_host(self, host: str, why: str, now: float) -> list[RankEnd]:
        """Record the loss of ``host``; return the ends of its ranks that have not ended before."""
        self.lost_hosts.add(host)
        ended = {end.rank for end in (*self.failures, *self.late, *self.done)}
        ranks = [rank for rank in range(self.size) if self._placed(rank).host == host and rank not in ended]
        return [self.lost_rank(rank, why, now) for rank in ranks]

    def lost_rank(self, rank: int, why: str, now: float) -> RankEnd:
        """Return the end of a rank that is lost to the others, though its process may still run."""
        first = next(number for number in range(self.size) if self._placed(number) is self._placed(rank))
        return RankEnd(
            generation=self.announced.generation,
            rank=rank,
            local_rank=rank - first,
            host=self.host_of(rank),
            pid=0,
            returncode=1,
            at=now,
            lost=why,
        )

    def judge(self) -> tuple[RankEnd, JobEnd]:
        """Return the failure that explains the others, of all hosts, and the end of the job if it is the last one."""
        failures = add_leavers(self.failures, self.done)
        first = choose_first(failures, self.late)
        return first, JobEnd(exit_code=first.exit_code, message=describe(failures, self.late))

    def host_of(self, rank: int) -> str:
        """Return the name of the host of ``rank``, "" if there is no such rank."""
        return shown_host(self._placed(rank).host) if 0 <= rank < self.size else ""

    def _placed(self, rank: int) -> PlacedMember:
        """Return the host, as a member, of ``rank``."""
        of_hosts = zip(self.announced.members, self.hosts, strict=True)
        return [placed for placed, own in of_hosts for _ in range(own.slots)][rank]

    def is_here(self, rank: int) -> bool:
        """Return whether ``rank`` is one of this host."""
        own = self.hosts[self.members.index(self.member)].slots
        return 0 <= rank - self.offset < own
