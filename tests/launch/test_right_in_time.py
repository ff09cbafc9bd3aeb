"""Whatever holds a job up is named with its rank, place and cause within 12 s: on the simulated clock of the monitors.

The machines are those of production: the agent's look at a process, the board of waits, and the summaries that commands
and the page read.  What arrives from a rank arrives when its settings say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import pytest

from asyncpar.core.observe.loop_watch import LONG_SECONDS
from asyncpar.core.observe.rank_observer import WAIT_SECONDS
from asyncpar.core.observe.rank_reports import Phase
from asyncpar.core.observe.waits import WaitNotice
from asyncpar.dashboard.picture import Painter
from asyncpar.launch.agents.host_protocol import StateChanged, WaitChanged
from asyncpar.launch.commands.job_text import show_job
from asyncpar.launch.host_watch import LOOK_SECONDS as ASKED_EVERY
from asyncpar.launch.vitals import LOOK_SECONDS, Condition, ProcessSample, Vitals
from asyncpar.launch.vitals import RankState as State
from asyncpar.launch.wait_board import WaitReport
from asyncpar.observe.summary import (
    BlockedSummary,
    HostSummary,
    JobSummary,
    OperationSummary,
    RankReport,
    RankSummary,
)
from tests.launch.agents.test_restarted_hosts import Cluster

RIGHT_WITHIN: Final = 12.0
CULPRIT: Final = 1
PLACE: Final = "train.py:57"
BEFORE: Final = 3.0
"""Seconds for which all was well."""


class Fault(NamedTuple):
    """What rank 1 does from the moment of the fault on; ``cause`` are the words about it."""

    cause: str
    look: Callable[[float], ProcessSample] = lambda _: ProcessSample()
    is_silent: bool = True
    blocks: bool = False
    doing: str = ""


FAULTS = {
    "stopped": Fault("is stopped (SIGSTOP, or a debugger)", lambda _: ProcessSample(is_stopped=True)),
    "lock held": Fault("runs no Python code (something holds its interpreter lock)"),
    "C call": Fault("a C call holds its interpreter lock, and computes", lambda now: ProcessSample(cpu=now)),
    "disk": Fault("waits in the kernel", lambda _: ProcessSample(is_uninterruptible=True)),
    "slow Python": Fault("blocks its event loop", lambda now: ProcessSample(cpu=now), is_silent=False, blocks=True),
    "sleeps": Fault("sleeps at", is_silent=False, doing=f"sleeps at {PLACE}"),
}


class SimulatedJob:
    """Three ranks of one host, on a clock that ``pass_time`` moves; rank 1 has ``fault`` from 0.0 on."""

    def __init__(self, fault: Fault) -> None:
        self.now = -BEFORE
        self._fault = fault
        self._vitals = Vitals()
        self._vitals.enter(Phase.MEMBER)
        self._received_at = self.now
        self._is_blocked = False
        self._cluster = Cluster(1, 1, slots={"a": 3}, stopped_after=None)
        self._cluster.arrive("a")
        self._cluster.wait(0.2)

    @property
    def printed(self) -> list[str]:
        return self._cluster.hosts["a"].lines

    def pass_time(self) -> None:
        """Let one inspection by the agent pass."""
        self.now += LOOK_SECONDS
        is_well = self.now < 0.0 or not self._fault.is_silent
        if is_well:
            self._vitals.beat()
            if self.now - self._received_at >= ASKED_EVERY:
                self._received_at = self.now
        seen = ProcessSample(cpu=self.now) if self.now < 0.0 else self._fault.look(self.now)
        if self._vitals.update(seen, now=self.now):
            place = "" if self._vitals.condition is Condition.WELL else PLACE
            state = State(
                generation=0,
                rank=CULPRIT,
                phase=Phase.MEMBER,
                condition=self._vitals.condition,
                seconds=self._vitals.seconds,
                place=place,
            )
            self._cluster.feed("a", StateChanged(CULPRIT, state))
        if self._fault.blocks and self.now >= LONG_SECONDS and not self._is_blocked:
            self._is_blocked = True
            self._cluster.feed("a", WaitChanged(WaitReport(0, CULPRIT, blocked=PLACE)))
        if self.now >= WAIT_SECONDS:
            for rank in (0, 2):
                self._cluster.feed("a", WaitChanged(WaitReport(0, rank, self._notice())))
        self._cluster.wait(LOOK_SECONDS)

    def _notice(self) -> WaitNotice:
        where = self._fault.doing or "has not answered for 9.0 s"
        return WaitNotice(operation="all_reduce #4", seconds=WAIT_SECONDS, culprit=CULPRIT, host="a", where=where)

    def summary(self) -> JobSummary:
        """Return what the host's agent reports, at the age that it has when it is asked."""
        reports = tuple(self._report(rank) for rank in range(3))
        return JobSummary(job="job", pid=1, time=self.now, hosts=(HostSummary(host="a", ranks=reports),))

    def _report(self, rank: int) -> RankReport:
        waited = max(0.0, self.now)
        if rank != CULPRIT:
            waits = OperationSummary(
                label="all_reduce #4",
                kind="all_reduce",
                group="world",
                sequence=4,
                waits_for=(CULPRIT,),
                seconds=waited,
            )
            summary = RankSummary(rank=rank, pid=rank, time=self.now, operations=(waits,) if waited else ())
            return RankReport(rank=rank, host="a", pid=rank, phase="member", summary=summary)
        fault, is_well = self._fault, self._vitals.condition is Condition.WELL
        blocked = BlockedSummary(what="", where=PLACE, seconds=waited) if fault.blocks and waited else None
        summary = RankSummary(rank=rank, pid=rank, time=self._received_at, blocked=blocked, doing=fault.doing)
        age = self.now - self._received_at
        report = RankReport(rank=rank, host="a", pid=rank, phase="member", summary=summary, age=age)
        read = {"place": PLACE, "doing": f"is in user code at {PLACE}"} if fault.is_silent and waited else {}
        condition = self._vitals.condition.value
        return msgspec.structs.replace(
            report, condition=condition, seconds=0.0 if is_well else self._vitals.seconds, **read
        )


def is_right(text: str, fault: Fault) -> bool:
    return fault.cause in text and PLACE in text and f"for rank {CULPRIT} " in text


@pytest.mark.parametrize("name", FAULTS)
def test_every_surface_is_right_within_12_seconds_and_stays_so(name: str) -> None:
    fault = FAULTS[name]
    job = SimulatedJob(fault)
    first = dict.fromkeys(("status", "page", "terminal"), math.inf)
    while job.now < RIGHT_WITHIN + 8.0:
        job.pass_time()
        summary = job.summary()
        surfaces = {"status": show_job(summary), "page": Painter().paint(summary)["sentence"]}
        surfaces["terminal"] = "\n".join(job.printed)
        if job.now < 0.0:
            assert not any(is_right(text, fault) for text in surfaces.values())
            continue
        for surface, text in surfaces.items():
            if is_right(text, fault):
                first[surface] = min(first[surface], job.now)
            assert first[surface] > job.now or is_right(text, fault), (surface, job.now, text)
    assert max(first.values()) <= RIGHT_WITHIN, first
