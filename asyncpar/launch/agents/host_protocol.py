"""Events and commands of the machines that start, end and restart a job's ranks on one host.  Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from asyncpar.core.observe.agent_line import Loss
from asyncpar.hosts.messages import HostCommand, HostEvent
from asyncpar.hosts.pipe_messages import AgentMessage, RankMessage
from asyncpar.launch.agents.job_record import JobEnd
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.vitals import RankState
from asyncpar.launch.wait_board import WaitReport


@dataclass(frozen=True, slots=True)
class RankWrote:
    """The process of ``member`` has sent ``message`` over its pipe."""

    member: str
    message: RankMessage


@dataclass(frozen=True, slots=True)
class RankGone:
    """The process in ``slot`` has been reaped, and nothing of it is left."""

    slot: int
    end: RankEnd


@dataclass(frozen=True, slots=True)
class RankSilent:
    """The process in ``slot`` is stopped, or runs no Python code; ``how`` says which."""

    slot: int
    how: str


@dataclass(frozen=True, slots=True)
class RankResumed:
    """The process in ``slot``, which was stopped, goes on."""

    slot: int


@dataclass(frozen=True, slots=True)
class ConditionChanged:
    """The process in ``slot`` gives no sign of life, or gives one again; ``how`` says which."""

    slot: int
    how: str


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The state of the process in ``slot``, which has one world, has changed."""

    slot: int
    state: RankState


@dataclass(frozen=True, slots=True)
class WaitChanged:
    """A rank reports what it waits for."""

    report: WaitReport


@dataclass(frozen=True, slots=True)
class LeaveHost:
    """The ranks of this host are to leave at the end of a step, within ``grace`` seconds, because of ``why``."""

    grace: float
    why: str


@dataclass(frozen=True, slots=True)
class InterruptRanks:
    """This launcher got a signal that ends its job, which the ranks of this host get at once."""

    signal_number: int


@dataclass(frozen=True, slots=True)
class HostTick:
    """Time has passed."""


SlotEvent = (
    HostCommand
    | RankWrote
    | RankGone
    | RankSilent
    | RankResumed
    | ConditionChanged
    | StateChanged
    | WaitChanged
    | LeaveHost
    | InterruptRanks
    | HostTick
)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank in a world that lives as long as its processes; addresses are ``host:port``."""

    generation: int
    rank: int
    world_size: int
    group_rank: int
    group_world_size: int
    rendezvous: str
    master_addr: str
    master_port: int
    restarts: int
    certified: tuple[int, ...] | None = None
    """The numbers in the certificates of the world's ranks; None: there are none."""
    rendezvous_role: str | None = None
    """The label of the role in the certificate of the agent that serves the rendezvous."""


@dataclass(frozen=True, slots=True)
class StartRank:
    """Start the process of ``slot`` as ``member``; ``place`` None: it gets its worlds over its pipe."""

    slot: int
    member: str
    place: RankPlace | None = None


@dataclass(frozen=True, slots=True)
class SignalRank:
    """Send a signal to the process group of ``slot``."""

    slot: int
    signal_number: int


@dataclass(frozen=True, slots=True)
class AbandonRank:
    """Kill the process group of ``slot``, and pass on no more of its output, which nobody may read."""

    slot: int


@dataclass(frozen=True, slots=True)
class WriteToRank:
    """Write ``message`` to the pipe of ``member``."""

    member: str
    message: AgentMessage


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Announce to ``member`` for how long, counted from its question, it may commit."""

    member: str


@dataclass(frozen=True, slots=True)
class OpenRendezvous:
    """Serve the rendezvous of ``generation`` for ``world_size`` ranks; see ``RankPlace`` for ``certified``."""

    generation: int
    world_size: int
    certified: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class AnnounceExit:
    """Notify the ranks that wait in the rendezvous that ``rank`` is gone."""

    generation: int
    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class NotifyRanks:
    """Notify the ranks of this host that another rank is lost."""

    loss: Loss


@dataclass(frozen=True, slots=True)
class NotifyOfCondition:
    """Notify the ranks of this host of the condition of ``rank``, which cannot report it itself; "": it runs."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class ShowWorld:
    """Show a world of ``size`` ranks that begins, after ``restarts`` of the job.

    ``reason`` is why the ranks of the previous one ended, "" if there was none.
    """

    generation: int
    size: int
    restarts: int
    reason: str


@dataclass(frozen=True, slots=True)
class NotifyLeader:
    """Notify the leader of the group."""

    event: HostEvent


@dataclass(frozen=True, slots=True)
class PrintLine:
    """Print ``text`` on this host."""

    text: str


@dataclass(frozen=True, slots=True)
class RanksOver:
    """No process of the job is left here, and no more will start; ``end`` is the job's, None if the host leaves it."""

    end: JobEnd | None


SlotCommand = (
    StartRank
    | SignalRank
    | AbandonRank
    | WriteToRank
    | GrantLease
    | OpenRendezvous
    | ShowWorld
    | AnnounceExit
    | NotifyRanks
    | NotifyOfCondition
    | NotifyLeader
    | PrintLine
    | RanksOver
)


class SlotsMachine(Protocol):
    """Decides for the ranks of one job on one host."""

    @property
    def next_deadline(self) -> float | None:
        """When a ``HostTick`` is due; None: never."""
        ...

    def begin(self, now: float) -> list[SlotCommand]:
        """Begin the job, which is open."""
        ...

    def handle(self, event: SlotEvent, *, now: float) -> list[SlotCommand]:
        """Return the commands that follow from ``event``."""
        ...
