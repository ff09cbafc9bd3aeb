"""What an agent's machine is told (events) and what it wants done (commands)."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.core.observe.agent_line import Loss
from asyncpar.launch.plan import Assignment, Outcome


@dataclass(frozen=True, slots=True)
class Assigned:
    """The coordinator wants this host's ranks to start."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class CrewGone:
    """No process of ``generation`` is left here, and all output has been passed on."""

    generation: int


@dataclass(frozen=True, slots=True)
class StopOrdered:
    """The coordinator wants the ranks of ``generation`` to end."""

    generation: int
    signal_number: int
    reason: str
    loss: Loss | None = None
    """The rank that is the reason, of which the others are told first."""


@dataclass(frozen=True, slots=True)
class Condemned:
    """A rank of ``generation`` is given up."""

    generation: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class Finished:
    """The coordinator says how the job ended."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Signalled:
    """This process got a signal that asks it to end."""

    signal_number: int


@dataclass(frozen=True, slots=True)
class OutputBroken:
    """Our output cannot be written: ``cause``, "" when whoever read it has left."""

    cause: str


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The coordinator cannot be reached, or went away."""

    cause: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Assigned | CrewGone | StopOrdered | Condemned | Finished | Signalled | OutputBroken | CoordinatorLost | Tick


@dataclass(frozen=True, slots=True)
class StartCrew:
    """Start the ranks."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class SignalCrew:
    """Send a signal to the process group of each rank."""

    signal_number: int


@dataclass(frozen=True, slots=True)
class KillCrew:
    """End each rank's process group now, and stop waiting for its output."""


@dataclass(frozen=True, slots=True)
class KillRank:
    """End the process group of one rank, if it is one of this host."""

    rank: int


@dataclass(frozen=True, slots=True)
class TellRanks:
    """Tell the ranks of this host that another one is lost."""

    loss: Loss


@dataclass(frozen=True, slots=True)
class TellStopped:
    """Report that nothing of ``generation`` is left."""

    generation: int


@dataclass(frozen=True, slots=True)
class TellInterrupted:
    """Report that somebody asked for the end of the job."""

    signal_number: int


@dataclass(frozen=True, slots=True)
class Say:
    """Tell people."""

    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """Go, with this outcome."""

    outcome: Outcome


Command = StartCrew | SignalCrew | KillCrew | KillRank | TellRanks | TellStopped | TellInterrupted | Say | Exit
