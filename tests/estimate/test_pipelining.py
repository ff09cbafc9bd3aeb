"""Time and memory of pipelines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.core.config.schedule_type import parse_schedule_name, schedule_record
from asyncpar.errors import UsageError
from asyncpar.estimate.pipelining import PipelineFigures, StageWork, peak_bytes, pipeline_figures
from asyncpar.pipeline.schedule import PipelineSchedule
from asyncpar.pipeline.simulation import simulate

TABLE = [
    ("gpipe", 1, 33, 24, (8, 8, 8, 8)),
    ("1f1b", 1, 33, 24, (4, 3, 2, 1)),
    ("interleaved", 2, 57, 48, (11, 9, 7, 5)),
    ("interleaved", 4, 105, 96, (19, 17, 15, 13)),
    ("zb1p", 1, 27, 24, (4, 4, 4, 4)),
    ("zbv", 2, 51, 48, (8, 8, 8, 8)),
]


def schedule(name: str, chunks: int = 1, *, stages: int = 4, micro_batches: int = 8) -> PipelineSchedule:
    return PipelineSchedule(
        num_stages=stages,
        num_microbatches=micro_batches,
        schedule_type=PipelineScheduleType(parse_schedule_name(name)),
        num_model_chunks=chunks,
    )


def equal_work(stages: int) -> Sequence[StageWork]:
    return [StageWork()] * stages


@pytest.mark.parametrize(("name", "chunks", "makespan", "ideal", "peak"), TABLE)
def test_figures_of_the_literature_come_out(
    name: str, chunks: int, makespan: float, ideal: float, peak: tuple[float, ...]
) -> None:
    plan = schedule(name, chunks)
    figures = pipeline_figures(plan, equal_work(plan.num_virtual_stages))
    assert (figures.makespan, figures.ideal) == (makespan, ideal)
    assert figures.bubble_over_ideal == pytest.approx(makespan / ideal - 1)
    assert figures.bubble_fraction == pytest.approx(1 - ideal / makespan)
    assert peak_bytes(plan, [1.0] * plan.num_virtual_stages) == peak


@pytest.mark.parametrize("member", PipelineScheduleType)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_long_step_takes_what_a_whole_simulation_says(member: PipelineScheduleType, stages: int) -> None:
    chunks = 2 if member is PipelineScheduleType.INTERLEAVED_ONE_F1B else 1
    plan = schedule(schedule_record(member).short, chunks, stages=stages, micro_batches=7 * stages)
    figures, whole = pipeline_figures(plan, equal_work(plan.num_virtual_stages)), simulate(plan)
    assert figures.makespan == pytest.approx(whole.makespan, rel=1e-12)
    assert figures.ideal == pytest.approx(whole.ideal, rel=1e-12)


@pytest.mark.parametrize("micro_batches", [41, 42, 43, 44])
def test_unequal_stages_and_latency_are_a_few_percent_off_at_most(micro_batches: int) -> None:
    plan = schedule("zb1p", 2, micro_batches=micro_batches)
    work = [StageWork(forward=1 + stage % 3 / 3, backward_input=1.5) for stage in range(8)]

    figures = pipeline_figures(plan, work, latency=0.2)
    whole = simulate(
        plan,
        costs=lambda operation: {
            "forward": work[operation.stage].forward,
            "backward_input": 1.5,
            "backward_weight": 1.0,
            "backward": 2.5,
        }[operation.kind],
        latency=0.2,
    )
    assert figures.makespan == pytest.approx(whole.makespan, rel=0.03)


def test_latency_between_ranks_lengthens_the_step() -> None:
    plan = schedule("1f1b", stages=2, micro_batches=1)
    assert pipeline_figures(plan, equal_work(2), latency=0.5).makespan == 3 + 3 + 2 * 0.5


def test_the_slowest_stage_sets_the_ideal() -> None:
    plan = schedule("gpipe", stages=2, micro_batches=4)
    figures = pipeline_figures(plan, [StageWork(), StageWork(forward=2.0)])
    assert figures.ideal == 4 * 4


def test_what_is_kept_counts_by_stage() -> None:
    plan = schedule("1f1b", stages=2, micro_batches=4)
    assert peak_bytes(plan, [10.0, 3.0]) == (20.0, 3.0)


@pytest.mark.parametrize("member", PipelineScheduleType)
@pytest.mark.parametrize("micro_batches", [20, 21, 28])
def test_what_is_kept_of_a_long_step_is_what_its_orders_say(member: PipelineScheduleType, micro_batches: int) -> None:
    chunks = 2 if member is PipelineScheduleType.INTERLEAVED_ONE_F1B else 1
    plan = schedule(schedule_record(member).short, chunks, micro_batches=micro_batches)
    sizes = [1.0 + stage / 8 for stage in range(plan.num_virtual_stages)]
    for rank, found in enumerate(peak_bytes(plan, sizes)):
        kept = [0.0]
        for operation in plan.compute_order(rank):
            change = sizes[operation.stage] * ((operation.kind == "forward") - operation.kind.frees_activation)
            kept.append(kept[-1] + change)
        assert found == pytest.approx(max(kept), rel=1e-12)


def test_no_time_is_no_bubble() -> None:
    figures = PipelineFigures(makespan=0.0, ideal=0.0)
    assert (figures.bubble_over_ideal, figures.bubble_fraction) == (0.0, 0.0)


def test_work_for_other_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="work: expected that of 4 virtual stages, got 3"):
        pipeline_figures(schedule("1f1b"), equal_work(3))
    with pytest.raises(UsageError, match="kept: expected bytes for 8 virtual stages, got 4"):
        peak_bytes(schedule("zbv"), [1.0] * 4)
