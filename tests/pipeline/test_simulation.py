from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.core.config.parallel import PipelineScheduleType as Type
from asyncpar.errors import UsageError
from asyncpar.pipeline import Costs, PipelineSchedule, Schedule, peak_in_flight, simulate
from tests.pipeline.schedules import Golden, built_in_schedules, goldens


def schedule(schedule_type: Type, *, stages: int = 4, micro_batches: int = 8, chunks: int = 1) -> PipelineSchedule:
    return PipelineSchedule(
        num_stages=stages, num_microbatches=micro_batches, schedule_type=schedule_type, num_model_chunks=chunks
    )


@pytest.mark.parametrize("golden", goldens(), ids=str)
def test_figures_equal_the_table(golden: Golden) -> None:
    simulation = simulate(golden.ours())
    assert {
        "makespan": simulation.makespan,
        "ideal_per_rank": simulation.ideal,
        "bubble_over_ideal": round(simulation.bubble_over_ideal, 6),
        "bubble_fraction_of_makespan": round(simulation.bubble_fraction, 6),
        "span_bubble": simulation.span_bubble,
    } == golden.figures
    assert simulation.peak_in_flight == golden.peaks


@pytest.mark.parametrize(
    ("ours", "makespan", "ideal", "peaks"),
    [
        (schedule(Type.GPIPE), 33, 24, (8, 8, 8, 8)),
        (schedule(Type.ONE_FORWARD_ONE_BACKWARD), 33, 24, (4, 3, 2, 1)),
        (schedule(Type.INTERLEAVED_ONE_F1B), 33, 24, (4, 3, 2, 1)),
        (schedule(Type.INTERLEAVED_ONE_F1B, chunks=2), 57, 48, (11, 9, 7, 5)),
        (schedule(Type.INTERLEAVED_ONE_F1B, chunks=4), 105, 96, (19, 17, 15, 13)),
        (schedule(Type.ZERO_BUBBLE), 27, 24, (4, 4, 4, 4)),
        (schedule(Type.ZBV), 51, 48, (8, 8, 8, 8)),
    ],
    ids=lambda value: f"{value.name}-v{value.num_model_chunks}" if isinstance(value, Schedule) else None,
)
def test_bubbles_of_four_stages_and_eight_micro_batches(
    ours: PipelineSchedule, makespan: float, ideal: float, peaks: tuple[int, ...]
) -> None:
    simulation = simulate(ours, Costs(forward=1, backward=2), latency=0)
    assert [simulation.makespan, simulation.ideal] == [makespan, ideal]
    assert simulation.bubble_over_ideal == pytest.approx(makespan / ideal - 1)
    assert simulation.bubble_fraction == pytest.approx(1 - ideal / makespan)
    assert list(simulation.peak_in_flight) == list(peaks)


def test_each_hop_between_ranks_costs_the_latency() -> None:
    simulation = simulate(schedule(Type.GPIPE, stages=3, micro_batches=1), latency=10)
    assert simulation.makespan == 9 + 4 * 10


def test_what_a_rank_hands_over_to_itself_costs_no_latency() -> None:
    simulation = simulate(schedule(Type.ZBV, stages=2, micro_batches=1), latency=10)
    starts = {str(span.operation): span.start for span in simulation.spans[1]}
    assert starts["1F0"] == 1 + 10
    assert starts["2F0"] == 1 + 10 + 1


def test_messages_travel_beside_the_computation() -> None:
    simulation = simulate(schedule(Type.GPIPE, stages=2, micro_batches=8), latency=1)
    assert simulation.makespan == 27 + 2


def test_a_split_backward_sends_its_gradient_on_after_the_first_half() -> None:
    simulation = simulate(schedule(Type.ZERO_BUBBLE, stages=2, micro_batches=1), Costs(backward_weight=5))
    spans = {str(span.operation): span.start for rank in simulation.spans for span in rank}
    assert (spans["1I0"], spans["1W0"], spans["0I0"]) == (2, 3, 3)


def test_the_slowest_stage_sets_the_ideal() -> None:
    costs = Costs(forward=2, backward_input=3, backward_weight=1, stage_factors=(1.0, 0.5))
    simulation = simulate(schedule(Type.ONE_FORWARD_ONE_BACKWARD, stages=2, micro_batches=4), costs)
    assert [*simulation.busy] == [24, 12]
    assert simulation.ideal == 24
    assert simulation.makespan == 24 + 1


def test_any_function_of_an_operation_may_give_the_costs() -> None:
    simulation = simulate(schedule(Type.GPIPE, stages=2, micro_batches=2), lambda one: 1.0 + one.micro_batch)
    assert simulation.ideal == 6


def test_schedules_that_take_no_time_have_no_bubble() -> None:
    simulation = simulate(schedule(Type.GPIPE), lambda _: 0.0)
    assert (simulation.makespan, simulation.bubble_over_ideal, simulation.bubble_fraction) == (0, 0, 0)


@settings(max_examples=40, deadline=None)
@given(built_in_schedules(), st.floats(0, 4), st.floats(0.25, 4), st.floats(0.25, 4))
def test_operations_never_overlap_and_never_begin_before_what_they_need(
    ours: PipelineSchedule, latency: float, backward_input: float, backward_weight: float
) -> None:
    costs = Costs(backward_input=backward_input, backward_weight=backward_weight)
    simulation = simulate(ours, costs, latency=latency)
    ends = {
        tuple(span.operation.made): (rank, span.end)
        for rank, spans in enumerate(simulation.spans)
        for span in spans
        if span.operation.made
    }
    for rank, spans in enumerate(simulation.spans):
        assert all(one.end <= other.start for one, other in pairwise(spans))
        for span in spans:
            for stage, content in needs(span.operation.stage, span.operation.kind.symbol, ours.num_virtual_stages):
                maker, end = ends[stage, content, span.operation.micro_batch]
                assert span.start >= end + (latency if maker != rank else 0)


def needs(stage: int, kind: str, stages: int) -> list[tuple[int, str]]:
    if kind == "F":
        return [(stage - 1, "activation")] if stage else []
    if kind == "W":
        return [(stage, "gradient")]
    return [(stage, "activation"), *([(stage + 1, "gradient")] if stage + 1 < stages else [])]


def test_what_is_kept_is_freed_by_the_weight_gradients() -> None:
    ours = schedule(Type.ZERO_BUBBLE)
    assert peak_in_flight(ours.compute_order(3)) == 4
    assert peak_in_flight(()) == 0


@pytest.mark.parametrize("time", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(time: float) -> None:
    with pytest.raises(UsageError, match=f"latency: expected a finite time of 0 or more, got {time}"):
        simulate(schedule(Type.GPIPE), latency=time)
    with pytest.raises(UsageError, match=f"costs: expected a finite time of 0 or more for 1F0, got {time}"):
        simulate(schedule(Type.GPIPE), lambda operation: time if operation.stage == 1 else 1.0)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1.0}, "forward: expected a finite time of 0 or more, got -1.0"),
        ({"backward": float("nan")}, "backward: expected a finite time of 0 or more, got nan"),
        ({"stage_factors": (1.0, -2.0)}, "stage_factors: expected a finite factor of 0 or more, got -2.0"),
        ({"stage_factors": (1.0, 2.0)}, r"stage_factors: expected one for each of 4 virtual stages, got \(1.0, 2.0\)"),
    ],
)
def test_costs_that_make_no_sense_are_refused_by_name(costs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate(schedule(Type.GPIPE), Costs(**costs))
