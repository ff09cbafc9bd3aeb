"""Measurements of ranks, their summary, and its text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from asyncpar.errors import UsageError
from asyncpar.hybrid.analysis import (
    BottleneckKind,
    PerformanceAnalysis,
    RankPerformance,
    Severity,
    StepMeasure,
    analyze,
    summarize,
)
from asyncpar.hybrid.monitor import (
    Performance3DMonitor,
    bytes_text,
    count_text,
    percent_text,
    render_report,
    seconds_text,
)
from asyncpar.testing.world import local_world


def measure(step: int = 1, **figures: Any) -> StepMeasure:
    return StepMeasure(step=step, **{"seconds": 1.0, "compute_seconds": 1.0} | figures)


def analysis_of(*ranks: dict[str, Any]) -> PerformanceAnalysis:
    """Analyze one step of each rank."""
    return analyze([summarize(rank, [measure(**figures)]) for rank, figures in enumerate(ranks)])


def only(analysis: PerformanceAnalysis) -> tuple[object, ...]:
    (bottleneck,) = analysis.bottlenecks
    return bottleneck.kind, bottleneck.severity, bottleneck.value, bottleneck.threshold


# -- measures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["seconds", "compute_seconds", "communication_seconds", "pipeline_wait_seconds"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_durations_are_finite_and_not_negative(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name}: expected a finite number of seconds, 0 or more, got"):
        measure(1, **{name: value})


@pytest.mark.parametrize("name", ["step", "memory_used", "memory_limit", "tokens"])
def test_counts_are_not_negative(name: str) -> None:
    figures: dict[str, Any] = {"step": 0, "seconds": 1.0, name: -1}
    with pytest.raises(UsageError, match=f"{name}: expected 0 or more, got -1"):
        StepMeasure(**figures)


# -- the monitor -----------------------------------------------------------------------------------------------------


def test_a_monitor_keeps_the_last_steps() -> None:
    monitor = Performance3DMonitor(rank=3, capacity=2)
    for step in range(5):
        monitor.record(measure(step, seconds=float(step)))
    assert [one.step for one in monitor.measures] == [3, 4]
    performance = monitor.performance()
    assert (performance.rank, performance.steps, performance.last_step, performance.seconds) == (3, 2, 4, 7.0)


def test_steps_that_are_taken_again_replace_the_first_ones() -> None:
    monitor = Performance3DMonitor()
    for step in (1, 2, 3, 2):
        monitor.record(measure(step, tokens=len(monitor.measures)))
    assert [(one.step, one.tokens) for one in monitor.measures] == [(1, 0), (2, 3)]


def test_steps_of_a_warm_up_can_be_forgotten() -> None:
    monitor = Performance3DMonitor()
    monitor.record(measure(1, seconds=60.0))
    monitor.clear()
    monitor.record(measure(2, seconds=1.0))
    assert monitor.analyze().seconds_per_step == 1.0


def test_there_is_no_analysis_before_the_first_step() -> None:
    with pytest.raises(UsageError, match="expected at least one recorded step"):
        Performance3DMonitor().analyze()


@pytest.mark.parametrize(("name", "value"), [("rank", -1), ("capacity", 0)])
def test_a_monitor_refuses_sizes_that_cannot_be(name: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"{name}: expected"):
        Performance3DMonitor(**{name: value})


async def test_all_ranks_get_the_same_analysis_of_all_ranks() -> None:
    async with local_world(3) as nodes:
        monitors = [Performance3DMonitor(node.rank) for node in nodes]
        for rank, monitor in enumerate(monitors):
            monitor.record(measure(1, seconds=4.0, compute_seconds=1.0 + rank, tokens=100 * (rank == 2)))
        analyses = await asyncio.gather(
            *(monitor.analyze_all(node.world) for monitor, node in zip(monitors, nodes, strict=True))
        )
    assert analyses[0] == analyses[1] == analyses[2]
    assert [one.rank for one in analyses[0].ranks] == [0, 1, 2]
    assert analyses[0].slowest.rank == 2
    assert analyses[0].imbalance == pytest.approx(1.5)
    assert analyses[0].tokens_per_second == 25.0


async def test_an_analysis_of_ranks_without_steps_raises_on_all_of_them() -> None:
    async with local_world(2) as nodes:
        results = await asyncio.gather(
            *(Performance3DMonitor(node.rank).analyze_all(node.world) for node in nodes), return_exceptions=True
        )
    assert all(isinstance(result, UsageError) for result in results)


# -- bottlenecks -----------------------------------------------------------------------------------------------------


def test_communication_beyond_thirty_per_cent_is_high() -> None:
    found = only(analysis_of({"communication_seconds": 0.2, "tensor_parallel_seconds": 0.11, "compute_seconds": 0.6}))
    assert found == (BottleneckKind.COMMUNICATION, Severity.HIGH, pytest.approx(0.31), 0.3)


def test_memory_beyond_nine_tenths_is_critical() -> None:
    found = only(analysis_of({"memory_used": 91, "memory_limit": 100}))
    assert found == (BottleneckKind.MEMORY, Severity.CRITICAL, pytest.approx(0.91), 0.9)


def test_a_pipeline_busy_less_than_seventy_per_cent_is_medium() -> None:
    found = only(analysis_of({"pipeline_wait_seconds": 0.31, "compute_seconds": 0.69}))
    assert found == (BottleneckKind.PIPELINE, Severity.MEDIUM, pytest.approx(0.69), 0.7)


def test_tensor_parallelism_less_than_eighty_per_cent_efficient_is_medium() -> None:
    found = only(analysis_of({"tensor_parallel_seconds": 0.21, "compute_seconds": 0.79}))
    assert found == (BottleneckKind.TENSOR_PARALLEL, Severity.MEDIUM, pytest.approx(0.79), 0.8)


@pytest.mark.parametrize(
    "figures",
    [
        {"communication_seconds": 0.3, "compute_seconds": 0.7},
        {"memory_used": 9, "memory_limit": 10},
        {"memory_used": 10**12},
        {"pipeline_wait_seconds": 0.25, "compute_seconds": 0.75},
        {"tensor_parallel_seconds": 0.125, "compute_seconds": 0.5, "seconds": 1.0},
        {"seconds": 0.0, "compute_seconds": 0.0},
    ],
)
def test_what_is_at_its_threshold_is_no_bottleneck(figures: dict[str, Any]) -> None:
    assert analysis_of(figures).bottlenecks == ()


def test_bottlenecks_are_those_of_the_worst_rank_and_the_gravest_come_first() -> None:
    analysis = analysis_of(
        {"pipeline_wait_seconds": 0.4},
        {"communication_seconds": 0.5},
        {"communication_seconds": 0.6, "memory_used": 99, "memory_limit": 100},
    )
    found = [(one.kind, one.rank) for one in analysis.bottlenecks]
    assert found == [(BottleneckKind.MEMORY, 2), (BottleneckKind.COMMUNICATION, 2), (BottleneckKind.PIPELINE, 0)]
    assert all(one.advice for one in analysis.bottlenecks)


def test_shares_are_over_the_time_of_all_ranks() -> None:
    analysis = analysis_of(
        {"compute_seconds": 0.5, "communication_seconds": 0.25, "pipeline_wait_seconds": 0.25},
        {"compute_seconds": 0.75, "tensor_parallel_seconds": 0.25},
    )
    assert analysis.compute_share == 0.625
    assert analysis.communication_share == analysis.tensor_parallel_share == analysis.pipeline_wait_share == 0.125


def test_the_memory_figure_is_the_peak_of_all_steps() -> None:
    steps = [measure(step, memory_used=used, memory_limit=100) for step, used in enumerate((10, 80, 20))]
    assert summarize(0, steps).memory_share == 0.8


def test_ranks_without_steps_are_left_out() -> None:
    analysis = analyze([summarize(0, []), summarize(1, [measure()])])
    assert [one.rank for one in analysis.ranks] == [1]


def test_a_rank_that_comes_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="got rank 4 twice"):
        analyze([summarize(4, [measure()]), summarize(4, [measure()])])


def test_parts_measured_longer_than_the_step_stay_shares() -> None:
    performance = summarize(0, [measure(communication_seconds=3.0, pipeline_wait_seconds=2.0)])
    assert performance.communication_share == 1.0
    assert performance.pipeline_utilization == 0.0


# -- the report ------------------------------------------------------------------------------------------------------


def busy(rank: int) -> RankPerformance:
    figures = {"communication_seconds": 0.35, "pipeline_wait_seconds": 0.4, "tensor_parallel_seconds": 0.2}
    steps = [
        measure(
            step,
            compute_seconds=0.5 + 0.01 * rank,
            memory_used=95 << 28,
            memory_limit=100 << 28,
            tokens=4096,
            **figures,
        )
        for step in range(20)
    ]
    return summarize(rank, steps)


@pytest.mark.parametrize("width", [32, 40, 60, 80, 120])
@pytest.mark.parametrize("ranks", [1, 2, 1000])
def test_a_report_fits_the_width(width: int, ranks: int) -> None:
    report = render_report(analyze(map(busy, range(ranks))), width=width)
    assert max(map(len, report.splitlines())) <= width
    assert len(report.splitlines()) < 60
    assert report.isascii()
    assert all(line == line.rstrip() for line in report.splitlines())


def test_a_report_says_what_matters() -> None:
    analysis = analyze([busy(0), replace(busy(1), compute_seconds=15.0)])
    assert render_report(analysis) == (
        "Performance of 2 ranks over 20 steps, the last one 19: 1.00 s per step, 4,096\n"
        "tokens/s\n"
        "\n"
        "Time\n"
        "  compute         62.5 % ###################\n"
        "  communication     35 % ##########\n"
        "  tensor parallel   20 % ######\n"
        "  pipeline wait     40 % ############\n"
        "  other              0 %\n"
        "\n"
        "Ranks, the slowest first\n"
        "  rank  compute    step  communication  pipeline use           memory\n"
        "     1   750 ms  1.00 s           55 %          60 %  23.8 GiB (95 %)\n"
        "     0   500 ms  1.00 s           55 %          60 %  23.8 GiB (95 %)\n"
        "Rank 1 computes longest, 1.20 times the mean.\n"
        "\n"
        "Bottlenecks\n"
        "  CRITICAL: memory is 95 % of its limit, more than 90 % on rank 0\n"
        "    To do: recompute more activations, use a higher ZeRO stage, more tensor-\n"
        "    parallel ranks, or smaller micro-batches.\n"
        "  HIGH: communication takes 55 % of the time, more than 30 % on rank 0\n"
        "    To do: let gradients travel during the backward pass, accumulate over more\n"
        "    micro-batches, compress what travels between hosts, or even out the work of\n"
        "    ranks that others wait for.\n"
        "  MEDIUM: pipeline stages are busy 60 % of the time, less than 70 % on rank 0\n"
        "    To do: use more micro-batches per step, more model chunks per stage, a zero-\n"
        "    bubble schedule, or stages of more equal work.\n"
        "  MEDIUM: tensor parallelism is 71.4 % efficient, less than 80 % on rank 0\n"
        "    To do: put tensor-parallel ranks on one host (order), use fewer of them, or\n"
        "    larger micro-batches."
    )


def test_a_report_of_one_healthy_rank_is_short() -> None:
    monitor = Performance3DMonitor(rank=2)
    monitor.record(measure(7, seconds=0.0125, compute_seconds=0.0125))
    assert monitor.report() == (
        "Performance of rank 2 over step 7: 12.5 ms per step\n"
        "\n"
        "Time\n"
        "  compute          100 % ##############################\n"
        "  communication      0 %\n"
        "  tensor parallel    0 %\n"
        "  pipeline wait      0 %\n"
        "  other              0 %\n"
        "\n"
        "Ranks, the slowest first\n"
        "  rank  compute     step  communication  pipeline use  memory\n"
        "     2  12.5 ms  12.5 ms            0 %         100 %     0 B\n"
        "\n"
        "No bottlenecks"
    )


def test_a_report_needs_some_width() -> None:
    with pytest.raises(UsageError, match="width: expected at least 32 characters, got 31"):
        render_report(analysis_of({}), width=31)


def test_figures_are_short() -> None:
    assert [seconds_text(value) for value in (123.4, 1.5, 0.0125, 3e-6, 0.0)] == [
        "123 s",
        "1.50 s",
        "12.5 ms",
        "3.00 us",
        "0.00 us",
    ]
    assert [bytes_text(value) for value in (0, 1000, 1 << 10, 3 << 20, 5 << 30)] == [
        "0 B",
        "1000 B",
        "1.00 KiB",
        "3.00 MiB",
        "5.00 GiB",
    ]
    assert [percent_text(value) for value in (0.0, 0.314, 1.0)] == ["0 %", "31.4 %", "100 %"]
    assert [count_text(value) for value in (1.25, 50.5, 1234567.8)] == ["1.25", "50.5", "1,234,568"]
