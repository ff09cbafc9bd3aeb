"""Messages between agents and the coordinator, and the other commands of the coordinator: frozen values.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.core.observe.agent_line import Loss
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.vitals import RankState
from asyncpar.launch.wait_board import RankTold


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello:
    """The introduction of an agent.  ``node_rank`` None: any free place; ``least_nnodes`` None: all ``nnodes``.

    ``version`` is that of its package.
    """

    job: str
    nnodes: int
    least_nnodes: int | None = None
    nproc: int
    node_rank: int | None
    host: str
    version: str = ""


# -- orders of the coordinator: events of the agent's machine


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAssignment:
    """Start the ranks of this host: its place in one generation of the world.

    Its local rank ``l`` is rank ``rank_offset + l``.  ``master_addr`` and ``master_port`` are for scripts that bring
    a rendezvous of their own; the port was free when it was chosen.
    """

    generation: int
    restart_count: int
    group_rank: int
    group_world_size: int
    rank_offset: int
    world_size: int
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True, slots=True)
class StopRanks:
    """End the ranks of ``generation``, with ``signal_number`` first.

    ``loss`` is the failed rank that is the reason; the others are notified of it before they get the signal.
    """

    generation: int
    signal_number: int
    reason: str
    loss: Loss | None = None


@dataclass(frozen=True, slots=True)
class GiveUpRank:
    """Notify the ranks of ``generation`` that one is lost, and kill it if it is one of this host."""

    generation: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The end of the job: the exit code of the launcher and the message that it prints (none after success)."""

    exit_code: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Print ``text``: what the coordinator alone knows."""

    text: str


@dataclass(frozen=True, slots=True)
class TellCondition:
    """Notify the ranks of ``generation`` of what ``rank`` cannot tell them: ``how`` is ``is stopped``; "": it runs."""

    generation: int
    rank: int
    how: str


Order = AgentAssignment | StopRanks | GiveUpRank | JobOutcome | Announcement | TellCondition

# -- events of the coordinator's machine; it numbers agents as they connect


@dataclass(frozen=True, slots=True)
class AgentArrived:
    """``agent`` has connected."""

    agent: int
    hello: AgentHello


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The connection to ``agent`` has ended."""

    agent: int
    cause: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The process of a rank has ended; ``end.at`` is on the clock of the coordinator."""

    agent: int
    end: RankEnd


@dataclass(frozen=True, slots=True)
class AgentStopped:
    """No process of ``generation`` is left on the agent's host."""

    agent: int
    generation: int


@dataclass(frozen=True, slots=True)
class JobInterrupted:
    """``agent`` got a signal that ends the job."""

    agent: int
    signal_number: int


@dataclass(frozen=True, slots=True)
class RankChanged:
    """An agent reports the state of one of its ranks."""

    agent: int
    state: RankState


@dataclass(frozen=True, slots=True)
class CallerRefused:
    """Somebody came who could not prove to belong to the job."""

    who: str
    why: str


@dataclass(frozen=True, slots=True)
class RankSpoke:
    """A rank tells what it waits for, or that its event loop is blocked."""

    agent: int
    told: RankTold


@dataclass(frozen=True, slots=True)
class CoordinatorTick:
    """Time has passed."""


Event = (
    AgentArrived
    | AgentLost
    | RankEnded
    | AgentStopped
    | JobInterrupted
    | RankChanged
    | RankSpoke
    | CallerRefused
    | CoordinatorTick
)

# -- commands of the coordinator's machine


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Send ``order`` to ``agent``."""

    agent: int
    order: Order


@dataclass(frozen=True, slots=True)
class OpenGeneration:
    """From now on ranks may join ``generation``."""

    generation: int
    world_size: int


@dataclass(frozen=True, slots=True)
class AnnounceExit:
    """Tell the ranks that wait in the rendezvous that ``rank`` is gone."""

    generation: int
    rank: int
    how: str


Command = SendOrder | OpenGeneration | AnnounceExit
