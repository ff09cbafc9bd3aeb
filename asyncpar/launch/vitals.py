"""Decide the condition of ranks from their agents' observations, and when ranks that do not run are given up.  Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from asyncpar.core.observe.rank_reports import Phase
from asyncpar.core.observe.waits import CONDITION_WORDS

LOOK_SECONDS: Final = 0.2
"""Seconds between two inspections of the ranks by an agent."""

HUNG_SECONDS: Final = 5.0
"""Seconds without a heartbeat, sent every second, after which a rank counts as running no Python code."""

_WINDOW_SECONDS: Final = 2.0
_BUSY_SHARE: Final = 0.1
"""A process that uses this share of a core is alive.  With a lock held forever it uses less: its threads only wait."""
_BLOCKED_SHARE: Final = 0.5


class Condition(StrEnum):
    """The condition of a rank's process; in all but ``WELL`` it gives no sign of life that requires Python code.

    ``BUSY``: it computes.  ``UNINTERRUPTIBLE``: it is blocked in the kernel.  ``HUNG``: neither.
    """

    WELL = "well"
    STOPPED = "stopped"
    HUNG = "hung"
    BUSY = "busy"
    UNINTERRUPTIBLE = "uninterruptible"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """A process at one moment; ``cpu`` is the processor time that all its threads have used, in seconds.

    ``resident`` is the memory that it holds, in bytes.
    """

    is_stopped: bool = False
    is_uninterruptible: bool = False
    cpu: float = 0.0
    resident: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of a rank as its agent sees it; it has been in ``condition`` for ``seconds``.

    ``phase`` None: none was reported; programs that do not use asyncpar report none.  ``place`` is the place in the
    program of a rank that is not well, "" if its memory does not show it.
    """

    generation: int
    rank: int
    phase: Phase | None = None
    condition: Condition = Condition.WELL
    seconds: float = 0.0
    place: str = ""

    def describe(self) -> str:
        """Return the notice to others: ``is stopped (SIGSTOP, or a debugger), at train.py:57``; "" if well."""
        words = CONDITION_WORDS[self.condition]
        return f"{words}, at {self.place}" if words and self.place else words


class Vitals:
    """Follows one rank.  Time in which the agent itself did not run, or was late, does not count."""

    def __init__(self) -> None:
        self.phase: Phase | None = None
        self.condition = Condition.WELL
        self.seconds = 0.0
        self._stopped = self._quiet = 0.0
        self._idle = self._computing = 0.0
        """How long, while quiet, it has used no processor time, or has used some."""
        self._recent: deque[tuple[float, ProcessSample]] = deque()

    def beat(self) -> None:
        """Record a heartbeat."""
        self._quiet = 0.0

    def enter(self, phase: Phase) -> None:
        """Record the phase that the rank reports."""
        self.phase = phase
        self._quiet = 0.0

    def update(self, seen: ProcessSample, *, now: float) -> bool:
        """Update the condition; return whether it has changed."""
        passed = min(now - self._recent[-1][0], 2 * LOOK_SECONDS) if self._recent else 0.0
        self._recent.append((now, seen))
        while now - self._recent[0][0] > _WINDOW_SECONDS and len(self._recent) > 2:
            self._recent.popleft()
        self._stopped = self._stopped + passed if seen.is_stopped else 0.0
        beats = self.phase in (Phase.FORMING, Phase.MEMBER)
        self._quiet = self._quiet + passed if beats and not seen.is_stopped else 0.0
        is_busy = self._share_of_core() >= _BUSY_SHARE
        self._idle = 0.0 if is_busy else min(self._idle + passed, self._quiet)
        self._computing = min(self._computing + passed, self._quiet) if is_busy else 0.0
        before = self.condition
        self.condition, self.seconds = self._judge(seen)
        return self.condition is not before

    def _judge(self, seen: ProcessSample) -> tuple[Condition, float]:
        if seen.is_stopped:
            return Condition.STOPPED, self._stopped
        if self._quiet < HUNG_SECONDS:
            return Condition.WELL, 0.0
        if self._computing > 0.0:
            return Condition.BUSY, self._computing
        blocked = sum(each.is_uninterruptible for _, each in self._recent)
        return Condition.UNINTERRUPTIBLE if blocked >= _BLOCKED_SHARE * len(
            self._recent
        ) else Condition.HUNG, self._idle

    def _share_of_core(self) -> float:
        (began, first), (ended, last) = self._recent[0], self._recent[-1]
        return (last.cpu - first.cpu) / (ended - began) if ended > began else 0.0


