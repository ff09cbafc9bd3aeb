"""Events and commands of a supervisor's state machine."""

from __future__ import annotations

from dataclasses import dataclass

# -- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartAll:
    """Start all children.  The first event."""


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """``StartCommand`` succeeded: the child runs."""

    child: str


@dataclass(frozen=True, slots=True)
class ChildStartFailed:
    """``StartCommand`` failed: the child does not run."""

    child: str
    failure: BaseException


@dataclass(frozen=True, slots=True)
class ChildStopped:
    """``StopCommand`` is done: the child has ended."""

    child: str


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A running child ended by itself; ``failure`` is None if it did not fail."""

    child: str
    failure: BaseException | None


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to stop this child and not to start it again."""

    child: str


@dataclass(frozen=True, slots=True)
class RestartRequest:
    """A request to start this child, after stopping it if it runs.  Does not count as a failure."""

    child: str


@dataclass(frozen=True, slots=True)
class BackoffElapsed:
    """The time of the last ``WaitCommand`` has passed."""


@dataclass(frozen=True, slots=True)
class StopAll:
    """Stop all children and finish."""


Event = (
    StartAll
    | ChildStarted
    | ChildStartFailed
    | ChildStopped
    | ChildEnded
    | StopRequest
    | RestartRequest
    | BackoffElapsed
    | StopAll
)

# -- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartCommand:
    """Start the child and answer ``ChildStarted`` or ``ChildStartFailed``."""

    child: str


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Stop the child, or kill it after its ``shutdown`` seconds, and answer ``ChildStopped``."""

    child: str


@dataclass(frozen=True, slots=True)
class WaitCommand:
    """Answer ``BackoffElapsed`` at the time ``until``.  Replaces an earlier ``WaitCommand``."""

    until: float


@dataclass(frozen=True, slots=True)
class FailStart:
    """``child`` never started, and all others are stopped: the supervisor cannot start.  The last command."""

    child: str
    failure: BaseException


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Restarts do not help, and all children are stopped: the supervisor fails.  The last command.

    ``child`` ended once more, after ``restarts`` restarts within the period; ``failure`` as in ``ChildEnded``.
    """

    child: str
    restarts: int
    failure: BaseException | None


@dataclass(frozen=True, slots=True)
class FinishCommand:
    """All children are stopped, as ``StopAll`` wanted.  The last command."""


Command = StartCommand | StopCommand | WaitCommand | FailStart | GiveUp | FinishCommand
