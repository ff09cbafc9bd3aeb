"""What the coordinator's machine is told (events) and what it wants done (commands)."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.core.observe.agent_line import Loss
from asyncpar.launch.failure import RankFailure
from asyncpar.launch.plan import AgentAssignment, AgentHello, JobOutcome
from asyncpar.launch.vitals import RankState


@dataclass(frozen=True, slots=True)
class AgentArrived:
    """The agent ``agent`` (a number of our own) introduced itself."""

    agent: int
    hello: AgentHello


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The connection to ``agent`` ended."""

    agent: int
    cause: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank's process is gone; ``failure`` None: it ended with code 0."""

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
    """Somebody asked ``agent`` to end the job, with a signal."""

    agent: int
    signal_number: int


@dataclass(frozen=True, slots=True)
class RankChanged:
    """An agent tells how one of its ranks is."""

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
    """The rank that has failed: the others are told of it first."""


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
