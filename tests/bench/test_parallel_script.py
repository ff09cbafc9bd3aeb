"""scripts/bench/compare/parallel.py as people run it: tiny sizes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.parallel import MemoryOptimizationStrategy
from asyncpar.testing import local_world
from asyncpar.zero import ZeROStage
from scripts.bench.compare.parallel import LAYOUTS, plan
from scripts.bench.compare.parallel_figures import find_faults
from scripts.bench.compare.parallel_hops import measure_hops
from scripts.bench.compare.parallel_options import parse_arguments, rules_of
from scripts.bench.compare.parallel_train import config_of
from scripts.bench.compare.parallel_virtual import CASES, Case, measure_case
from scripts.bench.peers.model_rules import Rules
from scripts.bench.rounds import Figures

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "compare" / "parallel.py"


def run(part: str, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Run one part without torch; return what it wrote, and its records."""
    target = folder / "parallel.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--parts", part, "--envs", str(folder), "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(target.read_text())
    assert document["failures"] == document["faults"] == []
    assert f"--parts {part} --quick" in done.stdout
    return done.stdout + done.stderr, document["records"]


async def test_a_hop_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    async with local_world(2) as nodes:
        await asyncio.gather(*(measure_hops(node, sizes=[4], micro_batches=2, repeats=1) for node in nodes))
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (record["what"], record["size"], record["micro_batches"]) == ("hops", 4, 2)
    assert len(record["seconds"]) == 9
    assert record["seconds"]["raw"] > 0.0


@pytest.mark.soak
@pytest.mark.process
def test_hops_are_measured(tmp_path: Path) -> None:
    _, records = run("hops", tmp_path)
    assert [(one["lane"], one["size"]) for one in records] == [("shm", 4000), ("shm", 4_000_000)]
    for record in records:
        assert len(record["seconds"]) == 9
        assert record["seconds"]["raw"] > 0.0


@pytest.mark.soak
@pytest.mark.process
def test_stages_of_zero_are_measured(tmp_path: Path) -> None:
    _, records = run("zero", tmp_path)
    assert [one["stage"] for one in records] == list(ZeROStage)
    whole = records[0]["values"] * 4
    sent = [one["sent"] for one in records]
    assert sent[:3] == pytest.approx([whole] * 3, abs=200)
    assert sent[3] == pytest.approx(1.5 * whole, abs=200)
    assert all(one["seconds"] > 0.0 for one in records)


@pytest.mark.soak
@pytest.mark.process
def test_layouts_are_measured_and_torch_is_said_to_be_missing(tmp_path: Path) -> None:
    printed, records = run("layouts", tmp_path)
    assert "torch is left out" in printed
    assert [one["layout"] for one in records] == [layout for layouts in LAYOUTS.values() for layout in layouts]
    for record in records:
        assert record["losses"][-1] == pytest.approx(records[0]["losses"][-1], rel=1e-5)
        assert record["computing"] + record["communicating"] + record["waiting"] <= 1.01


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.chunks}")
def test_the_executor_takes_what_the_table_says(case: Case) -> None:
    figures = Figures()
    figures.add(0, measure_case(case))
    assert find_faults(figures) == []


@pytest.mark.parametrize(
    ("wrong", "printed"),
    [
        (("--rounds", "0"), "--rounds: expected a positive number, got 0"),
        (("--micro-batches", "-1"), "--micro-batches: expected a positive number"),
        (("--parts", "hops,hips"), "--parts: expected some of schedules, hops, zero, layouts, got 'hips'"),
        (("--parts", ""), "--parts: expected some of"),
        (("--lanes", "grpc"), "--lanes: expected some of shm, tcp, got 'grpc'"),
        (("--peers", "horovod"), "--peers: expected some of alone, ddp, fsdp, pipeline, got 'horovod'"),
        (("--heads", "3"), "--heads: expected an even divisor of --dim 128, got 3"),
        (("--batch", "24"), "--batch: expected a multiple of 4 and of 2 replicas * 8 micro-batches, got 24"),
        (("--json", "/nowhere/figures.json"), "--json: expected a file in a folder that exists"),
        (("--layers", "3"), "--layers: expected an even number"),
        (("--steps", "many"), "argument --steps: invalid int value: 'many'"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    wrong: tuple[str, str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(wrong)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert printed in lines[0]


def test_a_round_has_both_lanes_of_two_ranks_and_all_forms_of_torch() -> None:
    titles = [job.title for job in plan(parse_arguments([]), Path("values"), has_torch=True)]
    assert titles[:4] == ["hops over shm", "ZeRO over shm", "hops over tcp", "ZeRO over tcp"]
    assert [title for title in titles if title.startswith("dp2,")] == [
        "dp2, tp2, pp2, dp2-zero3 over shm",
        "dp2, tp2, pp2, dp2-zero3 over tcp",
    ]
    assert titles[-4:] == ["torch, alone", "torch, ddp", "torch, fsdp", "torch, pipeline"]


def test_names_of_layouts_say_what_they_are() -> None:
    config = config_of("dp2xpp2", Rules(), 8)
    sizes = config.parallelism
    assert (sizes.dp_size, sizes.tp_size, sizes.pp_size, config.micro_batches) == (2, 1, 2, 8)
    assert config.zero.stage is ZeROStage.NONE
    assert sizes.memory_strategy is MemoryOptimizationStrategy.BASIC, "torch does not recompute either"
    config = config_of("dp2-zero3", Rules(), 8)
    assert (config.parallelism.dp_size, config.micro_batches) == (2, 1)
    assert config.zero.stage is ZeROStage.STAGE3
    assert config_of("alone", Rules(), 8).parallelism.world_size == 1


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_layouts_have_as_many_ranks_as_they_are_run_on(ranks: int) -> None:
    for layout in LAYOUTS[ranks]:
        assert config_of(layout, Rules(), 8).parallelism.world_size == ranks


def test_replicas_share_a_batch_out() -> None:
    rules = Rules(rows=8, length=5)
    tokens, targets = rules.batch(3)
    assert tokens.shape == targets.shape == (8, 5)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    parts = [rules.batch(3, replica, 2) for replica in range(2)]
    np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), tokens)
    assert not np.array_equal(rules.batch(4)[0], tokens)
    assert rules.tokens == 40


def test_peers_get_the_sizes_that_we_have() -> None:
    rules = rules_of(parse_arguments(["--quick", "--seq", "12"]))
    assert "--length=12" in rules.as_arguments()
    assert rules.total_steps == rules.steps + 2
