"""Events and commands of the coordinator's machine."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.core.observe.agent_line import Loss
from asyncpar.launch.failure import RankFailure
from asyncpar.launch.plan import AgentAssignment, AgentHello, JobOutcome
from asyncpar.launch.vitals import RankState


@dataclass(frozen=True, slots=True)
class AgentArrived:
    """An agent has connected; the coordinator numbers it ``agent``."""

    agent: int
    hello: AgentHello


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The connection to ``agent`` has ended."""

    agent: int
    cause: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The process of a rank has ended; ``failure`` is None for code 0."""

    agent: int
    generation: int
    rank: int
    failure: RankFailure | None


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
class CoordinatorTick:
    """Time has passed."""


Event = AgentArrived | AgentLost | RankEnded | AgentStopped | JobInterrupted | RankChanged | CoordinatorTick


@dataclass(frozen=True, slots=True)
class Assign:
    """Have ``agent`` start its ranks."""

    agent: int
    assignment: AgentAssignment


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Have ``agent`` end its ranks of ``generation``, with ``signal_number`` first."""

    agent: int
    generation: int
    signal_number: int
    reason: str
    loss: Loss | None = None
    """The failed rank; the others are notified of it before they get the signal."""


@dataclass(frozen=True, slots=True)
class GiveUpRank:
    """Have ``agent`` tell its ranks that one is lost, and kill it if it is one of its own."""

    agent: int
    generation: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class FinishJob:
    """Tell ``agent`` the outcome; it goes away."""

    agent: int
    outcome: JobOutcome


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


Command = Assign | StopRanks | GiveUpRank | FinishJob | OpenGeneration | AnnounceExit