FORMING_SECONDS: Final = 3.0
"""Seconds that a rank may be stopped while others wait for it to join the world, where stopped ranks have a limit."""

_WORDS: Final = {
    Condition.STOPPED: "was stopped",
    Condition.HUNG: "ran no Python code (something held its interpreter lock)",
    Condition.BUSY: "ran no Python code (a C call held its interpreter lock, and computed)",
    Condition.UNINTERRUPTIBLE: "waited in the kernel (uninterruptible: its disk or network file system did not answer)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimits:
    """Seconds that a rank may give no sign of life before it is given up; None or infinity: no limit.

    ``silent`` is for all ranks that use no processor time, ``stopped`` for stopped ones if it is less,
    ``busy`` for those that compute.
    """

    silent: float | None = None
    stopped: float | None = None
    busy: float | None = None

    def of(self, condition: Condition) -> float | None:
        """Return the limit for ``condition``."""
        return min(self._options(condition).values(), default=None)

    def _options(self, condition: Condition) -> dict[str, float]:
        """Return the limits that apply to ``condition``, by option."""
        options = {"--busy-after": self.busy} if condition is Condition.BUSY else {"--silent-after": self.silent}
        if condition is Condition.STOPPED:
            options["--stopped-after"] = self.stopped
        return {name: limit for name, limit in options.items() if limit is not None and math.isfinite(limit)}

    def explain(self, condition: Condition, what: str = "the job") -> str:
        """Return the consequence for a rank in ``condition``, as the rest of a warning; ``what`` ends with it."""
        options = self._options(condition)
        if options:
            name = min(options, key=options.__getitem__)
            return f"after {options[name]:g} s of it ({name}) {what} ends"
        names = {Condition.STOPPED: "--stopped-after", Condition.BUSY: "--busy-after"}
        return f"the job waits for it ({names.get(condition, '--silent-after')} SECONDS would end {what})"


NO_LIMITS: Final = SilenceLimits()


def describe_state(state: RankState, limits: SilenceLimits) -> str:
    """Return the line that is printed when the condition of a rank has changed."""
    if state.condition is Condition.WELL:
        return f"rank {state.rank} runs again"
    at = f"; it is at {state.place}" if state.place else ""
    return f"rank {state.rank} {CONDITION_WORDS[state.condition]}; {limits.explain(state.condition)}{at}"


class SilentRanks:
    """Follows the ranks of one generation, which may be silent up to ``limits``."""

    def __init__(self, limits: SilenceLimits) -> None:
        self._limits = limits
        self._states: dict[int, RankState] = {}
        self._silent_since: dict[int, float] = {}

    def take(self, state: RankState, *, now: float) -> None:
        """Record the state of a rank."""
        self._states[state.rank] = state
        if state.condition is Condition.WELL:
            self._silent_since.pop(state.rank, None)
        else:
            self._silent_since[state.rank] = now - max(0.0, state.seconds)

    def forget(self, rank: int) -> None:
        """Forget a rank whose process has ended or is to be killed."""
        self._silent_since.pop(rank, None)
        self._states.pop(rank, None)

    def clear(self) -> None:
        """Forget all ranks, before a new generation."""
        self._states.clear()
        self._silent_since.clear()

    @property
    def next_deadline(self) -> float | None:
        """When the next rank is to be given up, None if none is silent."""
        return min((at for rank in self._silent_since if (at := self._deadline(rank)) is not None), default=None)

    def expired(self, now: float) -> list[tuple[int, str]]:
        """Return the ranks that are to be given up now, and why."""
        late = [rank for rank in self._silent_since if (at := self._deadline(rank)) is not None and at <= now]
        return [(rank, self._describe(rank, now)) for rank in sorted(late)]

    def _deadline(self, rank: int) -> float | None:
        state = self._states[rank]
        limit = self._limits.of(state.condition)
        if limit is None:
            return None
        if state.condition is Condition.STOPPED and state.phase in (None, Phase.FORMING) and self._is_forming():
            limit = min(limit, FORMING_SECONDS)
        return self._silent_since[rank] + limit

    def _is_forming(self) -> bool:
        return any(state.phase is Phase.FORMING for state in self._states.values())

    def _describe(self, rank: int, now: float) -> str:
        state = self._states[rank]
        where = " while the world was forming" if state.phase in (None, Phase.FORMING) else ""
        return f"{_WORDS[state.condition]} for {now - self._silent_since[rank]:.1f} s{where}"
