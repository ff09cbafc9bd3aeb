"""The main job as its users run it: real processes, small models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.checkpoint import latest
from asyncpar.train import Summary
from asyncpar.train.summary import Expectation
from scripts.examples import train_lm
from scripts.examples.train_lm import main
from tests.core.config.test_environment import PLACE
from tests.program_host import ProgramHost
from tests.soak import first

EMPTY = str(Path(ap.__file__).with_name("py.typed"))
SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "train_lm.py"
TINY = ("--steps", "6", "--batch", "8", "--seq", "16", "--dim", "32", "--layers", "1", "--heads", "2")

SMALLEST = ("--steps", "3", "--batch", "4", "--seq", "8", "--dim", "2", "--layers", "1", "--heads", "1")

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_pictures")]  # those of ``test_demo.py`` draw one


def run(*arguments: object, ranks: int = 0, transport: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script alone, or launched with ``ranks``."""
    launch = ["-m", "asyncpar", "launch", "--nproc-per-node", str(ranks)] if ranks else []
    if transport:
        launch += ["--transport", transport]
    command = [sys.executable, *launch, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert list(figures) == [field.name for field in fields(Summary)]
    return figures


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    done = run(*TINY, "--check", "--out", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    figures = last_line(done)
    assert (figures["ranks"], figures["steps"]) == (2, 6)
    assert figures["last_loss"] is not None
    assert figures["first_loss"] is not None
    assert figures["last_loss"] < figures["first_loss"]
    difference = figures["max_relative_loss_difference"]
    assert difference is not None
    assert difference <= 1e-5
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["last_loss"] == figures["last_loss"]
    assert (figures["codec"], figures["sync"], figures["residual_norm"]) == ("none", "sync", None)
    assert {name: len(losses) for name, losses in summary["losses"].items()} == {"2 ranks": 6, "one process": 6}
    assert 'no loss.png: plots need matplotlib: pip install "asyncpar[plot]"' in done.stderr
    assert "[" in done.stderr
    assert "loss=" in done.stderr


@pytest.mark.soak
def test_tuned_steps_pass_the_check_and_their_choices_are_printed(tmp_path: Path) -> None:
    done = run(*TINY, "--tune", "--check", "--out", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert last_line(done)["ranks"] == 2
    assert "steps that counted" in done.stderr


def alone(host: ProgramHost, home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the script without a launcher."""
    return host.run(SCRIPT, *map(str, arguments), home=home, environment=os.environ)


def test_alone_it_trains_without_a_launcher(tmp_path: Path, host: ProgramHost) -> None:
    done = alone(host, tmp_path, *TINY, "--compress", "int8", "--out", tmp_path)  # the older name of --codec
    assert done.returncode == 0, done.stderr
    figures = last_line(done)
    assert (figures["ranks"], figures["bytes_sent_per_rank"], figures["compression_ratio"]) == (1, 0, None)
    assert figures["single_process_last_loss"] is None
    assert figures["codec"] == "int8"
    assert "train 6/6 (100%) loss=" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["", "tcp"])
def test_int8_shrinks_the_traffic_and_passes_the_check(tmp_path: Path, transport: str) -> None:
    larger = ("--steps", "3", "--batch", "4", "--seq", "16", "--dim", "128", "--layers", "1")
    done = run(*larger, "--codec", "int8", "--check", "--out", tmp_path, ranks=2, transport=transport)
    assert done.returncode == 0, done.stderr
    figures = last_line(done)
    assert figures["compression_ratio"] >= 3.8
    assert figures["codec"] == "int8"
    assert figures["residual_norm"] > 0.0


@pytest.mark.soak
def test_sparse_codecs_rounds_and_held_out_text_go_together(tmp_path: Path) -> None:
    options = ("--codec", "topk:0.05+int8", "--sync", "diloco:3:0.7:0.5", "--held-out", "0.1", "--beta1", "0")
    done = run(*TINY, *options, "--check", "--out", tmp_path, ranks=2, transport="tcp")
    assert done.returncode == 0, done.stderr
    figures = last_line(done)
    assert (figures["codec"], figures["sync"]) == ("topk:0.05+int8", "diloco:3:0.7:0.5")
    assert figures["compression_ratio"] > 30.0
    assert 4.0 < figures["held_out_loss"] < 6.0


@pytest.mark.soak
def test_ranks_that_do_not_wait_for_each_other_pass_the_check(tmp_path: Path) -> None:
    done = run(*TINY, "--sync", "stale:1", "--check", "--out", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert last_line(done)["sync"] == "stale:1"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: len(losses) for name, losses in summary["losses"].items()} == {"2 ranks": 6, "one process": 6}


def test_numbers_that_miss_the_promise_fail_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with losses that are to differ by less than nothing."""
    monkeypatch.setattr(train_lm, "make_expectation", lambda *_: Expectation(every_loss=-1.0))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SMALLEST, "--check", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value).startswith("train_lm: the check failed: losses differ from those of one process by ")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ranks"] == 1


@pytest.mark.soak
def test_numbers_that_miss_the_promise_fail_the_job(tmp_path: Path) -> None:
    done = run(*SMALLEST, "--codec", "int8", "--check", "--out", tmp_path, ranks=2, transport="tcp")
    assert done.returncode == 1
    assert "train_lm: the check failed: the bytes on the wire shrank" in done.stderr
    assert last_line(done)["ranks"] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_help_is_printed_on_the_first_rank_alone(
    rank: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in replace(PLACE, rank=rank, local_rank=rank).to_mapping().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train_lm.py", "--help"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 0
    assert ("--steps" in capsys.readouterr().out) == (rank == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--text", "/nowhere"), "train_lm: text: /nowhere does not exist"),
        (("--text", EMPTY), f"train_lm: text: expected at least 1040 bytes, got 0 from {EMPTY}"),
        (("--text", "/dev/zero"), "train_lm: text: /dev/zero is neither a file nor a folder"),
        (("--out", "/proc/self/fd"), "train_lm: out: no file can be made in /proc/self/fd: "),
        (("--out", "/dev/null"), "train_lm: out: /dev/null cannot be made a folder: File exists"),
        (("--seed", "-1"), "train_lm: --seed: expected 0 or more, got -1"),
        (("--heads", "3"), "train_lm: heads: expected a divisor of 128 features, got 3"),
        (("--steps", "0"), "train_lm: --steps: expected a positive number, got 0"),
        (("--codec", "zip"), "train_lm: codec: "),
        (("--sync", "never"), "train_lm: sync: expected one of sync, local:H"),
        (("--sync", "async", "--codec", "int8"), "train_lm: --codec: expected none with --sync async, got int8"),
        (("--held-out", "0.9"), "train_lm: --held-out: expected a part in 0..0.5, got 0.9"),
        (("--batch", "1"), "train_lm: batch: expected at least one row for each of 2 ranks, got 1"),
        (("--pp", "3"), "train_lm: --dp, --tp, --pp: expected tp 1 * pp 3 to divide the number of ranks, 2"),
        (("--tune", "--zero", "1"), "train_lm: --tune: is for data parallelism alone"),
        (("--tune", "--sync", "local:4"), "train_lm: --tune: is for data parallelism alone"),
        (("--tune", "9q"), "train_lm: pin: expected 25m, @ring, or 25m@ring/256k, got '9q'"),
        (("--zero", "1", "--sync", "async"), "train_lm: --sync: expected sync with tensor or pipeline parallelism"),
    ],
)
def test_bad_input_is_one_clear_line_before_anything_starts(
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, as a program of its own or as the first of two ranks; the next test starts processes."""
    if options[0] in ("--text", "--batch", "--pp"):
        first = replace(PLACE, rank=0, local_rank=0, world_size=2, group_rank=0, group_world_size=1)
        for name, value in first.to_mapping().items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(("option", "ranks"), first(1, [(("--seed", "-1"), 0), (("--text", "/nowhere"), 2)]))
def test_bad_input_ends_processes_with_one_line(tmp_path: Path, option: tuple[str, str], ranks: int) -> None:
    done = run("--out", tmp_path, *option, ranks=ranks)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("asyncpar launch:", "  "))]
    assert [line.partition("train_lm: ")[1] for line in lines] == ["train_lm: "]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


SLOWEST = "Ranks, the slowest first"
LAYERED = (
    "--steps",
    "8",
    "--batch",
    "8",
    "--seq",
    "16",
    "--dim",
    "32",
    "--layers",
    "4",
    "--heads",
    "2",
    "--held-out",
    "0.1",
)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "layout", "described"),
    [
        (2, ("--pp", 2), "dp 1, pp 2, one_forward_one_backward"),
        (4, ("--dp", 2, "--pp", 2), "dp 2, pp 2, one_forward_one_backward"),
        (4, ("--tp", 2, "--zero", 3, "--recompute", "all"), "dp 2, tp 2, zero 3, recompute all"),
    ],
)
def test_ranks_in_any_layout_train_as_one_process_does(
    tmp_path: Path, ranks: int, layout: tuple[object, ...], described: str
) -> None:
    """By default, the run that goes on below has two ranks, and that of ``test_demo.py`` four."""
    done = run(*LAYERED, *layout, "--check", "--out", tmp_path, ranks=ranks)
    check_layout(done, described)
    assert SLOWEST in done.stderr


def check_layout(done: subprocess.CompletedProcess[str], described: str) -> None:
    """The ranks of a layout have trained as one process does."""
    assert done.returncode == 0, done.stderr
    figures = last_line(done)
    assert figures["max_relative_loss_difference"] <= 1e-5
    assert figures["layout"] == described
    assert figures["last_loss"] < figures["first_loss"]
    assert 4.0 < figures["held_out_loss"] < 6.0


@pytest.mark.soak
def test_a_killed_run_goes_on_in_another_layout_as_if_nothing_had_been(tmp_path: Path, host: ProgramHost) -> None:
    options = (*LAYERED, "--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "2")
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node"]
    command = [*launch, "2", str(SCRIPT), *options, "--tp", "2", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        while latest_step(tmp_path / "saved") < 2 and running.poll() is None:
            time.sleep(0.01)
        running.kill()
    saved = latest_step(tmp_path / "saved")
    assert saved >= 2
    done = run(*options, "--pp", 2, "--check", "--out", tmp_path, ranks=2)
    check_layout(done, "dp 1, pp 2, one_forward_one_backward")
    assert (SLOWEST in done.stderr) is (saved < 8)  # of the steps that were left
    assert latest_step(tmp_path / "saved") == 8
    other = alone(host, tmp_path, *options, "--lr", 0.1, "--zero", 1, "--out", tmp_path)
    assert other.returncode != 0
    assert "other settings: training.schedule.peak is" in other.stderr
    assert "for the checkpoint, and 0.1 for this run; set it as it was, or choose another folder" in other.stderr
    longer = alone(host, tmp_path, *options, "--steps", 12, "--zero", 1, "--out", tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert (last_line(longer)["steps"], latest_step(tmp_path / "saved")) == (12, 12)
    checked = alone(host, tmp_path, *options, "--steps", 14, "--check", "--zero", 1, "--out", tmp_path)
    assert checked.returncode != 0
    assert "--check: the first 12 steps had another schedule, of other --steps; leave it out" in checked.stderr


def latest_step(folder: Path) -> int:
    """Return the step of the latest complete checkpoint, -1 without one."""
    found = latest(folder) if folder.exists() else None
    return -1 if found is None else found.step
