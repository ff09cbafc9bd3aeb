"""Tables of goals: what is stored, how figures are read, and that they are the ones on the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench.figures import figures
from scripts.bench.goals import goal as one_goal
from scripts.bench.goals import goals
from scripts.bench.goals.goal import Goal, lines, load, table
from scripts.bench.goals.goals import TABLES
from scripts.bench.programs import RUN, find_programs
from tests.bench.refusals import refusal_of

PROGRAMS = find_programs()
ROWS = {goal.name: goal for rows in TABLES.values() for goal in rows}
FAULTS = '{"rows": [["G1", "bits", "bit-equal", ""], ["G3", "p", "0.05 s", ""], ["G3", "q", "0.09 s", ""]'


def test_every_goal_has_a_row() -> None:
    seen = [*dict.fromkeys(goal.name.partition(",")[0] for goal in TABLES["observability"])]
    assert seen == [f"A{number}" for number in range(1, 11)]
    elastic = [*dict.fromkeys(goal.name.partition(",")[0] for goal in TABLES["elasticity"])]
    assert elastic == [*(f"G{number}" for number in range(1, 19) if number != 13), "control"]
    engines = [*dict.fromkeys(goal.name.partition(",")[0] for goal in TABLES["engines"])]
    assert engines == [f"B{number}" for number in range(1, 7)]
    assert len(ROWS) == sum(map(len, TABLES.values()))


@pytest.mark.parametrize("name", ROWS)
def test_the_command_of_a_goal_is_there(name: str) -> None:
    found = [word for word in ROWS[name].command.split() if word.startswith(("scripts/", "tests/"))]
    assert found
    assert all((figures.ROOT / word).exists() for word in found)
    program = [word for word in ROWS[name].command.partition(f"{RUN} ")[2].split() if not word.startswith("-")][:1]
    assert set(program) <= PROGRAMS.keys()


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_table_of_the_stored_figures(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = load(name)
    assert known.keys() <= {goal.name for goal in TABLES[name]}
    assert figures.load(name).output == tuple(table(TABLES[name], known)), f"run scripts/bench/run figures --run {name}"
    assert figures.load(name).command == f"{RUN} goals {name}"
    assert goals.main([name]) == 0
    assert tuple(capsys.readouterr().out.splitlines()) == figures.load(name).output


def test_what_was_not_measured_says_so() -> None:
    first = table(TABLES["observability"], {})[2]
    assert first.startswith("| A1 | a record takes at most 0.8 us | - | not measured |")


@pytest.mark.parametrize(
    ("name", "printed", "figure"),
    [
        (
            "A1",
            "records alone: 1.18 us per operation, 0.59 us for one that is over without the loop",
            "1.18 us; 0.59 us for one that is over at once",
        ),
        (
            "DDP small",
            "DDP small, 2 ranks: zero-copy takes 0.35 of Gloo's time in exposed communication, 0.4 wanted: ok",
            "0.35",
        ),
        (
            "DDP large, link",
            "DDP large, 2 ranks, 1000 Mbit/s: zero-copy int8 takes 0.21 of Gloo's time in exposed communication, 0.25",
            "0.21",
        ),
        (
            "train_lm, dp 2",
            "| one process | torch | 4 | 5 | 1.00x |  |\n| dp2 (DDP) | asyncpar shm | 266 | 15,000 | 1.53x | 0.74x |",
            "torch takes 0.74x as long",
        ),
        (
            "calibration",
            'tcp ...\n{"within": 5, "cases": 6, "is_reached": false, "worst": {"shm": 1.04, "tcp": 1.2}, '
            '"skipped": ["100"]}',
            "5 of 6 cases; worst: shm 1.04, tcp 1.20; left out: 100",
        ),
        ("streamed", 'ratio ...\n{"shorter": 0.0912, "is_reached": true}', "9.1% shorter"),
        (
            "policies",
            '{"wait": {"speedup": 1, "loss": 1}, "quorum:0.75": {"speedup": 1.87, "loss": 1.012}}',
            "quorum:0.75 1.87x, loss 1.012",
        ),
        (
            "small all_reduce, 4 ranks",
            "| all_reduce |     2 | 64 KB to 1 MB | best MPI |   0.5x |   0.37x | 64 KiB | short |\n"
            "| all_reduce |     4 | 64 KB to 4 MB | best MPI |   0.5x |   0.22x | 256 KiB | short |",
            "0.22x at 256 KiB",
        ),
        ("asks, 100 under way", "| concurrent asks, against xoscar |   4x |  3.33x | short |", "3.33x"),
        ("idle actors", "| 10,000 idle actors |  15 MB | 21.0 MB | short |", "21.0 MB"),
        ("ZeRO 3", "| shm, none | 30 | 1.00x | 3 |\n| shm, stage3 | 44 | 1.41x | 3 |", "1.41x"),
        ("A1, step", 'trained\n{"percent": 0.31, "pairs": 144}\n', "+0.3 % (median of 144 pairs)"),
        ("A3", "dead  right\nculprit and cause: 13 of 13", "13 of 13"),
        (
            "A3",
            "culprit and cause: 13 of 13; torch's analyzer 4 of 13, the culprit alone 10\n",
            "13 of 13; torch's analyzer 4 of 13, the culprit alone 10",
        ),
        (
            "A6",
            "stacks of 8 ranks, one stopped: median 0.80 s, slowest 1.00 s (goal 1 s)",
            "median 0.80 s, slowest 1.00 s",
        ),
        (
            "A7",
            '{"none": {"right": 9, "wrong": 1, "said": ["x"]}, "link": {"silent": 2}}',
            "right looks: none 9 of 10, link 0 of 2",
        ),
        (
            "A8",
            "page_bytes    100\ncore_percent    2.1\npicture_bytes   9\nresident_mb_after_a_fifth   60.1\n"
            "resident_mb_at_the_end   60.2\n",
            "100 bytes; 2.1 % of a core; 60.1 MB after a fifth, 60.2 MB at the end",
        ),
        ("A9", "found\n10 of 10, the slowest in 4.1 s", "10 of 10, the slowest in 4.1 s"),
        ("A10", '{"kills": 200, "complete": 199, "problems": ["x"]}', "199 of 200"),
        ("G1", f"G1 ...\n{FAULTS}]}}", "bit-equal"),
        ("G3", f"{FAULTS}]}}", "p50 0.05 s, p99 0.09 s"),
        (
            "G9",
            f'{FAULTS}, ["G9", "", "96.1%", ""], ["G11", "", "0", ""]], '
            '"costs": {"stop": [3, 1.12], "kill": [7, 0.57]}}',
            "96.1% kept, bit-equal, 0 false deaths; a fault costs: kill 0.6 s of 7, stop 1.1 s of 3",
        ),
        ("G10", "2 ranks\nelastic 101 ms, bare 100 ms: +1.0 %   goal 1 %", "+1.0 %"),
        (
            "G14",
            '{"seeds": 10000, "failed": 0, "seconds": 271.4, "processes": 2, "kinds": ["kill", "pause"], '
            '"faults_per_seed": 3, "events_per_seed": 222.9}\n',
            "10,000 elastic programs with 3 faults of 2 kinds in 271 s by 2 processes, 0 failed",
        ),
        (
            "G6, 4 joiners",
            f'{FAULTS}, ["G6", "", "2.6 s", ""], ["G6", "", "2.7 s", ""], ["G6", "", "4 of 4", ""]]}}',
            "p50 2.6 s, largest 2.7 s, newcomers that counted: 4 of 4",
        ),
        (
            "G6, 1 Gbit/s",
            f'{FAULTS}, ["G6", "", "4.6 s", ""], ["G6", "", "0.91 to 0.93", ""]]}}',
            "largest 4.6 s, share of line rate: 0.91 to 0.93",
        ),
        (
            "G12, ZeRO 3",
            f'{FAULTS}, ["G12", "", "0: 0.11 s, 1: 0.09 s", ""]]}}',
            "largest of rank 0: 0.11 s, 1: 0.09 s",
        ),
        ("G15", "..... 61 passed in 9.31s", "61 tests passed"),
        (
            "B1",
            '{"what": "ranks", "kills": 9, "median": 0.3, "most": 1.25, "load": 0.1}\n'
            '{"what": "nodes", "kills": 9, "median": 0.5, "most": 1.5, "load": 0.1}\n',
            "median 0.30 s, slowest 1.25 s of 9",
        ),
        (
            "B2",
            '{"engine": "local", "first": 1.5, "median": 1.4, "most": 1.6}\n'
            '{"engine": "dask", "first": 2.5, "median": 1.7, "most": 1.9}\n',
            "median 1.70 s, slowest 1.90 s; the first 2.50 s",
        ),
        (
            "B2, deaths",
            '{"what": "kills", "rounds": 9, "median": 0.3, "most": 1.25, "within_2_s": 9}\n',
            "median 0.30 s, slowest 1.25 s of 9",
        ),
        ("B2, pairs", '{"what": "pairs", "jobs": 100, "seconds": 71.2, "longest": 70}\n', "100 jobs in 71 s"),
        (
            "B3",
            '{"times_faster": 2.5, "asyncpar_ms": 1.0, "gloo_ms": 2.5}\n',
            "2.50 times (1.00 ms, GLOO 2.50 ms)",
        ),
        (
            "B4",
            '{"starts": 20, "well": 19, "names_after": 30.0, "most_seconds_after_names": 2.5}\n',
            "19 of 20, at most 2.5 s after names resolved (after 30 s)",
        ),
        ("B5, cells", '{"what": "cells", "rounds": 20, "launched_again": 20}\n', "20 of 20"),
        (
            "G4, black hole",
            f'{FAULTS}, ["G4", "", "3 s", ""], ["G4", "", "1 s", ""], ["G4", "", "4 s", ""], ["G4", "", "5 s", ""]]}}',
            "agent stopped: 3 s, rank stopped: 1 s, cut off: p50 4 s, largest 5 s",
        ),
        (
            "G16",
            f'{FAULTS}, ["G16", "", "0", ""], ["G16", "", "1", ""], ["G16", "", "90 ms", ""]]}}',
            "steps done again: 0, peer errors: 1, to the next commit, less a step 90 ms",
        ),
        (
            "control, torchrun",
            '{"peer": "torchrun", "faults": 8, "recovery_median": 3.62, "steps_done_again": 8}',
            "SIGKILL to the next new step 3.62 s (median of 8), 8 steps done again",
        ),
    ],
)
def test_figures_are_read_from_what_commands_print(name: str, printed: str, figure: str) -> None:
    assert ROWS[name].read(printed) == figure


def test_output_without_the_figure_is_refused() -> None:
    with pytest.raises(SystemExit, match="in the output, got 'nothing'"):
        ROWS["A3"].read("nothing")
    with pytest.raises(SystemExit, match="expected a JSON object"):
        ROWS["A10"].read("nothing")
    with pytest.raises(SystemExit, match="expected a JSON object with what ranks"):
        ROWS["B1"].read('{"what": "nodes"}')


def test_measuring_runs_a_command_once_and_a_failure_leaves_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_goal, "RESULTS", tmp_path)
    stored, count = tmp_path / "some.json", tmp_path / "count"
    script = tmp_path / "script.py"
    script.write_text(f"open({str(count)!r}, 'a').write('x'); print('took 3 us and 4 us')")
    first = Goal("A1", "fast", f"python {script}", lines(r"took (\d+ us)", "{}"), "the clock")
    second = replace(first, name="A2", read=lines(r"and (\d+ us)", "{}"))
    failing = replace(first, command='python -c "raise SystemExit(3)"')
    stored.write_text(json.dumps({"A1": {"figure": "2 us", "measured": "before"}}))
    monkeypatch.setattr(goals, "TABLES", {"some": (failing,), "others": (replace(first, name="A3"),)})
    with pytest.raises(SystemExit, match="exit status 3; its figures stay as they were"):
        goals.main(["--run", "A1"])
    assert goals.main(["some"]) == 0
    assert "| A1 | fast | 2 us | before |" in capsys.readouterr().out
    monkeypatch.setattr(goals, "TABLES", {"some": (first, second), "others": (replace(first, name="A3"),)})
    assert goals.main(["--run", "A2"]) == 0  # which shows the other row, too
    assert "A3" not in capsys.readouterr().out, "tables without a measured row are not printed"
    known = json.loads(stored.read_text())
    assert (known["A1"]["figure"], known["A2"]["figure"], count.read_text()) == ("3 us", "4 us", "x")


def test_a_goal_that_was_never_measured_needs_no_stored_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_goal, "RESULTS", tmp_path)
    goal = Goal("A1", "fast", "python -c pass", lines("x", ""), "the clock")
    monkeypatch.setattr(goals, "TABLES", {"some": (goal,)})
    assert goals.main([]) == 0
    assert "| A1 | fast | - | not measured |" in capsys.readouterr().out


def test_all_of_a_table_is_measured_or_nothing_that_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_goal, "RESULTS", tmp_path)
    made = [Goal(f"A{n}", "fast", f"python -c 'print({n}, \"us\")'", lines(r"(\d us)", "{}"), "-") for n in (1, 2, 3)]
    monkeypatch.setattr(goals, "TABLES", {"some": tuple(made[:2]), "others": (made[2],)})
    assert goals.main(["some", "--run", "all"]) == 0
    assert {name: row["figure"] for name, row in load("some").items()} == {"A1": "1 us", "A2": "2 us"}
    assert load("others") == {}
    capsys.readouterr()
    code, said = refusal_of(goals.main, ["some", "--run", "A3"], capsys)
    assert code == 2
    assert "--run: expected all or some of A1, A2, got 'A3'" in said
