"""Decisions of the scripts behind the goals of steps: finalists, verdicts, and last lines that rows can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench import calibration, step_goals, streamed
from scripts.bench.actor_figures import Figures, judge, verdict_table
from scripts.bench.calibration_rank import finalists_of
from scripts.bench.policies import Outcome
from scripts.bench.policies import verdict as policies_verdict

ROWS = {goal.name: goal for goal in step_goals.GOALS}


def test_the_choice_and_the_three_quickest_other_pins_are_measured_again() -> None:
    medians = {"25m@ring": 5.0, "25m@tree": 1.0, "4m@ring": 2.0, "25m@halving": 4.0, "1m@ring": 3.0}
    assert finalists_of(medians, "25m@ring") == ["25m@ring", "25m@tree", "4m@ring", "1m@ring"]
    assert finalists_of(medians, "25m@tree")[0] == "25m@tree"
    assert finalists_of({"25m@ring": 1.0}, "25m@ring") == ["25m@ring"]


def test_only_times_of_the_second_comparison_count(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "size": 4096,
        "choice": "25m@ring",
        "times": {"25m@ring": 2.0, "25m@tree": 0.1},
        "final": {"25m@ring": 2.1, "25m@tree": 2.0},
        "lost": 0.01,
    }
    assert calibration.show("tcp", record) == pytest.approx(1.05)
    assert "best 25m@tree" in capsys.readouterr().out


def test_calibration_is_good_if_every_case_is() -> None:
    good = calibration.verdict({"shm": [1.0, 1.09], "tcp": [1.1]}, ["100"])
    assert (good["within"], good["cases"], good["is_reached"]) == (3, 3, True)
    assert good["worst"] == {"shm": 1.09, "tcp": 1.1}
    short = calibration.verdict({"shm": [1.0, 1.2]}, [])
    assert (short["within"], short["is_reached"]) == (1, False)
    assert not calibration.verdict({}, ["100"])["is_reached"], "nothing was measured"


def test_steps_are_short_enough_from_eight_percent_less() -> None:
    assert streamed.verdict({"ratio": 0.9}) == {"shorter": 0.1, "is_reached": True}
    assert not streamed.verdict({"ratio": 0.95})["is_reached"]


def test_modes_are_compared_with_waiting() -> None:
    waiting = Outcome("wait", 1800.0, 0.3, 2.0, 1.0)
    found = policies_verdict([waiting, Outcome("quorum:0.75", 900.0, 0.6, 2.1, 0.8)])
    assert found["quorum:0.75"] == {"speedup": 2.0, "loss": 1.05, "parts": 0.8}
    shown = ROWS["policies"].read(f"table\n{json.dumps(found)}\n")
    assert shown == "quorum:0.75 2.00x, loss 1.050"


def test_a_wire_that_is_not_there_leaves_the_figure_as_it_was() -> None:
    with pytest.raises(SystemExit, match="skipped: no namespaces"):
        ROWS["streamed"].read('skipped\n{"skipped": "no namespaces"}')


def test_every_goal_of_actors_is_a_verdict_of_their_script() -> None:
    made = Figures()
    for side, seconds in (("asyncpar", 14e-6), ("xoscar", 50e-6)):
        made.add(side, {"figure": "concurrent", "seconds": seconds, "wrong": 0})
    made.add("asyncpar", {"figure": "concurrent 1000", "seconds": 28e-6, "wrong": 0})
    made.add("asyncpar", {"figure": "first", "seconds": 0.02, "later": 0.005, "size": 64_000_000, "wrong": 0})
    made.add("asyncpar", {"figure": "idle", "bytes": 21e6, "actors": 10_000, "wrong": 0})
    output = "\n".join(verdict_table(judge(made)))
    names = [name for name, goal in ROWS.items() if goal.command == step_goals.ACTORS]
    assert {name: ROWS[name].read(output) for name in names} == {
        "asks, 100 under way": "3.57x",
        "asks, 1,000 under way": "0.50x",
        "first 64 MB": "0.25x",
        "idle actors": "21.0 MB",
    }


def test_scripts_end_with_what_their_rows_read() -> None:
    for name in ("calibration", "streamed", "policies"):
        script = Path(step_goals.__file__).with_name(f"{name}.py")
        assert ROWS[name].command == f"python scripts/bench/{script.name}"
        assert "one JSON object" in script.read_text()
