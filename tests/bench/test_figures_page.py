"""The page of figures and the README's picture are what the command writes from the stored results."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from scripts.bench.figures import figures
from scripts.bench.figures.all_reduce_picture import Timings, draw, read_timings
from scripts.bench.figures.figures import Result
from scripts.bench.programs import RUN, find_programs

CASE = Result(
    title="A case",
    about="What it measures.",
    command="python nothing.py",
    date="2026-01-01",
    machine="a machine",
    output=("line",),
    notes=("A remark.",),
)


def test_pages_and_picture_are_what_the_results_make() -> None:
    results = [figures.load(name) for name in figures.ORDER]
    assert figures.PAGE.read_text(encoding="utf-8") == figures.page(results), "run scripts/bench/run figures"
    readme = figures.README.read_text(encoding="utf-8")
    assert readme == figures.with_comparison(readme, figures.comparison(results[0])), "run scripts/bench/run figures"
    assert figures.PICTURE.read_text(encoding="utf-8") == figures.picture(results[0]), "run scripts/bench/run figures"


def test_the_picture_has_every_time_of_each_side_and_the_best_of_the_mpi_libraries() -> None:
    drawn = ET.fromstring(figures.picture(figures.load("all_reduce")))  # our own picture
    hints = [circle[0].text for circle in drawn.iter() if circle.tag.endswith("circle")]
    assert len(hints) == 2 * 3 * 10
    found = read_timings(
        [
            "all_reduce, 3 ranks:",
            "",
            "| size | asyncpar (us) | Gloo (us) | MPICH (us) | Open MPI (us) | Gloo / asyncpar |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            "| 4 B | 8 | 120 | 3 | 1.5 | 15x |",
            "| 1 MB | 67 | 480 | 80 | 90 | 7x |",
            "",
        ]
    )
    peers: dict[str, tuple[float, ...]] = {"asyncpar": (8.0, 67.0), "Gloo": (120.0, 480.0), "best MPI": (1.5, 80.0)}
    assert found == [Timings("3 ranks", ("4 B", "1 MB"), peers)]
    assert "best MPI, 1 MB: 80 us" in draw(found)


def test_every_result_is_on_the_page_with_machine_date_and_a_command_that_is_there() -> None:
    assert {path.stem for path in figures.RESULTS.glob("*.json")} == set(figures.ORDER)
    programs = find_programs()
    for name in figures.ORDER:
        found = figures.load(name)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.date)
        assert found.machine
        assert found.output or found.notes
        runner, program, *_ = found.command.split()
        assert runner == RUN
        assert program in programs


def test_a_result_comes_back_as_it_was_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.store("case", CASE)
    assert figures.load("case") == CASE


def test_running_a_case_replaces_its_figures_and_drops_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "python -c 'print(\"| a |\\n| --- |\\n| 1 |\")'"
    renewed = figures.renew(replace(CASE, command=command), machine="another", today="2026-02-02")
    assert (renewed.date, renewed.machine, renewed.notes) == ("2026-02-02", "another", ())
    assert renewed.output == ("| a |", "| --- |", "| 1 |")
    with pytest.raises(SystemExit, match="exit status 3; its result stays as it was"):
        figures.renew(replace(CASE, command="python -c 'raise SystemExit(3)'"), machine="m", today="d")


def test_output_without_a_table_is_shown_as_it_was_printed() -> None:
    assert figures.section(CASE)[4:] == [
        "`python nothing.py`, 2026-01-01, a machine",
        "",
        "```",
        "line",
        "```",
        "",
        "A remark.",
        "",
    ]
    assert "```" not in figures.section(replace(CASE, output=("| a |",)))


def test_a_table_that_lacks_a_peer_and_a_readme_without_marks_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"expected a table with columns .*best MPI / asyncpar; compare all peers"):
        figures.picture(replace(CASE, output=("| size | asyncpar (us) |", "| --- | --- |")))
    with pytest.raises(SystemExit, match=r"README.md: expected the marks"):
        figures.with_comparison("nothing", "table")
