"""Messages between agents and the coordinator, and the other commands of the coordinator: frozen values.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from asyncpar.core.observe.agent_line import Loss
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.vitals import RankState
from asyncpar.launch.wait_board import WaitReport


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello:
    """The introduction of an agent.  ``node_rank`` None: any free place; ``version`` is that of its package."""

    job: str
    nnodes: int
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


class StopRanks(msgspec.Struct, frozen=True):
    """End the ranks of ``generation``, with ``signal_number`` first.

    ``loss`` is the failed rank that is the reason; the others are notified of it before they get the signal.
    """

    generation: int
    signal_number: int
    reason: str
    loss: Loss | None = None


class GiveUpRank(msgspec.Struct, frozen=True):
    """Notify the ranks of ``generation`` that one is lost, and kill it if it runs on this host."""

    generation: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The end of the job: the exit code of the launcher and the message that it prints (none after success)."""

    exit_code: int
    message: str = ""


class Announcement(msgspec.Struct, frozen=True):
    """Print ``text``, which only the coordinator knows."""

    text: str


@dataclass(frozen=True, slots=True)
class AnnounceCondition:
    """Notify the ranks of ``generation`` of the condition of ``rank``: ``how`` is ``is stopped``; "": it runs."""

    generation: int
    rank: int
    how: str


Order = AgentAssignment | StopRanks | GiveUpRank | JobOutcome | Announcement | AnnounceCondition

# -- events of the coordinator's machine; it numbers agents as they connect


class AgentArrived(msgspec.Struct, frozen=True):
    """``agent`` has connected."""

    agent: int
    hello: AgentHello


class AgentLost(msgspec.Struct, frozen=True):
    """The connection to ``agent`` has ended."""

    agent: int
    cause: str


class RankEnded(msgspec.Struct, frozen=True):
    """The process of a rank has ended; ``end.at`` is on the clock of the coordinator."""

    agent: int
    end: RankEnd


class AgentStopped(msgspec.Struct, frozen=True):
    """No process of ``generation`` is left on the agent's host."""

    agent: int
    generation: int


class JobInterrupted(msgspec.Struct, frozen=True):
    """``agent`` got a signal that ends the job."""

    agent: int
    signal_number: int


class RankChanged(msgspec.Struct, frozen=True):
    """An agent reports the state of one of its ranks."""

    agent: int
    state: RankState


class CallerRefused(msgspec.Struct, frozen=True):
    """A caller was refused because it could not prove that it belongs to the job."""

    who: str
    why: str


class RankReported(msgspec.Struct, frozen=True):
    """A rank reports what it waits for, or that its event loop is blocked."""

    agent: int
    report: WaitReport


class CoordinatorTick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = (
    AgentArrived
    | AgentLost
    | RankEnded
    | AgentStopped
    | JobInterrupted
    | RankChanged
    | RankReported
    | CallerRefused
    | CoordinatorTick
)

# -- commands of the coordinator's machine


class SendOrder(msgspec.Struct, frozen=True):
    """Send ``order`` to ``agent``."""

    agent: int
    order: Order


class OpenGeneration(msgspec.Struct, frozen=True):
    """Let ranks join ``generation`` from now on.

    ``restarts`` are those so far that count; ``reason`` is why the previous generation ended, "" for the first one.
    """

    generation: int
    world_size: int
    restarts: int = 0
    reason: str = ""


class AnnounceExit(msgspec.Struct, frozen=True):
    """Notify the ranks that wait in the rendezvous that ``rank`` is gone."""

    generation: int
    rank: int
    how: str


Command = SendOrder | OpenGeneration | AnnounceExit

# -- commands of the machines of agents


class NotifyRanks(msgspec.Struct, frozen=True):
    """Notify the ranks of this host that another rank is lost."""

    loss: Loss


class NotifyOfCondition(msgspec.Struct, frozen=True):
    """Notify the ranks of this host of the condition of ``rank``, which cannot report it itself; "": it runs."""

    rank: int
    how: str
