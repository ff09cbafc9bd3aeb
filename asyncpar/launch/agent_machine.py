"""The decisions of one host's agent: when ranks start, are signalled and killed, what it reports, and when it ends.

Sans-I/O: ``handle`` takes events and returns commands.  A generation is one start of the ranks.  To stop it, its
processes get a signal, and SIGKILL after the grace period; the agent waits for them for a bounded time only.
"""

from __future__ import annotations

import signal

import msgspec

from asyncpar.core.observe.agent_line import Loss
from asyncpar.launch.failure import exit_code_of
from asyncpar.launch.protocol import (
    AgentAssignment,
    AnnounceCondition,
    Announcement,
    GiveUpRank,
    JobOutcome,
    NotifyOfCondition,
    NotifyRanks,
    Order,
    StopRanks,
)


class WorkersGone(msgspec.Struct, frozen=True):
    """No process of ``generation`` is left on this host, and all output has been passed on."""

    generation: int


class Signalled(msgspec.Struct, frozen=True):
    """This process got a signal that asks it to end."""

    signal_number: int


class OutputBroken(msgspec.Struct, frozen=True):
    """The launcher's output cannot be written because of ``cause``, which is "" if its reader closed the other end."""

    cause: str


class CoordinatorLost(msgspec.Struct, frozen=True):
    """The coordinator cannot be reached, or went away."""

    cause: str


class AgentTick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = Order | WorkersGone | Signalled | OutputBroken | CoordinatorLost | AgentTick


class StartWorkers(msgspec.Struct, frozen=True):
    """Start the ranks."""

    assignment: AgentAssignment


class SignalWorkers(msgspec.Struct, frozen=True):
    """Send a signal to the process group of each rank."""

    signal_number: int


class KillWorkers(msgspec.Struct, frozen=True):
    """End each rank's process group now, and stop waiting for its output."""


class KillRank(msgspec.Struct, frozen=True):
    """End the process group of one rank, if it is one of this host."""

    rank: int


class ReportStopped(msgspec.Struct, frozen=True):
    """Report that no process of ``generation`` is left."""

    generation: int


class ReportInterrupted(msgspec.Struct, frozen=True):
    """Report that a signal asked this agent to end the job."""

    signal_number: int


class PrintText(msgspec.Struct, frozen=True):
    """Print ``text``."""

    text: str


class Exit(msgspec.Struct, frozen=True):
    """End the agent with this outcome."""

    outcome: JobOutcome


Command = (
    StartWorkers
    | SignalWorkers
    | KillWorkers
    | KillRank
    | NotifyRanks
    | NotifyOfCondition
    | ReportStopped
    | ReportInterrupted
    | PrintText
    | Exit
)


_ANSWER_PATIENCE = 3.0
"""Seconds that an interrupted agent without ranks waits for the coordinator's outcome."""
_KILL_PATIENCE = 5.0
"""Seconds that killed processes have to disappear."""
_REASON_PATIENCE = 0.3
"""Seconds between the notice that a rank is lost and the signal, in which ranks can raise the reason."""


