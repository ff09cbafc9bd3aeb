"""A stage that computes for long is what the others wait for; what it receives ahead meanwhile is no wait of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import pytest

from asyncpar.core.config.parallel import PipelineScheduleType as Kind
from asyncpar.errors import PeerTimeout
from asyncpar.pipeline import PipelineSchedule
from tests.pipeline.timed_stages import make_executor, run_one
from tests.pipeline.worlds import Ranks, in_virtual_time

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SLOW = 1
SECONDS = 40.0


class SlowCompute:
    """Takes long for each call."""

    async def run(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        result = function(*arguments)
        await asyncio.sleep(SECONDS)
        return result


def schedule_of(kind: Kind) -> PipelineSchedule:
    return PipelineSchedule(num_stages=3, num_microbatches=6, schedule_type=kind)


@pytest.mark.parametrize("kind", [Kind.GPIPE, Kind.ONE_FORWARD_ONE_BACKWARD, Kind.ZERO_BUBBLE, Kind.ZBV])
def test_the_others_wait_for_the_slow_stage_which_waits_for_no_rank(kind: Kind) -> None:
    schedule = schedule_of(kind)

    async def main(ranks: Ranks) -> set[tuple[int, int | None]]:
        reported = set()
        runs = []
        for rank, communicator in enumerate(ranks.communicators):
            options: dict[str, Any] = {"compute": SlowCompute()} if rank == SLOW else {}
            runs.append(asyncio.create_task(run_one(make_executor(schedule, communicator, **options))))
        while not all(run.done() for run in runs):
            await asyncio.sleep(3.0)
            for rank, links in enumerate(ranks.links):
                for notice in links.observer._waiting.values():  # noqa: SLF001
                    assert notice.cycle == ""
                    reported.add((rank, notice.culprit))
        await asyncio.gather(*runs)
        return reported

    reported = in_virtual_time(schedule.num_stages, main)
    assert reported, "waits of 40 s are reported"
    assert {culprit for _, culprit in reported} == {SLOW}
    assert SLOW not in {rank for rank, _ in reported}


def test_a_message_has_the_timeout_from_when_it_is_needed_and_not_from_when_it_is_received_ahead() -> None:
    schedule = PipelineSchedule(num_stages=2, num_microbatches=4, schedule_type=Kind.GPIPE)

    async def main(ranks: Ranks) -> None:
        executors = [make_executor(schedule, one, compute=SlowCompute()) for one in ranks.communicators]
        await asyncio.gather(*(run_one(executor) for executor in executors))

    in_virtual_time(schedule.num_stages, main, timeout=2.5 * SECONDS)


def test_a_message_that_is_needed_and_does_not_come_ends_the_run_with_the_rank_that_owes_it() -> None:
    schedule = PipelineSchedule(num_stages=2, num_microbatches=4, schedule_type=Kind.GPIPE)

    async def main(ranks: Ranks) -> BaseException | None:
        slow = make_executor(schedule, ranks.communicators[SLOW], compute=SlowCompute())
        other = make_executor(schedule, ranks.communicators[0])
        run = asyncio.create_task(run_one(other))
        await asyncio.gather(run, run_one(slow), return_exceptions=True)
        return run.exception()

    error = in_virtual_time(schedule.num_stages, main, timeout=SECONDS / 2)
    assert isinstance(error, PeerTimeout)
    assert error.rank == SLOW
    assert "deadlock" not in str(error)
