"""The table of the goals of seeing a job: what is stored, how figures are read, and that it is the one on the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench import figures, observability
from scripts.bench.observability import GOALS, Goal, lines, measure, table

ROWS = {goal.name: goal for goal in GOALS}


def test_every_goal_has_a_row_with_a_command_that_is_there() -> None:
    assert [*dict.fromkeys(name.partition(",")[0] for name in ROWS)] == [f"A{number}" for number in range(1, 11)]
    for goal in GOALS:
        script = next(word for word in goal.command.split() if word.startswith("scripts/"))
        assert (figures.ROOT / script).exists(), goal.command


def test_the_page_has_the_table_of_the_stored_figures() -> None:
    assert observability.load().keys() <= ROWS.keys()
    assert figures.load("observability").output == tuple(table(observability.load())), (
        "run scripts/bench/figures.py --run observability"
    )


def test_what_was_not_measured_says_so() -> None:
    assert table({})[2].startswith("| A1 | a record takes at most 0.8 us | - | not measured |")


@pytest.mark.parametrize(
    ("name", "printed", "figure"),
    [
        (
            "A1",
            "records alone: 1.18 us per operation, 0.59 us for one that is over without the loop",
            "1.18 us; 0.59 us for one that is over at once",
        ),
        ("A1, step", 'trained\n{"percent": 0.31, "pairs": 144}\n', "+0.3 % (median of 144 pairs)"),
        ("A3", "dead  right\nculprit and cause: 13 of 13", "13 of 13"),
        (
            "A6",
            "stacks of 8 ranks, one stopped: median 0.80 s, slowest 1.00 s (goal 1 s)",
            "median 0.80 s, slowest 1.00 s",
        ),
        ("A7", '{"none": {"right": 9, "wrong": 1}, "link": {"silent": 2}}', "right looks: none 9 of 10, link 0 of 2"),
        (
            "A8",
            "page_bytes    100\ncore_percent    2.1\npicture_bytes   9\nresident_mb_after_a_fifth   60.1\n"
            "resident_mb_at_the_end   60.2\n",
            "100 bytes; 2.1 % of a core; 60.1 MB after a fifth, 60.2 MB at the end",
        ),
        ("A9", "found\n10 of 10, the slowest in 4.1 s", "10 of 10, the slowest in 4.1 s"),
        ("A10", '{"kills": 200, "complete": 199, "problems": ["x"]}', "199 of 200"),
    ],
)
def test_figures_are_read_from_what_commands_print(name: str, printed: str, figure: str) -> None:
    assert ROWS[name].read(printed) == figure


def test_output_without_the_figure_is_refused() -> None:
    with pytest.raises(SystemExit, match="in the output, got 'nothing'"):
        ROWS["A3"].read("nothing")
    with pytest.raises(SystemExit, match="expected a JSON object"):
        ROWS["A10"].read("nothing")


def test_measuring_runs_the_command_and_a_failure_leaves_the_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goal = Goal("A1", "fast", "python -c \"print('took 3 us')\"", lines(r"took (\d+ us)", "{}"), "the clock")
    assert measure(goal, when="today") == {"figure": "3 us", "measured": "today"}
    failing = replace(goal, command='python -c "raise SystemExit(3)"')
    stored = tmp_path / "goals.json"
    stored.write_text(json.dumps({"A1": {"figure": "2 us", "measured": "before"}}))
    monkeypatch.setattr(observability, "STORED", stored)
    monkeypatch.setattr(observability, "GOALS", (failing,))
    with pytest.raises(SystemExit, match="exit status 3; its figure stays as it was"):
        observability.main(["--run", "A1"])
    monkeypatch.setattr(observability, "GOALS", (goal,))
    assert observability.main([]) == 0
    assert "| A1 | fast | 2 us | before |" in capsys.readouterr().out
    assert observability.main(["--run", "all"]) == 0
    assert json.loads(stored.read_text())["A1"]["figure"] == "3 us"
