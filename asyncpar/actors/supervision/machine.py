"""State machine of a supervisor: which child starts or stops next, which ones restart, and when to give up.

Sans-I/O: feed events, obey commands.  The rules are those of Erlang/OTP's ``supervisor``, see
https://www.erlang.org/doc/apps/stdlib/supervisor.html and https://www.erlang.org/doc/system/sup_princ.html.

Theory of operation.  Each child has a *slot* with its phase (down, starting, up, stopping) and its wanted state (to
run; to be stopped first).  An event changes wanted states; then ``_advance`` takes one step towards them.  One child is
started or stopped at a time: every ``StartCommand`` and ``StopCommand`` is answered before the next one.  Children that
must stop are stopped first, in reverse order; then wanted ones are started, in order.  A failure in the middle of a
restart only changes the wanted states, and the next step follows from those.

A child that ends while it is about to be stopped anyway counts as stopped, not as another failure.  A restart of a
group starts all of its children, including those that had ended normally or had been stopped on request, but no
temporary ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from asyncpar.actors.supervision import events
from asyncpar.actors.supervision.policy import Backoff, Intensity, Restart, Strategy
from asyncpar.errors import UsageError


class ChildPhase(Enum):
    """Phase of a child, as known to the machine."""

    DOWN = auto()
    STARTING = auto()
    UP = auto()
    STOPPING = auto()


class _Attempt(Enum):
    """Kind of the next start, which decides what follows if it fails."""

    FIRST = auto()  # the supervisor cannot start
    AGAIN = auto()  # a failed restart: one more
    ASKED = auto()  # nothing: the caller gets the error


@dataclass(slots=True, eq=False)
class _ChildSlot:
    name: str
    restart: Restart
    phase: ChildPhase = ChildPhase.DOWN
    attempt: _Attempt = _Attempt.FIRST
    is_wanted: bool = True
    must_stop: bool = False
    not_before: float = -math.inf
    up_since: float = -math.inf
    failures: int = 0

    @property
    def is_alive(self) -> bool:
        return self.phase in (ChildPhase.UP, ChildPhase.STARTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRestarts:
    """Restarts that were made: when, and after how many failures in a row."""

    times: tuple[float, ...] = ()
    failures: int = 0


class SupervisorMachine:
    """Decisions of one supervisor.  ``children`` are in start order; ``draw`` returns jitter from 0 to 1.

    ``past`` are restarts made before this machine was created, which count as its own.
    """

    def __init__(
        self,
        children: Mapping[str, Restart],
        *,
        strategy: Strategy,
        intensity: Intensity,
        backoff: Backoff,
        draw: Callable[[], float],
        past: PastRestarts | None = None,
    ) -> None:
        self._slots = {name: _ChildSlot(name, restart) for name, restart in children.items()}
        self._strategy = strategy
        self._intensity = intensity
        self._backoff = backoff
        self._draw = draw
        self._restarts: deque[float] = deque(() if past is None else past.times)
        for slot in self._slots.values():
            slot.failures = 0 if past is None else past.failures
        self._waiting_until: float | None = None
        self._ending: events.FailStart | events.GiveUp | events.FinishCommand | None = None
        self._has_begun = False
        self._is_over = False

    @property
    def is_ending(self) -> bool:
        """Whether all children are being stopped, or were stopped."""
        return self._ending is not None

    @property
    def is_over(self) -> bool:
        """Whether the last command was returned."""
        return self._is_over

    @property
    def children(self) -> tuple[str, ...]:
        """The names of the children, in start order, without temporary ones that are gone."""
        return tuple(self._slots)

    def phase(self, child: str) -> ChildPhase:
        """Return the phase of a child.  Raises ``UsageError`` if there is no such child."""
        return self._find(child).phase

    def is_wanted(self, child: str) -> bool:
        """Return whether the child runs or is to be started.  Raises ``UsageError`` if there is no such child."""
        return self._find(child).is_wanted

    @property
    def past(self) -> PastRestarts:
        """The restarts so far, for a machine that continues from here."""
        failures = max((slot.failures for slot in self._slots.values()), default=0)
        return PastRestarts(times=tuple(self._restarts), failures=failures)

    def handle(self, event: events.Event, *, now: float) -> list[events.Command]:
        """Return the resulting commands.  Raises ``UsageError`` for an unknown child, or one that cannot restart."""
        if self._is_over:
            return []
        match event:
            case events.StartAll():
                self._has_begun = True
            case events.ChildStarted(child):
                self._started(child, now)
            case events.ChildStartFailed(child, failure):
                self._start_failed(child, failure, now)
            case events.ChildStopped(child):
                self._down(self._slots[child])
            case events.ChildEnded(child, failure):
                self._ended(child, failure, now)
            case events.StopRequest(child):
                self._stop_child(self._find(child))
            case events.RestartRequest(child):
                self._restart_child(self._find(child))
            case events.BackoffElapsed():
                self._waiting_until = None
            case events.StopAll():
                self._end(events.FinishCommand())
        return self._advance(now)

    # -- one step --------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[events.Command]:
        """Return the next step towards the wanted states."""
        slots = self._slots.values()
        if not (self._has_begun or self._ending) or any(
            slot.phase in (ChildPhase.STARTING, ChildPhase.STOPPING) for slot in slots
        ):
            return []
        for slot in reversed(slots):
            if slot.must_stop:
                slot.phase = ChildPhase.STOPPING
                return [events.StopCommand(slot.name)]
        if self._ending is not None:
            self._is_over = True
            return [self._ending]
        return self._start_next(now)

    def _start_next(self, now: float) -> list[events.Command]:
        pending = [slot for slot in self._slots.values() if slot.is_wanted and slot.phase is ChildPhase.DOWN]
        if not pending:
            return []
        due = pending[0]
        if self._strategy == Strategy.ONE_FOR_ONE:  # children are independent: one that waits does not delay the others
            due = min(pending, key=lambda slot: max(slot.not_before, now))
        if due.not_before <= now:
            due.phase = ChildPhase.STARTING
            return [events.StartCommand(due.name)]
        if due.not_before == self._waiting_until:
            return []
        self._waiting_until = due.not_before
        return [events.WaitCommand(due.not_before)]

    # -- events ----------------------------------------------------------------------------------------------------

    def _started(self, child: str, now: float) -> None:
        slot = self._slots[child]
        slot.phase, slot.attempt, slot.up_since = ChildPhase.UP, _Attempt.AGAIN, now

    def _start_failed(self, child: str, failure: BaseException, now: float) -> None:
        slot = self._slots[child]
        if slot.must_stop:
            self._down(slot)
            return
        slot.phase = ChildPhase.DOWN
        match slot.attempt:
            case _Attempt.FIRST:
                self._end(events.FailStart(child, failure))
            case _Attempt.ASKED:
                slot.is_wanted, slot.attempt = False, _Attempt.AGAIN
            case _Attempt.AGAIN:
                self._restart(slot, failure, now)

    def _ended(self, child: str, failure: BaseException | None, now: float) -> None:
        slot = self._slots.get(child)
        if slot is None or slot.phase is not ChildPhase.UP:
            return  # its end was expected, and has been answered
        if slot.must_stop:
            self._down(slot)
            return
        slot.phase = ChildPhase.DOWN
        if slot.restart == Restart.TEMPORARY:
            del self._slots[child]
        elif slot.restart == Restart.TRANSIENT and failure is None:
            slot.is_wanted = False
        else:
            if now - slot.up_since >= self._backoff.reset_after:
                slot.failures = 0
            self._restart(slot, failure, now)

    def _down(self, slot: _ChildSlot) -> None:
        """Record that a child that was to stop has ended."""
        slot.phase, slot.must_stop = ChildPhase.DOWN, False
        if slot.restart == Restart.TEMPORARY:
            del self._slots[slot.name]

    def _stop_child(self, slot: _ChildSlot) -> None:
        slot.is_wanted, slot.must_stop = False, slot.is_alive
        if slot.restart == Restart.TEMPORARY and slot.phase is ChildPhase.DOWN:
            del self._slots[slot.name]

    def _restart_child(self, slot: _ChildSlot) -> None:
        if slot.restart == Restart.TEMPORARY:
            raise UsageError(f"child: {slot.name!r} is temporary, and such children are never restarted")
        if self._ending is not None:
            raise UsageError(f"child: {slot.name!r} cannot be restarted: its supervisor is about to end")
        if not slot.is_wanted:  # it was down on purpose, so it may stay down
            slot.attempt = _Attempt.ASKED
        slot.is_wanted, slot.must_stop = True, slot.is_alive
        slot.failures, slot.not_before = 0, -math.inf

    # -- restarting ------------------------------------------------------------------------------------------------

    def _restart(self, slot: _ChildSlot, failure: BaseException | None, now: float) -> None:
        """Restart ``slot`` and the children that depend on it, or give up."""
        if not self._is_within_intensity(now):
            self._end(events.GiveUp(slot.name, self._intensity.restarts, failure))
            return
        slot.failures += 1
        slot.not_before = now + self._backoff.delay(slot.failures, draw=self._draw())
        slot.is_wanted = True
        for other in self._dependents(slot):
            other.is_wanted, other.must_stop = other.restart != Restart.TEMPORARY, other.is_alive
            if other.attempt is _Attempt.ASKED:
                other.attempt = _Attempt.AGAIN

    def _is_within_intensity(self, now: float) -> bool:
        """Count a restart; return False if that exceeds ``intensity``."""
        while self._restarts and self._restarts[0] < now - self._intensity.period:
            self._restarts.popleft()
        self._restarts.append(now)
        return len(self._restarts) <= self._intensity.restarts

    def _dependents(self, slot: _ChildSlot) -> list[_ChildSlot]:
        slots = list(self._slots.values())
        match self._strategy:
            case Strategy.ONE_FOR_ONE:
                return []
            case Strategy.ONE_FOR_ALL:
                return [other for other in slots if other is not slot]
            case Strategy.REST_FOR_ONE:
                return slots[slots.index(slot) + 1 :]

    def _end(self, ending: events.FailStart | events.GiveUp | events.FinishCommand) -> None:
        """Stop all children, then return ``ending``."""
        self._ending = self._ending or ending
        for slot in self._slots.values():
            slot.is_wanted, slot.must_stop = False, slot.is_alive

    def _find(self, child: str) -> _ChildSlot:
        if child not in self._slots:
            known = ", ".join(map(repr, self._slots)) or "none"
            raise UsageError(f"child: expected the name of a child ({known}), got {child!r}")
        return self._slots[child]
