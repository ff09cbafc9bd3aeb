from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.core.config.parallel import PipelineScheduleType as Type
from asyncpar.errors import UsageError
from asyncpar.pipeline import Costs, PipelineSchedule, simulate
from tests.pipeline.schedules import built_in_schedules

SMALL = PipelineSchedule(num_stages=2, num_microbatches=2, schedule_type=Type.ONE_FORWARD_ONE_BACKWARD)


def test_a_simulation_reads_as_figures_a_table_and_a_timeline() -> None:
    assert str(simulate(SMALL)).splitlines() == [
        "one_forward_one_backward: makespan 9, ideal 6",
        "bubble 50.0% of ideal, 33.3% of makespan",
        "",
        "rank  peak  idle  busy  stages",
        "   0     2     3     6       0",
        "   1     1     3     6       1",
        "",
        "rank 0 0F0 0F1 ........0B0---- ....0B1----",
        "rank 1 ....1F0 1B0---- 1F1 1B1---- ........",
    ]


def test_a_timeline_that_is_too_long_for_a_line_goes_on_in_blocks() -> None:
    lines = simulate(SMALL).render(width=28).splitlines()
    assert lines[-5:] == [
        "rank 0 0F0 0F1 ........0B0--",
        "rank 1 ....1F0 1B0---- 1F1 1",
        "",
        "rank 0 -- ....0B1----",
        "rank 1 B1---- ........",
    ]


def test_a_timeline_of_many_blocks_shrinks_to_letters() -> None:
    many = PipelineSchedule(num_stages=2, num_microbatches=16, schedule_type=Type.ZERO_BUBBLE)
    lines = simulate(many).render(width=36).splitlines()
    assert lines[-5:] == [
        "rank 0 FF.IWFIWFIWFIWFIWFIWFIWFIWFIW",
        "rank 1 .FIFIWFIWFIWFIWFIWFIWFIWFIWFI",
        "",
        "rank 0 FIWFIWFIWFIWFIWFIWIW",
        "rank 1 WFIWFIWFIWFIWFIWFIWW",
    ]


def test_a_timeline_that_is_too_long_for_letters_shows_how_busy_ranks_are() -> None:
    many = PipelineSchedule(num_stages=4, num_microbatches=64, schedule_type=Type.ONE_FORWARD_ONE_BACKWARD)
    lines = simulate(many).render(width=30).splitlines()
    assert lines[-5:] == [
        "rank 0 ++####################+",
        "rank 1 +#####################+",
        "rank 2 +#####################+",
        "rank 3 +#####################+",
        "# computes, + partly, . idles",
    ]


@settings(max_examples=40, deadline=None)
@given(built_in_schedules(), st.integers(20, 100), st.floats(0.01, 30))
def test_no_line_is_wider_than_asked_for(schedule: PipelineSchedule, width: int, forward: float) -> None:
    text = simulate(schedule, Costs(forward=forward), latency=0.5).render(width=width)
    assert max(map(len, text.splitlines())) <= width


def test_a_schedule_that_takes_no_time_has_no_timeline() -> None:
    assert str(simulate(SMALL, lambda _: 0.0)).splitlines()[0] == "one_forward_one_backward: makespan 0, ideal 0"


def test_a_width_in_which_nothing_fits_is_refused() -> None:
    with pytest.raises(UsageError, match="width: expected at least 20 characters, got 19"):
        simulate(SMALL).render(width=19)
