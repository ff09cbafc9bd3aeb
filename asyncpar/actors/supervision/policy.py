"""Settings of a supervisor: which children to restart after which end, how often, and how soon.  Pure.

The terms are those of Erlang/OTP's ``supervisor`` (https://www.erlang.org/doc/apps/stdlib/supervisor.html); back-off is
not: OTP restarts at once, and so does the default here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from asyncpar.errors import UsageError

W = TypeVar("W", bound=StrEnum)


class Strategy(StrEnum):
    """The choice of the children that restart together with one that failed.

    ONE_FOR_ONE: that child only.  ONE_FOR_ALL: all children.  REST_FOR_ONE: that child and those that were started
    after it.
    """

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"


class Restart(StrEnum):
    """The ends after which a child is started again.

    PERMANENT: after any.  TRANSIENT: after a failure (being killed is one), not after it was stopped.  TEMPORARY:
    never; its supervisor forgets it.
    """

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """The limit of normal restarts: at most ``restarts`` within any ``period`` seconds (``math.inf``: ever).

    A restart of several children for one failure counts once; a restart that fails counts, and so does the next one.
    """

    restarts: int = 3
    period: float = 5.0

    def __post_init__(self) -> None:
        _require_count("restarts", self.restarts)
        _require_number("period", self.period)
        if not self.period > 0.0:
            raise UsageError(f"period: expected a positive number of seconds, got {self.period!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The delay before a restart: ``initial`` seconds, multiplied by ``factor`` after each failure in a row.

    It never exceeds ``maximum``.  ``jitter`` is the part of a delay, 0 to 1, that may be randomly removed, so that
    children which failed together do not come back together.  A child that has lived for ``reset_after`` seconds starts
    over at ``initial``.  The default restarts at once.
    """

    initial: float = 0.0
    factor: float = 2.0
    maximum: float = 60.0
    jitter: float = 0.0
    reset_after: float = 60.0

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "maximum", "jitter", "reset_after"):
            _require_number(name, getattr(self, name))
        if not (0.0 <= self.initial < math.inf):
            raise UsageError(f"initial: expected a finite number of seconds, 0 or more, got {self.initial!r}")
        if not (1.0 <= self.factor < math.inf):
            raise UsageError(f"factor: expected a finite number, 1 or more, got {self.factor!r}")
        if not (self.initial <= self.maximum < math.inf):
            raise UsageError(f"maximum: expected at least initial = {self.initial!r} and finite, got {self.maximum!r}")
        if not (0.0 <= self.jitter <= 1.0):
            raise UsageError(f"jitter: expected a number from 0 to 1, got {self.jitter!r}")
        if not self.reset_after >= 0.0:
            raise UsageError(f"reset_after: expected a number of seconds, 0 or more, got {self.reset_after!r}")

    def delay(self, failures: int, *, draw: float) -> float:
        """Return the seconds to wait after this many failures in a row (1 or more); ``draw`` is random, from 0 to 1."""
        if self.initial == 0.0:
            return 0.0
        full = self.maximum
        if self.factor == 1.0:
            full = self.initial
        elif (failures - 1) * math.log(self.factor) < math.log(self.maximum) - math.log(self.initial):
            full = min(self.maximum, self.initial * self.factor ** (failures - 1))
        return full * (1.0 - self.jitter * draw)


def parse_strategy(word: Strategy | str) -> Strategy:
    """Return the strategy of that name.  Raises ``UsageError``."""
    return _parse(Strategy, "strategy", word)


def parse_restart(word: Restart | str) -> Restart:
    """Return the kind of child of that name.  Raises ``UsageError``."""
    return _parse(Restart, "restart", word)


def _parse(words: type[W], argument: str, word: W | str) -> W:
    try:
        return words(word)
    except ValueError as error:
        allowed = ", ".join(repr(str(known)) for known in words)
        raise UsageError(f"{argument}: expected one of {allowed}, got {word!r}") from error


def _require_count(argument: str, given: object) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise UsageError(f"{argument}: expected a whole number, 0 or more, got {given!r}")


def _require_number(argument: str, given: object) -> None:
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise UsageError(f"{argument}: expected a number, got {given!r}")