class AgentMachine:
    """The decisions of one host's agent."""

    def __init__(self, *, grace: float) -> None:
        self._grace = grace
        self._generation: int | None = None
        self._interrupted: int | None = None
        self._outcome: JobOutcome | None = None
        self._signal_at: tuple[float, int] | None = None
        self._kill_at: float | None = None
        self._leave_at: float | None = None
        self._has_left = False
        self._hosts: int | None = None

    @property
    def next_deadline(self) -> float | None:
        """When an ``AgentTick`` is due; None: never."""
        signal_at = None if self._signal_at is None else self._signal_at[0]
        return min((at for at in (signal_at, self._kill_at, self._leave_at) if at is not None), default=None)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        if self._has_left:
            return []
        match event:
            case AgentAssignment():
                return self._assigned(event)
            case WorkersGone(generation):
                return self._workers_gone(generation, now)
            case StopRanks():
                return self._stop_ordered(event, now)
            case GiveUpRank(generation, loss):
                return self._give_up(loss) if generation == self._generation else []
            case Announcement() | AnnounceCondition():
                return self._announced(event)
            case JobOutcome():
                return self._conclude(event, now)
            case Signalled(signal_number):
                return self._signalled(signal_number, now)
            case OutputBroken(cause):
                return [] if self._interrupted else self._output_broken(cause, now)
            case CoordinatorLost(cause):
                return [] if self._outcome else self._conclude(JobOutcome(1, cause), now)
            case AgentTick():
                return self._tick(now)

    def _assigned(self, assignment: AgentAssignment) -> list[Command]:
        if self._interrupted is not None or self._outcome is not None:
            return [ReportStopped(assignment.generation)]
        self._generation, self._signal_at, self._kill_at, self._leave_at = assignment.generation, None, None, None
        start = StartWorkers(assignment)
        before, self._hosts = self._hosts, assignment.group_world_size
        if before is None:
            return [start]
        restarts = f" (restart {assignment.restart_count})" if assignment.restart_count else ""
        hosts = "" if before == self._hosts else f" on {self._hosts} hosts"
        return [PrintText(f"starting all ranks again{hosts}{restarts}"), start]

    def _workers_gone(self, generation: int, now: float) -> list[Command]:
        if generation != self._generation:
            return []
        self._generation = self._signal_at = self._kill_at = self._leave_at = None
        if self._outcome is not None:
            return [ReportStopped(generation), *self._exit(self._outcome)]
        if self._interrupted is not None:
            self._leave_at = now + _ANSWER_PATIENCE
        return [ReportStopped(generation)]

    def _stop_ordered(self, order: StopRanks, now: float) -> list[Command]:
        if order.generation != self._generation or self._kill_at is not None or self._interrupted is not None:
            return []
        printed = PrintText(f"{order.reason}; stopping all ranks")
        if order.loss is None:
            return [printed, *self._stop(order.signal_number, now)]
        self._signal_at = now + _REASON_PATIENCE, order.signal_number
        self._kill_at = now + _REASON_PATIENCE + self._grace
        return [printed, NotifyRanks(order.loss)]

    def _announced(self, order: Announcement | AnnounceCondition) -> list[Command]:
        if isinstance(order, Announcement):
            return [PrintText(order.text)]
        return [NotifyOfCondition(order.rank, order.how)] if order.generation == self._generation else []

    def _give_up(self, loss: Loss) -> list[Command]:
        return [PrintText(f"rank {loss.rank} {loss.how}; killing it"), NotifyRanks(loss), KillRank(loss.rank)]

    def _stop(self, signal_number: int, now: float) -> list[Command]:
        self._signal_at, self._kill_at = None, now + self._grace
        return [SignalWorkers(signal_number)]

    def _conclude(self, outcome: JobOutcome, now: float) -> list[Command]:
        """End when no rank runs here; if the job has failed, stop the ranks."""
        if self._interrupted is not None:
            outcome = self._interrupted_outcome(self._interrupted)
        if self._generation is None:
            return self._exit(outcome)
        self._outcome = outcome
        is_stopping = self._kill_at is not None or self._leave_at is not None
        return self._stop(signal.SIGTERM, now) if outcome.exit_code and not is_stopping else []

    def _signalled(self, signal_number: int, now: float) -> list[Command]:
        is_first = self._interrupted is None
        if is_first:
            self._interrupted = signal_number
        if self._generation is None:
            return self._leave_alone(signal_number, now, is_first=is_first)
        if not is_first and signal_number == signal.SIGINT:
            self._signal_at, self._kill_at, self._leave_at = None, None, now + _KILL_PATIENCE
            return [PrintText("killing all ranks"), KillWorkers()]
        passed_on = signal.SIGTERM if signal_number in (signal.SIGPIPE, signal.SIGHUP) else signal_number
        if not is_first:
            return [SignalWorkers(passed_on)]
        printed = [] if signal_number == signal.SIGPIPE else [PrintText(_stopping(signal_number, self._grace))]
        return [*printed, *self._stop(passed_on, now), ReportInterrupted(signal_number)]

    def _output_broken(self, cause: str, now: float) -> list[Command]:
        """End the job as a shell pipeline ends: without a message, unless there is a ``cause``."""
        commands = self._signalled(signal.SIGPIPE, now)
        return [PrintText(cause), *commands] if cause else commands

    def _leave_alone(self, signal_number: int, now: float, *, is_first: bool) -> list[Command]:
        """Handle a signal while no rank runs here: report it, and wait for the outcome for a bounded time."""
        if not is_first:
            return self._exit(self._interrupted_outcome(signal_number))
        self._leave_at = now + _ANSWER_PATIENCE
        return [ReportInterrupted(signal_number)]

    def _tick(self, now: float) -> list[Command]:
        if self._leave_at is not None and now >= self._leave_at:
            return self._exit(self._outcome or self._interrupted_outcome(self._interrupted or signal.SIGTERM))
        if self._signal_at is not None and now >= self._signal_at[0]:
            (_, number), self._signal_at = self._signal_at, None
            return [SignalWorkers(number)]
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            if self._interrupted is not None or self._outcome is not None:
                self._leave_at = now + _KILL_PATIENCE
            return [
                PrintText(f"ranks still run {self._grace:g} s after they were asked to end; killing them"),
                KillWorkers(),
            ]
        return []

    def _interrupted_outcome(self, signal_number: int) -> JobOutcome:
        message = "" if signal_number == signal.SIGPIPE else f"ended by {signal.Signals(signal_number).name}"
        return JobOutcome(exit_code_of(-signal_number), message)

    def _exit(self, outcome: JobOutcome) -> list[Command]:
        self._has_left = True
        return [Exit(outcome)]


def _stopping(signal_number: int, grace: float) -> str:
    again = " (Ctrl-C again kills them at once)" if signal_number == signal.SIGINT else ""
    return f"got {signal.Signals(signal_number).name}; ranks have {grace:g} s to end{again}"
