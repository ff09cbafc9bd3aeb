"""Decide for one host: when to start, signal and kill its ranks, what to tell the coordinator, when to go.

Sans-I/O: feed events, obey commands.  The *crew* is what runs of one generation on this host; whatever happens, it is
asked to end, killed after the grace period, and given up on a while after that: an agent always ends.
"""

from __future__ import annotations

import signal

from asyncpar.core.observe.agent_line import Loss
from asyncpar.launch.agent_events import (
    Assigned,
    Command,
    Condemned,
    CoordinatorLost,
    CrewGone,
    Event,
    Exit,
    Finished,
    KillCrew,
    KillRank,
    OutputBroken,
    Say,
    SignalCrew,
    Signalled,
    StartCrew,
    StopOrdered,
    TellInterrupted,
    TellRanks,
    TellStopped,
    Tick,
)
from asyncpar.launch.failure import exit_code_of
from asyncpar.launch.plan import Assignment, Outcome

_ANSWER_PATIENCE = 3.0
"""How long an interrupted agent without ranks waits for the coordinator's word."""
_KILL_PATIENCE = 5.0
"""How long the kernel may take to end killed processes."""
_REASON_PATIENCE = 0.3
"""How long ranks have, from hearing that another one is lost, until they are asked to end: so they know the reason."""


class AgentMachine:
    """The mind of one host's agent."""

    def __init__(self, *, grace: float) -> None:
        self._grace = grace
        self._crew: int | None = None
        self._interrupted: int | None = None
        self._outcome: Outcome | None = None
        self._signal_at: tuple[float, int] | None = None
        self._kill_at: float | None = None
        self._leave_at: float | None = None
        self._has_left = False

    @property
    def next_deadline(self) -> float | None:
        """When a ``Tick`` is due, None if never."""
        signal_at = None if self._signal_at is None else self._signal_at[0]
        return min((at for at in (signal_at, self._kill_at, self._leave_at) if at is not None), default=None)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        if self._has_left:
            return []
        match event:
            case Assigned(assignment):
                return self._assigned(assignment)
            case CrewGone(generation):
                return self._crew_gone(generation, now)
            case StopOrdered():
                return self._stop_ordered(event, now)
            case Condemned(generation, loss):
                return self._condemned(loss) if generation == self._crew else []
            case Finished(outcome):
                return self._conclude(outcome, now)
            case Signalled(signal_number):
                return self._signalled(signal_number, now)
            case OutputBroken(cause):
                return [] if self._interrupted else self._output_broken(cause, now)
            case CoordinatorLost(cause):
                return [] if self._outcome else self._conclude(Outcome(1, cause), now)
            case Tick():
                return self._tick(now)

    def _assigned(self, assignment: Assignment) -> list[Command]:
        if self._interrupted is not None or self._outcome is not None:
            return [TellStopped(assignment.generation)]
        self._crew, self._signal_at, self._kill_at, self._leave_at = assignment.generation, None, None, None
        start = StartCrew(assignment)
        if assignment.restart_count:
            return [Say(f"starting all ranks again (restart {assignment.restart_count})"), start]
        return [start]

    def _crew_gone(self, generation: int, now: float) -> list[Command]:
        if generation != self._crew:
            return []
        self._crew = self._signal_at = self._kill_at = self._leave_at = None
        if self._outcome is not None:
            return [TellStopped(generation), *self._exit(self._outcome)]
        if self._interrupted is not None:
            self._leave_at = now + _ANSWER_PATIENCE
        return [TellStopped(generation)]

    def _stop_ordered(self, order: StopOrdered, now: float) -> list[Command]:
        if order.generation != self._crew or self._kill_at is not None or self._interrupted is not None:
            return []
        said = Say(f"{order.reason}; stopping all ranks")
        if order.loss is None:
            return [said, *self._stop(order.signal_number, now)]
        self._signal_at = now + _REASON_PATIENCE, order.signal_number
        self._kill_at = now + _REASON_PATIENCE + self._grace
        return [said, TellRanks(order.loss)]

    def _condemned(self, loss: Loss) -> list[Command]:
        return [Say(f"rank {loss.rank} {loss.how}; killing it"), TellRanks(loss), KillRank(loss.rank)]

    def _stop(self, signal_number: int, now: float) -> list[Command]:
        self._signal_at, self._kill_at = None, now + self._grace
        return [SignalCrew(signal_number)]

    def _conclude(self, outcome: Outcome, now: float) -> list[Command]:
        """Leave as soon as nothing runs here; see to that if the job went wrong."""
        if self._interrupted is not None:
            outcome = self._interrupted_outcome(self._interrupted)
        if self._crew is None:
            return self._exit(outcome)
        self._outcome = outcome
        is_stopping = self._kill_at is not None or self._leave_at is not None
        return self._stop(signal.SIGTERM, now) if outcome.exit_code and not is_stopping else []

    def _signalled(self, signal_number: int, now: float) -> list[Command]:
        is_first = self._interrupted is None
        if is_first:
            self._interrupted = signal_number
        if self._crew is None:
            return self._leave_alone(signal_number, now, is_first=is_first)
        if not is_first and signal_number == signal.SIGINT:
            self._signal_at, self._kill_at, self._leave_at = None, None, now + _KILL_PATIENCE
            return [Say("killing all ranks"), KillCrew()]
        passed_on = signal.SIGTERM if signal_number in (signal.SIGPIPE, signal.SIGHUP) else signal_number
        if not is_first:
            return [SignalCrew(passed_on)]
        said = [] if signal_number == signal.SIGPIPE else [Say(_stopping(signal_number, self._grace))]
        return [*said, *self._stop(passed_on, now), TellInterrupted(signal_number)]

    def _output_broken(self, cause: str, now: float) -> list[Command]:
        """End the job as a shell's pipeline would: quietly, unless there is something to be said."""
        commands = self._signalled(signal.SIGPIPE, now)
        return [Say(cause), *commands] if cause else commands

    def _leave_alone(self, signal_number: int, now: float, *, is_first: bool) -> list[Command]:
        """Interrupted while nothing runs here: tell the others, and wait for a while for the answer."""
        if not is_first:
            return self._exit(self._interrupted_outcome(signal_number))
        self._leave_at = now + _ANSWER_PATIENCE
        return [TellInterrupted(signal_number)]

    def _tick(self, now: float) -> list[Command]:
        if self._leave_at is not None and now >= self._leave_at:
            return self._exit(self._outcome or self._interrupted_outcome(self._interrupted or signal.SIGTERM))
        if self._signal_at is not None and now >= self._signal_at[0]:
            (_, number), self._signal_at = self._signal_at, None
            return [SignalCrew(number)]
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            if self._interrupted is not None or self._outcome is not None:
                self._leave_at = now + _KILL_PATIENCE
            return [Say(f"ranks still run {self._grace:g} s after they were asked to end; killing them"), KillCrew()]
        return []

    def _interrupted_outcome(self, signal_number: int) -> Outcome:
        message = "" if signal_number == signal.SIGPIPE else f"ended by {signal.Signals(signal_number).name}"
        return Outcome(exit_code_of(-signal_number), message)

    def _exit(self, outcome: Outcome) -> list[Command]:
        self._has_left = True
        return [Exit(outcome)]


def _stopping(signal_number: int, grace: float) -> str:
    again = " (Ctrl-C again kills them at once)" if signal_number == signal.SIGINT else ""
    return f"got {signal.Signals(signal_number).name}; ranks have {grace:g} s to end{again}"
