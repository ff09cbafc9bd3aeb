"""What a supervisor's machine is told (events) and what it wants done (commands)."""

from __future__ import annotations

from dataclasses import dataclass

# -- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartAll:
    """The supervisor starts: the first event."""


@dataclass(frozen=True, slots=True)
class Started:
    """The child runs: the good answer to ``Start``."""

    child: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The child could not be started: the bad answer to ``Start``."""

    child: str
    failure: BaseException


@dataclass(frozen=True, slots=True)
class Stopped:
    """The child is gone: the only answer to ``Stop``."""

    child: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A running child ended by itself; ``failure`` is None if it did so in order."""

    child: str
    failure: BaseException | None


@dataclass(frozen=True, slots=True)
class StopChild:
    """Somebody wants this child stopped, and not started again."""

    child: str


@dataclass(frozen=True, slots=True)
class RestartChild:
    """Somebody wants this child started, and stopped before if it runs.  No failure, so it does not count."""

    child: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class StopAll:
    """The supervisor stops."""


Event = StartAll | Started | StartFailed | Stopped | Ended | StopChild | RestartChild | Tick | StopAll

# -- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start the child and answer ``Started`` or ``StartFailed``."""

    child: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the child, by force if need be, and answer ``Stopped``."""

    child: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before ``until``; ``Tick`` then.  Stands until that ``Tick``, or until another ``Wait``."""

    until: float


@dataclass(frozen=True, slots=True)
class FailStart:
    """``child`` never started, and all others are stopped: the supervisor cannot start.  The last command."""

    child: str
    failure: BaseException


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Restarts do not help, and all children are stopped: the supervisor fails.  The last command.

    ``child`` ended once more, after ``restarts`` restarts within the period; ``failure`` as in ``Ended``.
    """

    child: str
    restarts: int
    failure: BaseException | None


@dataclass(frozen=True, slots=True)
class Finish:
    """All children are stopped, as ``StopAll`` wanted.  The last command."""


Command = Start | Stop | Wait | FailStart | GiveUp | Finish
