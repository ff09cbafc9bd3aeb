"""Decisions of the scripts behind the goals of steps: finalists, verdicts, and last lines that rows can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench.compare.actor_figures import Figures, judge, verdict_table
from scripts.bench.compare.comparison import TARGETS, Job, Results
from scripts.bench.compare.comparison import judge as judge_peers
from scripts.bench.compare.comparison import verdict_table as peer_verdicts
from scripts.bench.compare.parallel_figures import peer_table, zero_table
from scripts.bench.compare.torch_ddp_figures import judge as judge_steps
from scripts.bench.goals import calibration, step_goals, streamed
from scripts.bench.goals.calibration_rank import finalists_of
from scripts.bench.goals.policies import Outcome
from scripts.bench.goals.policies import verdict as policies_verdict
from tests.bench.figures import figures_of
from tests.bench.test_parallel_figures import theirs, train, zero
from tests.bench.test_torch_ddp_script import step

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


def test_every_goal_of_torch_steps_is_a_verdict_of_their_script() -> None:
    cases: list[dict[str, object]] = [
        {"what": what, "model": model, "ranks": ranks}
        for what in ("ddp", "fsdp")
        for model in ("small", "large")
        for ranks in (2, 4)
    ]
    records = [
        step(side, exposed, 0.1, **case) for case in cases for side, exposed in (("gloo", 0.1), ("zero-copy", -0.01))
    ]
    link: dict[str, object] = {"where": "1000 Mbit/s", "model": "large"}
    records += [step(side, exposed, 0.1, **link) for side, exposed in (("gloo", 0.1), ("zero-copy int8", 0.02))]
    output = "\n".join(map(str, judge_steps(figures_of(records))))
    read = {
        goal.name: goal.read(output) for goal in step_goals.GOALS if goal.command in (step_goals.HOST, step_goals.LINK)
    }
    assert read.pop("DDP large, link") == "0.20"
    assert len(read) == len(cases)
    assert set(read.values()) == {"-0.10"}


def test_goals_of_small_sums_are_the_worst_ratios_to_the_best_mpi() -> None:
    made = Results()
    for ranks in (2, 4):
        for size, ours, best in ((65_536, 20e-6, 8e-6), (1_000_000, 100e-6, 90e-6), (4_000_000, 600e-6, 180e-6)):
            made.add(Job(ranks, "all_reduce", size), "asyncpar", ours, wrong=0)
            made.add(Job(ranks, "all_reduce", size), "intel", best, wrong=0)
    output = "\n".join(peer_verdicts(judge_peers(made, TARGETS)))
    assert ROWS["small all_reduce"].read(output) == "0.40x at 64 KiB"
    assert ROWS["small all_reduce, 4 ranks"].read(output) == "0.30x at 4 MB"


def test_goals_of_layouts_and_shards_are_ratios_of_their_tables() -> None:
    shards = "\n".join(zero_table(figures_of([zero("none", 0.2), zero("stage2", 0.3), zero("stage3", 0.25)])))
    assert [ROWS[name].read(shards) for name in ("ZeRO 2", "ZeRO 3")] == ["1.50x", "1.25x"]
    ours = [train("alone", 0.8, lane="none"), train("dp2", 0.5)]
    layouts = "\n".join(peer_table(figures_of([*ours, theirs("alone", 0.9), theirs("ddp2", 0.4)]), 4096))
    assert ROWS["train_lm, dp 2"].read(layouts) == "torch takes 0.80x as long"


def test_scripts_end_with_what_their_rows_read() -> None:
    for name in ("calibration", "streamed", "policies"):
        script = Path(step_goals.__file__).with_name(f"{name}.py")
        assert ROWS[name].command == f"scripts/bench/run {script.stem}"
        assert "one JSON object" in script.read_text()
