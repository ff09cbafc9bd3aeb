"""The real executor, on virtual time, takes the time of the simulation of its schedule."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.core.config.parallel import PipelineScheduleType as Kind
from asyncpar.pipeline import PipelineSchedule, simulate
from asyncpar.pipeline.result import PipelineResult
from tests.pipeline.timed_stages import run_all
from tests.pipeline.worlds import Ranks, in_virtual_time
from tests.products import in_turn


def schedule_of(kind: Kind, chunks: int = 1, *, ranks: int = 4, micro_batches: int = 8) -> PipelineSchedule:
    return PipelineSchedule(
        num_stages=ranks, num_microbatches=micro_batches, schedule_type=kind, num_model_chunks=chunks
    )


def run_timed(schedule: PipelineSchedule, latency: float = 0.0) -> tuple[float, list[PipelineResult]]:
    async def main(ranks: Ranks) -> tuple[float, list[PipelineResult]]:
        results = await run_all(schedule, ranks, latency=latency)
        return asyncio.get_running_loop().time(), results

    return in_virtual_time(schedule.num_stages, main)


@pytest.mark.parametrize(
    ("kind", "chunks", "makespan", "ideal"),
    [
        (Kind.GPIPE, 1, 33, 24),
        (Kind.ONE_FORWARD_ONE_BACKWARD, 1, 33, 24),
        (Kind.INTERLEAVED_ONE_F1B, 2, 57, 48),
        (Kind.INTERLEAVED_ONE_F1B, 4, 105, 96),
        (Kind.ZERO_BUBBLE, 1, 27, 24),
        (Kind.ZBV, 1, 51, 48),
    ],
)
def test_the_makespan_is_that_of_the_table(kind: Kind, chunks: int, makespan: float, ideal: float) -> None:
    took, results = run_timed(schedule_of(kind, chunks))
    assert took == makespan
    assert {result.seconds for result in results} == {makespan}
    assert {result.seconds_busy for result in results} == {ideal}


@pytest.mark.parametrize(
    ("kind", "chunks", "peak"),
    [
        (Kind.GPIPE, 1, (8, 8, 8, 8)),
        (Kind.ONE_FORWARD_ONE_BACKWARD, 1, (4, 3, 2, 1)),
        (Kind.INTERLEAVED_ONE_F1B, 2, (11, 9, 7, 5)),
        (Kind.ZERO_BUBBLE, 1, (4, 4, 4, 4)),
        (Kind.ZBV, 1, (8, 8, 8, 8)),
    ],
)
def test_the_peak_in_flight_is_that_of_the_table(kind: Kind, chunks: int, peak: tuple[int, ...]) -> None:
    _, results = run_timed(schedule_of(kind, chunks))
    assert tuple(result.peak_in_flight for result in results) == peak


@pytest.mark.parametrize(("kind", "latency"), in_turn(Kind, [0.0, 0.25, 3.0]))
def test_the_makespan_is_that_of_the_simulation(kind: Kind, latency: float) -> None:
    schedule = schedule_of(kind)
    expected = simulate(schedule, latency=latency)
    took, results = run_timed(schedule, latency)
    assert took == expected.makespan
    assert tuple(result.seconds_busy for result in results) == expected.busy
    assert tuple(result.peak_in_flight for result in results) == expected.peak_in_flight


@pytest.mark.parametrize(("kind", "ranks"), in_turn(Kind, [1, 2, 3]))
def test_any_number_of_ranks_takes_what_the_simulation_says(kind: Kind, ranks: int) -> None:
    schedule = schedule_of(kind, ranks=ranks, micro_batches=6)
    took, results = run_timed(schedule)
    assert took == simulate(schedule).makespan
    assert results[schedule.rank_of(schedule.num_virtual_stages - 1)].losses == tuple(range(6))


def test_waiting_and_computing_make_up_the_time_of_a_rank_that_waits_for_messages_only() -> None:
    _, results = run_timed(schedule_of(Kind.ONE_FORWARD_ONE_BACKWARD))
    last = results[3]
    assert last.seconds_busy + last.seconds_waiting == 27.0  # then it has done its part, and waits for the others


def test_each_message_is_counted_where_it_goes_and_where_it_comes() -> None:
    _, results = run_timed(schedule_of(Kind.ZBV))
    one_message = 3 * 8
    assert results[0].bytes_sent == results[0].bytes_received == 8 * 2 * one_message
    assert results[1].bytes_sent == results[1].bytes_received == 8 * 4 * one_message
    (down, up) = results[0].sent
    assert (down.before, down.activation_bytes, down.gradient_bytes) == (0, 8 * one_message, 0)
    assert (up.before, up.activation_bytes, up.gradient_bytes) == (6, 0, 8 * one_message)
    assert sum(result.bytes_sent for result in results) == 2 * 6 * 8 * one_message
