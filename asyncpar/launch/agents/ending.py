"""The end of an agent's part in its group, or of a launcher's job, on signals and when output cannot be shown."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from asyncpar.core.signals import TERMINATING
from asyncpar.hosts.messages import JobClosed, WorldGroup
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.launch.agents.job_record import ElasticMode, JobEnd, SubmittedJob, encode_record


class EndRequests:
    """The requests to end that the process of an agent on ``host`` gets; it has ``job`` if it is a launcher.

    On Ctrl-C a launcher ends its job, also on other signals if its number of hosts is fixed; otherwise the host leaves,
    with ``grace`` seconds for its ranks.
    """

    def __init__(self, host: str, job: SubmittedJob | None, *, grace: float) -> None:
        self._host = host
        self._job = job
        self._grace = grace
        self._agent: HostAgent | None = None
        self._group: WorldGroup | None = None
        self._signals = 0
        self.handles_signals = False
        """Whether the signals of this process are handled here, not by the program in which it is embedded."""
        self.exit_code = 0
        """The exit code for the signal or the broken output that has ended it, 0 if none did."""

    @property
    def has_begun(self) -> bool:
        """Whether a signal has asked this process to end."""
        return self._signals > 0

    def attach(self, group: WorldGroup, agent: HostAgent) -> None:
        """Act on ``agent`` and ``group`` from now on."""
        self._group, self._agent = group, agent
        agent.on_broken_output = self.output_broken

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handle the signals of this process inside the block."""
        loop = asyncio.get_running_loop()
        before, self.handles_signals = signal.getsignal(signal.SIGINT), True
        for number in TERMINATING:
            loop.add_signal_handler(number, self.signalled, number)
        try:
            yield
        finally:
            for number in TERMINATING:
                loop.remove_signal_handler(number)
            if before is not None:  # None: installed by C code
                signal.signal(signal.SIGINT, before)

    def signalled(self, number: int) -> None:
        """Handle a signal; a second one ends at once what the first one has asked to end."""
        name = signal.Signals(number).name
        self._signals += 1
        is_first, self.exit_code = self._signals == 1, 128 + number
        if self._agent is None or self._group is None:
            raise KeyboardInterrupt
        if self._ends_job(number) and self._agent.number is not None:
            if is_first:
                self._end_job(number, f"the launcher on {self._host} got {name}")
                return
            if self._is_launcher and number == signal.SIGINT:
                self._agent.report("killing all ranks")
                self._agent.interrupt(number)
                self._agent.kill()
                self._group.leave_at_once()
                return
            if self._is_fixed:
                self._agent.interrupt(_passed_on(number))
                return
        if self._is_fixed and is_first:
            self._agent.report(f"ended by {name}")
        self._agent.leave(f"got {name}", grace=self._grace if is_first else 0.0)
        if not is_first:
            self._group.leave_at_once()

    def output_broken(self, cause: str) -> None:
        """End the job as a shell pipeline ends: without a message, unless there is a ``cause``."""
        if self.exit_code or not self._is_launcher or self._agent is None or self._agent.number is None:
            return
        self.exit_code = 128 + signal.SIGPIPE
        if cause:
            self._agent.report(cause)
        self._end_job(signal.SIGPIPE, "")

    @property
    def _is_launcher(self) -> bool:
        return self._job is not None and self._job.mode is ElasticMode.RESTART

    @property
    def _is_fixed(self) -> bool:
        return self._job is not None and self._job.is_fixed

    def _ends_job(self, number: int) -> bool:
        return self._job is not None and (number == signal.SIGINT or self._is_fixed)

    def _end_job(self, number: int, message: str) -> None:
        """End the job on all hosts, because of the signal ``number``."""
        assert self._agent is not None
        assert self._agent.number is not None
        assert self._group is not None
        if self._is_launcher:
            if number != signal.SIGPIPE:
                again = " (Ctrl-C again kills them at once)" if number == signal.SIGINT else ""
                grace = 0.0 if self._job is None else self._job.grace
                name = signal.Signals(number).name
                self._agent.report(f"got {name}; ranks have {grace:g} s to end{again}")
            self._agent.interrupt(_passed_on(number))
        end = JobEnd(exit_code=128 + number, message=message, interrupted=self._host if message else "")
        if self._is_launcher and number != signal.SIGPIPE:
            end = msgspec.structs.replace(end, signal_number=_passed_on(number))
        self._group.report(JobClosed(number=self._agent.number, record=encode_record(end)))


def _passed_on(number: int) -> int:
    """Return the signal that ranks get for ``number``."""
    return signal.SIGTERM if number in (signal.SIGPIPE, signal.SIGHUP) else number
