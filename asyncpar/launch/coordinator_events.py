"""What the coordinator's machine is told (events) and what it wants done (commands)."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.core.observe.agent_line import Loss
from asyncpar.launch.failure import Failure
from asyncpar.launch.plan import Assignment, Hello, Outcome
from asyncpar.launch.vitals import RankState


@dataclass(frozen=True, slots=True)
class AgentArrived:
    """The agent ``agent`` (a number of our own) introduced itself."""

    agent: int
    hello: Hello


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
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class AgentStopped:
    """No process of ``generation`` is left on the agent's host."""

    agent: int
    generation: int


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Somebody asked ``agent`` to end the job, with a signal."""

    agent: int
    signal_number: int


@dataclass(frozen=True, slots=True)
class RankChanged:
    """An agent tells how one of its ranks is."""

    agent: int
    state: RankState


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = AgentArrived | AgentLost | RankEnded | AgentStopped | Interrupted | RankChanged | Tick


@dataclass(frozen=True, slots=True)
class Assign:
    """Have ``agent`` start its ranks."""

    agent: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Stop:
    """Have ``agent`` end its ranks of ``generation``, with ``signal_number`` first."""

    agent: int
    generation: int
    signal_number: int
    reason: str
    loss: Loss | None = None
    """The rank that has failed: the others are told of it first."""


@dataclass(frozen=True, slots=True)
class Condemn:
    """Have ``agent`` tell its ranks that one is lost, and kill it if it is one of its own."""

    agent: int
    generation: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell ``agent`` the outcome; it goes away."""

    agent: int
    outcome: Outcome


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


Command = Assign | Stop | Condemn | Finish | OpenGeneration | AnnounceExit
