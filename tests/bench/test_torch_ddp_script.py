"""scripts/bench/compare/torch_ddp.py: what it makes of its figures; tests/torch has a run of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.compare.torch_ddp import plan_host, plan_link
from scripts.bench.compare.torch_ddp_figures import NATIVE, call_tables, find_faults, judge, step_table
from scripts.bench.compare.torch_ddp_options import parse_arguments
from scripts.bench.namespaces import End
from tests.bench.figures import figures_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "compare" / "torch_ddp.py"


def call(side: str, microseconds: float, **more: object) -> Mapping[str, Any]:
    seconds = microseconds / 1e6
    return {
        "what": "call", "where": "host", "ranks": 2, "op": "all_reduce", "size": 4, "wrong": 0,
        "side": side, "seconds": seconds, **more,
    }  # fmt: skip


def step(side: str, exposed: float, alone: float, **more: object) -> Mapping[str, Any]:
    return {
        "what": "ddp", "where": "host", "ranks": 2, "model": "small", "losses": [5.0, 4.0], "side": side,
        "step": 0.2 + exposed, "compute": 0.2, "exposed": exposed, "alone": alone, **more,
    }  # fmt: skip


def test_ratios_are_taken_within_rounds() -> None:
    found = figures_of(
        [step("gloo", 0.08, 0.040), step("asyncpar", 0.02, 0.010)],
        [step("gloo", 0.16, 0.060), step("asyncpar", 0.04, 0.020)],
    )
    row = next(line for line in step_table(found) if "asyncpar" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "DDP small, 2 ranks: asyncpar", "230.0", "200.0", "30.0", "4.00x", "15.0", "3.50x",
    ]  # fmt: skip


def test_what_torch_adds_is_the_difference_to_the_same_call_without_it() -> None:
    found = figures_of([call("gloo", 300.0), call("asyncpar", 20.0), call(NATIVE, 8.0)])
    row = next(line for line in call_tables(found) if line.startswith("| all_reduce"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "all_reduce, 4 B", "20.0", "300", "15x", "8.00", "12.0",
    ]  # fmt: skip


def test_exposed_time_without_copies_is_compared_with_gloos() -> None:
    records = [step("gloo", 0.06, 0.040), step("zero-copy", 0.02, 0.020, model="small")]
    [verdict] = judge(figures_of(records))
    assert "zero-copy takes 0.33 of Gloo's time in exposed communication, 0.4 wanted" in str(verdict)
    assert verdict.is_reached


def test_fsdp_and_codecs_on_a_link_have_goals_of_their_own() -> None:
    link = {"where": "1000 Mbit/s"}
    records = [step(side, exposed, 0.1, **link) for side, exposed in (("gloo", 0.1), ("zero-copy int8", 0.03))]
    records += [step("zero-copy", 0.01, 0.1, **link)]
    records += [step(side, exposed, 0.1, what="fsdp") for side, exposed in (("gloo", 0.1), ("zero-copy", 0.03))]
    assert [str(verdict) for verdict in judge(figures_of(records))] == [
        "DDP small, 2 ranks, 1000 Mbit/s: zero-copy int8 takes 0.30 of Gloo's time in exposed communication, "
        "0.25 wanted: short",
        "FSDP2 small, 2 ranks: zero-copy takes 0.30 of Gloo's time in exposed communication, 0.4 wanted: ok",
    ]


def test_verdicts_say_what_is_short() -> None:
    records = [step("gloo", 0.06, 0.040), step("asyncpar", 0.02, 0.020)]
    records += [call("asyncpar", 20.0), call(NATIVE, 8.0), call("asyncpar", 30.0, op="async")]
    records += [call("asyncpar", 4.0, op="nothing")]
    assert [verdict.is_reached for verdict in judge(figures_of(records))] == [False, True, True, False]
    assert str(judge(figures_of(records))[2]).startswith(
        "all_reduce of 4 B, 2 ranks: the binding adds 8.0 us, torch itself 4.0 us"
    )


def test_only_what_was_measured_is_judged() -> None:
    assert judge(figures_of([step("asyncpar", 0.02, 0.020), call("asyncpar", 20.0)])) == []


def test_sides_that_do_not_agree_are_a_fault_and_codecs_have_leave_to_differ_a_little() -> None:
    right = [step("gloo", 0.1, 0.1), step("asyncpar", 0.1, 0.1)]
    assert find_faults(figures_of([*right, step("asyncpar int8", 0.1, 0.1, losses=[4.01])])) == []
    (fault,) = find_faults(figures_of([*right, step("asyncpar", 0.1, 0.1, what="fsdp", losses=[4.01])]))
    assert "FSDP2 small, 2 ranks: asyncpar: expected a loss of 4.000000, got 4.010000" in fault
    (fault,) = find_faults(figures_of([call("asyncpar", 1.0, wrong=3)]))
    assert "3 wrong elements" in fault


@pytest.mark.parametrize(
    ("wrong", "printed"),
    [
        (("--parts", "calls,cells"), "--parts: expected some of calls, ddp, fsdp, link, got 'cells'"),
        (("--models", ""), "--models: expected some of tiny, small, large, got none"),
        (("--ranks", "0"), "expected positive numbers"),
        (("--sizes", "4T"), "--sizes: expected a size"),
        (("--json", "/nowhere/at/all.json"), "--json: expected a file in a folder that exists"),
    ],
)
def test_mistakes_are_one_line(wrong: tuple[str, str], printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(wrong)
    assert ended.value.code == 2
    assert printed in capsys.readouterr().err


def test_every_side_runs_with_every_number_of_ranks() -> None:
    jobs = list(plan_host(parse_arguments(["--parts", "calls,ddp"])))
    assert [(job.marks["side"], job.marks["ranks"]) for job in jobs] == [
        (side, ranks) for ranks in (2, 4) for side in ("gloo", "asyncpar", "zero-copy", NATIVE)
    ]
    assert list(plan_host(parse_arguments(["--parts", "link"]))) == []


def test_the_side_without_copies_has_steps_only() -> None:
    jobs = list(plan_host(parse_arguments(["--parts", "calls", "--ranks", "2"])))
    assert [job.marks["side"] for job in jobs] == ["gloo", "asyncpar", NATIVE]


def test_the_link_has_asyncpars_sides_with_a_codec_too() -> None:
    ends = End(namespace="left", address="10.0.0.1"), End(namespace="right", address="10.0.0.2")
    jobs = list(plan_link(parse_arguments(["--codec", "int4"]), ends))
    assert [job.marks["side"] for job in jobs] == [
        "gloo", "asyncpar", "zero-copy", "asyncpar int4", "zero-copy int4",
    ]  # fmt: skip


def test_without_torch_it_says_where_there_is_one() -> None:
    program = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert "expected the environment of scripts/test-backends" in done.stderr
