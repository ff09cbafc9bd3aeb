"""`asyncpar plan` as people use it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from asyncpar.collectives.lane_cache import LaneCache
from asyncpar.core.config.transport import LaneCosts
from asyncpar.launch.cli import main
from asyncpar.net.membership.host import host_name
from tests.soak import first

GPT2 = ["--layers", "24", "--hidden", "1024", "--heads", "16", "--vocab", "50257", "--seq", "1024", "--world", "16"]
SMALL = ["--layers", "4", "--hidden", "64", "--heads", "4", "--vocab", "101", "--seq", "32", "--world", "4"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], prog_name="asyncpar")


def rows(result: Result) -> list[list[str]]:
    """Return the rows of the table: lines that begin with three numbers."""
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    return [cells for cells in lines if len(cells) > 8 and all(cell.isdigit() for cell in cells[:3])]


def document(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_layouts_of_the_world_are_shown_best_first() -> None:
    table = rows(invoke(*GPT2))
    assert len(table) == 10
    for dp, tp, pp, zero, *_ in table:
        assert int(dp) * int(tp) * int(pp) == 16
        assert zero in "0123"
    steps = [float(cells[8]) for cells in table]
    assert steps == sorted(steps)
    assert all(float(cells[5]) <= 8.0 for cells in table)


def test_what_was_asked_is_repeated_above() -> None:
    text = invoke(*GPT2, "--precision", "mixed", "--memory", "16").stdout
    assert "16 ranks, 8 per host, 16 GB each" in text
    assert "354.8 M parameters, mixed" in text
    assert "64 sequences of 1024 a step, 1 a micro-batch" in text


def test_what_does_not_fit_is_counted_below() -> None:
    text = invoke(*GPT2, "--world", "64").stdout
    for reason in ("heads do not divide by tp", "fewer layers than stages", "out of memory"):
        assert f" layouts left out: {reason}\n" in text
    assert " fit, the best 10 shown\n" in text


def test_top_says_how_many() -> None:
    assert len(rows(invoke(*SMALL, "--top", "3"))) == 3
    assert len(rows(invoke(*SMALL, "--top", "1000"))) > 30


def test_json_has_all_figures_in_bytes_and_seconds() -> None:
    found = document(*SMALL, "--top", "5", "--zero", "1,3", "--schedule", "1f1b,zbv")
    assert found["model"]["parameters"] == 4 * (12 * 64**2 + 13 * 64) + (101 + 32) * 64 + 2 * 64
    assert (found["world"], found["memory"], found["batch"]) == (4, 8e9, 16)
    assert len(found["layouts"]) == 5 < found["fitting"]
    for layout in found["layouts"]:
        assert layout["zero"] in ((1, 3) if layout["dp"] > 1 else (0,))
        assert layout["schedule"] in ("one_forward_one_backward", "zbv")
        assert sum(layout["layers"]) == 4
        parts = ("values", "gradients", "optimizer", "accumulating", "activations", "buffers", "gathered", "workspace")
        assert layout["memory"]["total"] == pytest.approx(sum(layout["memory"][part] for part in parts))
        kinds = ("data", "tensor", "pipeline", "embedding")
        assert layout["traffic"]["total"] == pytest.approx(sum(layout["traffic"][kind] for kind in kinds))
        assert layout["tokens_per_second"] == pytest.approx(16 * 32 / layout["step_seconds"])
        assert 0.0 <= layout["bubble_fraction"] <= layout["bubble_over_ideal"]


def test_options_change_what_is_found() -> None:
    plain = document(*SMALL, "--top", "1000")
    assert document(*SMALL, "--recompute", "--top", "1000")["layouts"] != plain["layouts"]
    assert document(*SMALL, "--untied")["model"]["parameters"] == plain["model"]["parameters"] + 101 * 64
    assert document(*SMALL, "--batch", "32")["batch"] == 32
    slower = document(*SMALL, "--flops", "1", "--top", "1000")
    assert min(row["step_seconds"] for row in slower["layouts"]) > plain["layouts"][0]["step_seconds"]
    uneven = document(*SMALL, "--layers", "5", "--uneven", "--top", "1000")
    assert any(row["layers"] == [3, 2] for row in uneven["layouts"])
    less = document(*SMALL, "--optimizer", "sgd", "--top", "1000")
    assert {row["memory"]["optimizer"] for row in less["layouts"]} == {0.0}


def test_underscores_are_taken_for_dashes() -> None:
    assert rows(invoke(*SMALL, "--micro_batch", "2", "--ranks_per_host", "2"))


def test_nothing_fits_is_an_error_that_names_the_least_memory() -> None:
    result = invoke(*GPT2, "--memory", "0.5")
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("asyncpar plan: no layout fits on 16 ranks: ")
    assert "out of memory; the least memory needed is 1.1" in line
    assert "GB per rank, 0.5 GB are there: dp " in line


def test_the_memory_that_it_asks_for_is_enough() -> None:
    words = invoke(*GPT2, "--memory", "0.5").stderr.split()
    needed = words[words.index("--memory") + 1].rstrip(",")
    assert rows(invoke(*GPT2, "--memory", needed))


def test_sizes_that_never_divide_say_so() -> None:
    result = invoke(*SMALL, "--batch", "1", "--world", "6", "--layers", "1")
    assert result.exit_code == 1
    assert result.stderr.endswith("; change the sizes that do not divide, or give --uneven\n")


def test_advice_is_not_what_was_done_already() -> None:
    assert invoke(*SMALL, "--memory", "0.00001").stderr.endswith(", more ranks, or --recompute\n")
    assert invoke(*SMALL, "--memory", "0.00001", "--recompute").stderr.endswith(", more ranks\n")
    assert "no layout fits on 1 rank: 1 out of memory" in invoke(*SMALL, "--world", "1", "--memory", "0.00001").stderr


def test_json_stays_json_when_nothing_fits() -> None:
    result = invoke(*GPT2, "--memory", "0.5", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["layouts"] == []
    assert found["least"]["memory"]["total"] > 0.5e9
    assert "no layout fits" in result.stderr


MISTAKES = [
    ((), "Missing option '--layers'"),
    (("--layers", "four"), "--layers: expected a whole number, got 'four'"),
    (("--layers", "0"), "--layers: expected at least 1, got 0"),
    (("--world", "-1"), "--world: expected a whole number, got '-1'"),
    (("--heads", "5"), "heads: expected a divisor of hidden = 64, got 5"),
    (("--memory", "0"), "--memory: expected a positive number, got '0'"),
    (("--memory", "lots"), "--memory: expected a positive number, got 'lots'"),
    (("--memory", "nan"), "--memory: expected a positive number, got 'nan'"),
    (("--bandwidth", "inf"), "--bandwidth: expected a positive number, got 'inf'"),
    (("--flops", "-5"), "--flops: expected a positive number, got '-5'"),
    (("--schedule", "2f2b"), "--schedule: expected one of sequential, "),
    (("--schedule", ""), "--schedule: expected one of sequential, "),
    (("--zero", "4"), "--zero: expected stages 0 to 3 joined by ',', got '4'"),
    (("--zero", "1,,2"), "--zero: expected stages 0 to 3 joined by ',', got ''"),
    (("--chunks", "1"), "--chunks: expected at least 2, got 1"),
    (("--precision", "fp8"), "--precision: expected one of fp32, mixed, got 'fp8'"),
    (("--optimizer", "lion"), "--optimizer: expected one of adam, momentum, sgd, got 'lion'"),
    (("--memory-strategy", "hope"), "--memory-strategy: expected one of basic, "),
    (("--order", "tp-dp"), "order: expected every axis of dp-tp-pp, got 'tp-dp' without pp"),
    (("--top", "0"), "--top: expected at least 1, got 0"),
    (("--batch", "0"), "--batch: expected at least 1, got 0"),
    (("--surprise",), "No such option"),
    (("extra",), "Got unexpected extra argument (extra)"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*SMALL, *arguments) if arguments else invoke()
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("asyncpar plan: ")
    assert message in line


def test_help_fits_in_80_columns_and_has_an_example() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "asyncpar plan --layers 24 --hidden 1024" in result.output


def test_it_is_listed_with_the_other_commands() -> None:
    assert "plan" in CliRunner().invoke(main, ["--help"]).output


def in_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str, columns: int) -> str:
    """Return what the command writes to a terminal of some width."""
    outer, inner = pty.openpty()
    written = bytearray()

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while True:
                written.extend(os.read(outer, 65536))

    reading = threading.Thread(target=read)
    reading.start()
    with open(inner, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm")
        patch.delenv("NO_COLOR", raising=False)
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["plan", *arguments], prog_name="asyncpar")
    reading.join()
    os.close(outer)
    return written.decode()


def _unstyled(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("width", "titles"),
    first(
        1,
        [
            (60, "dp tp pp ZeRO schedule memory traffic bubble step"),
            (40, "dp tp pp ZeRO memory bubble step"),
            (20, "dp tp pp step"),
        ],
    ),
)
def test_a_narrow_terminal_gets_whole_columns(width: int, titles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _unstyled(in_terminal(monkeypatch, *SMALL, columns=width)).splitlines()
    assert max(map(len, lines)) <= width
    (place,) = [place for place, line in enumerate(lines) if line.split()[:1] == ["dp"]]
    assert lines[place].split() == titles.split()
    table = lines[place + 2 : lines.index("", place)]
    assert len(table) == 10
    for row in table:
        assert len(row.split()) == len(titles.split())
        assert "…" not in row


def test_a_wide_terminal_gets_more_columns_and_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    text = in_terminal(monkeypatch, *SMALL, columns=120)
    assert "\x1b[1;32m" in text
    assert "micro-batches" in _unstyled(text)


@pytest.mark.process
def test_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-m", "asyncpar", "plan", *SMALL]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr == "asyncpar plan: the layouts cannot be written: No space left on device\n"


def step_seconds(*arguments: str) -> float:
    return float(document(*GPT2, "--flops", "300000", "--zero", "0", *arguments)["layouts"][0]["step_seconds"])


def test_devices_go_at_published_speeds_by_nccl_and_slower_otherwise() -> None:
    by_nccl = step_seconds("--devices", "nccl")
    by_host = step_seconds("--devices", "hierarchical")
    through_host = step_seconds("--devices", "staged")
    assert by_nccl < by_host < through_host
    same = step_seconds("--bandwidth", "400", "--host-bandwidth", "450")
    assert by_nccl == pytest.approx(same), "an adapter of 50 GB/s for each of eight devices, and NVLink"
    assert by_host > step_seconds("--devices", "hierarchical", "--bandwidth", "10")


def test_devices_ask_for_what_a_model_gets_of_them() -> None:
    result = invoke(*GPT2, "--devices", "nccl")
    assert result.exit_code == 2
    assert "--devices: expected --flops with it" in result.stderr
    result = invoke(*GPT2, "--flops", "300000", "--devices", "nvlink")
    assert "--devices: way: expected one of nccl, hierarchical, staged, got 'nvlink'" in result.stderr


def _keep(path: Path, other: str, bandwidth: float) -> None:
    LaneCache(path).put(host_name(), other, "tcp", LaneCosts(latency=1e-4, bandwidth=bandwidth, reduction=1e9))


def test_measured_bandwidths_are_used_and_named(tmp_path: Path) -> None:
    path, host = tmp_path / "lanes.json", host_name()
    _keep(path, "far", 1.17e8)
    found = document(*SMALL, f"--measured={path}")
    assert found["machine"]["bandwidth"] == pytest.approx(1.17e8)
    assert found["machine"]["host_bandwidth"] == 4e9
    assert found["bandwidths"] == f"measured between {host} and another host ({path})"
    _keep(path, "farther", 1e7)
    _keep(path, host, 9e9)
    text = invoke(*SMALL, f"--measured={path}").stdout
    source = f"measured between {host} and the slowest of 2 hosts and inside {host} ({path})"
    assert f"0.01 GB/s between hosts, 9 inside, {source}" in text


def test_bandwidths_that_are_given_go_before_measured_ones(tmp_path: Path) -> None:
    path = tmp_path / "lanes.json"
    _keep(path, "far", 1.17e8)
    found = document(*SMALL, f"--measured={path}", "--bandwidth", "3")
    assert found["machine"]["bandwidth"] == 3e9
    assert found["bandwidths"] == "not measured"
    assert document(*SMALL)["bandwidths"] == "not measured"


def test_the_users_file_is_read_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _keep(tmp_path / "asyncpar" / "lanes.json", "far", 2e8)
    assert document(*SMALL, "--measured")["machine"]["bandwidth"] == pytest.approx(2e8)


def test_a_file_without_figures_of_this_host_is_refused_with_what_to_do(tmp_path: Path) -> None:
    result = invoke(*SMALL, f"--measured={tmp_path / 'none.json'}")
    assert result.exit_code == 2
    assert "calibrate(cache=True)" in result.stderr
