"""The view that an agent has of its ranks: ages, and conditions that last until another one is reported."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import replace

import pytest

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.launch import host_watch
from asyncpar.launch.host_watch import HostWatch
from asyncpar.launch.vitals import Condition, RankState
from asyncpar.observe.summary import HostSummary, RankReport
from tests.launch.test_post_mortem import place as launched

PLACE = launched(0)


class _Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize("condition", [condition for condition in Condition if condition is not Condition.WELL])
async def test_a_condition_lasts_until_another_one_is_reported(
    condition: Condition, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock()
    monkeypatch.setattr(host_watch, "time", clock)
    watch = HostWatch("one")
    with ExitStack() as stack:
        here, there = socket.socketpair()
        stack.enter_context(there)
        watch.add(PLACE, os.getpid(), here)
        watch.take_state(PLACE, RankState(generation=0, rank=0, condition=condition, seconds=5.0))
        clock.now += 12.0
        (report,) = watch.summary().ranks
        assert (report.condition, report.seconds) == (condition.value, 17.0)
        watch.take_state(PLACE, RankState(generation=0, rank=0, condition=Condition.WELL))
        clock.now += 3.0
        (report,) = watch.summary().ranks
        assert (report.condition, report.seconds) == ("well", 0.0)
        watch.ended(PLACE, "exited with code 1", at=clock.now - 2.0, blames=3)
        (report,) = watch.summary().ranks
        assert (report.condition, report.seconds, report.blames) == ("ended", 2.0, 3)
        await watch.close()


async def test_a_rank_counts_the_processes_that_failed_before_it() -> None:
    """By itself under an agent, or as its launcher says, which starts all ranks again."""
    watch = HostWatch("one")
    found = []
    with ExitStack() as stack:

        def start(place: LaunchEnvironment) -> None:
            here, there = socket.socketpair()
            stack.enter_context(there)
            watch.add(place, os.getpid(), here)
            (report,) = watch.summary().ranks
            found.append((report.job, report.restarts))

        start(PLACE)
        for failure in ("exited with code 1", "", "was killed"):  # the second one was drained
            watch.ended(PLACE, "ended", failure)
            start(PLACE)
        start(replace(PLACE, restart_count=5))
        watch.begin_job()
        start(PLACE)
        await watch.close()
    assert found == [(PLACE.job, restarts) for restarts in (0, 1, 1, 2, 5, 0)]


def test_the_report_of_another_host_grows_older_as_a_whole() -> None:
    well = RankReport(rank=0, host="one", pid=1)
    stopped = RankReport(rank=1, host="one", pid=2, condition="stopped", seconds=3.0, age=1.0)
    aged = HostSummary(host="one", ranks=(well, stopped)).aged(10.0)
    assert [(report.age, report.seconds) for report in aged.ranks] == [(10.0, 0.0), (11.0, 13.0)]
