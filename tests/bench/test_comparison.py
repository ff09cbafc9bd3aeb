"""Ratios and verdicts of scripts/bench/compare/compare.py."""

from __future__ import annotations

import pytest

from scripts.bench.compare.comparison import (
    BEST_MPI,
    GLOO,
    LANE_TARGETS,
    OURS,
    TARGETS,
    Job,
    Results,
    Target,
    judge,
    results_tables,
    verdict_table,
)
from scripts.bench.tables import format_ratio, format_size, format_time, markdown

SMALL, LARGE = Job(2, "all_reduce", 4), Job(2, "all_reduce", 25_000_000)


@pytest.fixture
def results() -> Results:
    """Two sizes; at the small one Intel MPI is the best MPI, at the large one MPICH."""
    made = Results()
    for job, side, rounds in (
        (LARGE, OURS, (3e-3, 30e-3, 3.2e-3)),
        (LARGE, GLOO, (16e-3, 16e-3, 17e-3)),
        (LARGE, "mpich", (4e-3,)),
        (LARGE, "intel", (8e-3,)),
        (SMALL, OURS, (2e-6,)),
        (SMALL, GLOO, (200e-6,)),
        (SMALL, "mpich", (1.8e-6,)),
        (SMALL, "intel", (0.8e-6,)),
    ):
        for seconds in rounds:
            made.add(job, side, seconds, wrong=0)
    return made


def test_medians_are_over_rounds(results: Results) -> None:
    assert results.median(LARGE, OURS) == 3.2e-3
    assert results.median(LARGE, GLOO) == 16e-3


def test_the_best_mpi_is_another_one_at_each_size(results: Results) -> None:
    assert results.median(LARGE, BEST_MPI) == 4e-3
    assert results.median(SMALL, BEST_MPI) == 0.8e-6


def test_ratios_say_how_many_times_faster_we_are(results: Results) -> None:
    assert results.ratio(LARGE, GLOO) == pytest.approx(5.0)
    assert results.ratio(SMALL, BEST_MPI) == pytest.approx(0.4)


def test_what_a_side_does_not_have_has_no_figure(results: Results) -> None:
    assert results.median(LARGE, "openmpi") is None
    assert results.ratio(LARGE, "openmpi") is None
    assert results.ratio(Job(4, "barrier", 0), GLOO) is None


def test_wrong_elements_are_counted_by_side() -> None:
    results = Results()
    results.add(SMALL, OURS, 1.0, wrong=0)
    results.add(SMALL, GLOO, 1.0, wrong=7)
    assert results.wrong == {OURS: 0, GLOO: 1}


def test_a_target_is_judged_by_its_worst_size(results: Results) -> None:
    (verdict,) = judge(results, [TARGETS[0]])
    assert (verdict.at, verdict.is_reached) == (25_000_000, True)
    assert verdict.reached == pytest.approx(5.0)


def test_targets_without_figures_are_left_out(results: Results) -> None:
    judged = {(verdict.target.side, verdict.target.sizes) for verdict in judge(results, TARGETS)}
    assert judged == {
        (GLOO, "every size"),
        (BEST_MPI, "below 64 KB"),
        (BEST_MPI, "from 4 MB"),
        (BEST_MPI, "25 MB"),
    }


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (4, {"below 64 KB"}),
        (65_536, {"64 KB to 1 MB"}),
        (1_000_000, {"64 KB to 1 MB"}),
        (1 << 20, {"64 KB to 1 MB"}),
        (4_000_000, {"from 4 MB"}),
        (25_000_000, {"from 4 MB", "25 MB"}),
        (100_000_000, {"from 4 MB", "100 MB"}),
    ],
)
def test_every_size_has_its_targets_against_mpi(size: int, expected: set[str]) -> None:
    against = [target for target in TARGETS if target.side == BEST_MPI and 2 in target.ranks]
    assert {target.sizes for target in against if target.applies(size)} == expected


def test_the_lane_has_targets_of_its_own() -> None:
    assert [target.wanted for target in LANE_TARGETS if target.applies(4)] == [1.5]
    assert [target.wanted for target in LANE_TARGETS if target.applies(1_000_000)] == [1.0]
    assert [target.wanted for target in LANE_TARGETS if target.applies(262_144)] == []


def test_tables_show_times_and_ratios(results: Results) -> None:
    title, _, head, marks, small, large, _ = results_tables(results, (OURS, GLOO, "mpich", "intel"))
    assert title == "all_reduce, 2 ranks:"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, small, large)]
    assert cells[0] == [
        "size",
        "asyncpar (us)",
        "Gloo (us)",
        "MPICH (us)",
        "Intel MPI (us)",
        "Gloo / asyncpar",
        "best MPI / asyncpar",
    ]
    assert cells[1] == ["4 B", "2.00", "200", "1.80", "0.80", "100x", "0.40x"]
    assert cells[2] == ["25 MB", "3200", "16000", "4000", "8000", "5.00x", "1.25x"]
    assert set(marks) == set("|- :")


def test_verdicts_say_ok_or_short(results: Results) -> None:
    hard = Target(ops=("all_reduce",), side=GLOO, sizes="25 MB", applies=lambda size: size > 4, wanted=9.0, ranks=(2,))
    rows = verdict_table(judge(results, [TARGETS[0], hard]))[2:]
    assert [row.strip("| ").split()[-1] for row in rows] == ["ok", "short"]
    assert "9x" in rows[1]


def test_figures_are_short() -> None:
    assert [format_size(size) for size in (4, 1024, 65536, 1_000_000, 1 << 20, 25_000_000, 249_999 * 4)] == [
        "4 B",
        "1 KiB",
        "64 KiB",
        "1 MB",
        "1 MiB",
        "25 MB",
        "1 MB",
    ]
    assert [format_time(seconds) for seconds in (None, 8e-7, 2.3e-5, 0.0031)] == ["-", "0.80", "23.0", "3100"]
    assert [format_ratio(ratio) for ratio in (None, 0.012, 1.5, 12.3)] == ["-", "0.012x", "1.50x", "12x"]


def test_markdown_is_aligned() -> None:
    lines = markdown([["a", "b"], ["x", "1"], ["longer", "1000"]])
    assert len(set(map(len, lines))) == 1
    assert lines[2] == "| x      |    1 |"
