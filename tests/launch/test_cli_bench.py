"""`asyncpar bench` as people use it: real ranks, tiny sizes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from asyncpar.bench.report import BenchReport
from asyncpar.bench.settings import OPERATIONS
from asyncpar.launch import bench as bench_command
from asyncpar.launch.bench import BenchOptions, finish, parse_options
from asyncpar.launch.cli import main
from tests.bench.samples import ROW, SURROUNDINGS

QUICK = ("--budget", "0.01")
LIMIT = 50.0


def invoke(*arguments: str, env: Mapping[str, str | None] | None = None) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], env=env, prog_name="asyncpar")


def start(
    *arguments: str, stdout: int = subprocess.PIPE, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCPAR_")}
    return subprocess.Popen(
        [sys.executable, "-m", "asyncpar", "bench", *arguments],
        env=clean | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    with start(*arguments, env=env) as process:
        stdout, stderr = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> list[BenchOptions]:
    """Collects the options instead of running anything; nothing may be launched."""
    seen: list[BenchOptions] = []

    def keep(options: BenchOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(bench_command, "run_bench", keep)
    return seen


def test_the_defaults_are_all_reduce_on_two_ranks(no_launch: list[BenchOptions]) -> None:
    assert invoke(env={"ASYNCPAR_TRANSPORT": None}).exit_code == 0
    (options,) = no_launch
    assert options.settings.operations == ("all_reduce",)
    assert (options.settings.sizes[0], options.settings.sizes[-1], len(options.settings.sizes)) == (4, 64 << 20, 13)
    assert (options.nproc, options.transport, options.plot, options.prints_json) == (2, None, None, False)


def test_options_arrive(no_launch: list[BenchOptions]) -> None:
    words = "gather scatter --min 1K --max 4KB --factor 2 --nproc auto --transport grpc --algorithm tree"
    more = " --dtype int8 --budget 2 --calibrate --shared --json --plot x.png"
    result = invoke(*(words + more).split())
    assert result.exit_code == 0, result.output
    (options,) = no_launch
    assert options.settings.operations == ("gather", "scatter")
    assert options.settings.sizes == (1024, 2048)
    assert (options.settings.algorithm, options.settings.dtype, options.settings.budget) == ("tree", "int8", 2.0)
    assert (options.nproc, options.transport, options.prints_json, options.plot) == (None, "grpc", True, Path("x.png"))
    assert options.settings.calibrates
    assert options.settings.shares


def test_all_means_all_and_nothing_twice(no_launch: list[BenchOptions]) -> None:
    invoke("all", "--sizes", "4,25MB")
    invoke("gather", "gather")
    assert [options.settings.operations for options in no_launch] == [OPERATIONS, ("gather",)]
    assert no_launch[0].settings.sizes == (4, 25_000_000)


MISTAKES = [
    (("juggle",), "op: expected one of all_reduce, "),
    (("--min", "8", "--max", "4"), "--min: expected at most --max = 4, got 8"),
    (("--min", "many"), "--min: expected a size such as 4, 64K or 25MB, got 'many'"),
    (("--max", "4T"), "--max: expected a size"),
    (("--factor", "1"), "--factor: expected at least 2, got 1"),
    (("--factor", "x"), "--factor: expected a whole number, got 'x'"),
    (("--sizes", "4,,8"), "--sizes: expected a size such as 4, 64K or 25MB, got ''"),
    (("--sizes", "4", "--max", "8"), "--sizes: expected without --min, --max and --factor, got --max too"),
    (("--nproc", "0"), "--nproc: expected at least 1, got 0"),
    (("--nproc", "-1"), "--nproc: expected a whole number, got '-1'"),
    (("--nproc", "two"), "--nproc: expected a whole number, got 'two'"),
    (("--transport", "pigeon"), "--transport: expected one of shm, tcp, grpc, got 'pigeon'"),
    (("--algorithm", "magic"), "algorithm: all_reduce has "),
    (
        ("--algorithm", "arena", "--nproc", "1"),
        "--algorithm: arena needs several ranks that share memory, got --nproc 1",
    ),
    (("--algorithm", "arena", "--transport", "tcp"), "share memory, got --transport tcp"),
    (("--dtype", "float8"), "--dtype: expected one of float32, "),
    (("--redop", "median"), "--redop: expected one of sum, min, max, got 'median'"),
    (("--budget", "0"), "--budget: expected seconds above 0"),
    (("--budget", "soon"), "--budget: expected a number of seconds, got 'soon'"),
    (("--plot", "/nowhere/x.png"), "--plot: no file can be made in /nowhere: No such file or directory"),
    (("--plot", "/tmp"), "--plot: expected the path of a file, /tmp is a directory"),
    (("--max", "1000000G"), "sizes: 262144G on 2 ranks needs"),
    (("--no-such-option",), "No such option"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line_before_anything_starts(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise AssertionError("nothing may be launched")

    monkeypatch.setattr(bench_command, "_launch", refuse)
    result = invoke(*arguments)
    (line,) = result.stderr.splitlines()
    assert line.startswith("asyncpar bench: ")
    assert message in line
    assert result.exit_code == 2
    assert result.stdout == ""


def test_help_fits_in_80_columns_and_has_examples() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80
    examples = [line.strip() for line in result.output.splitlines() if line.strip().startswith("asyncpar bench")]
    assert len(examples) >= 4


def test_the_examples_of_the_help_are_accepted(no_launch: list[BenchOptions]) -> None:
    lines = [line.strip() for line in invoke("--help").output.splitlines()]
    examples = [line.partition(" >")[0].split()[2:] for line in lines if line.startswith("asyncpar bench")]
    assert [invoke(*example).exit_code for example in examples] == [0] * len(examples)
    assert len(no_launch) == len(examples)


def test_wrong_elements_are_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_options(
        (),
        dict.fromkeys(("min", "max", "factor", "sizes", "algorithm", "transport", "plot"))
        | {
            "nproc": "2",
            "dtype": "float32",
            "redop": "sum",
            "budget": "1",
            "calibrate": False,
            "shared": False,
            "prints_json": True,
        },
    )
    report = BenchReport(surroundings=SURROUNDINGS, measurements=(ROW, replace(ROW, wrong=2)))
    assert finish(report, options) == 1
    shown = capsys.readouterr()
    assert shown.err == "asyncpar bench: sizes with wrong elements: 1\n"
    assert json.loads(shown.out)["measurements"][1]["wrong"] == 2
    assert finish(replace(report, measurements=(ROW,)), options) == 0


@pytest.mark.soak
@pytest.mark.process
def test_a_table_for_people() -> None:
    done = run("--sizes", "4,1000", *QUICK)
    assert done.returncode == 0, done.stderr
    shown = rows(done.stdout)
    assert [row[:5] for row in shown] == [["4", "1", "float32", "sum", "-1"], ["1000", "250", "float32", "sum", "-1"]]
    assert [row[8] for row in shown] == ["0", "0"]
    assert all(float(row[5]) > 0 and float(row[9]) > 0 for row in shown)
    assert "# sizes with wrong elements: 0 OK" in done.stdout


@pytest.mark.process
def test_json_is_all_there_is_on_stdout_and_nothing_is_left(tmp_path: Path) -> None:
    done = run("all", "--nproc", "2", "--sizes", "4,4096", *QUICK, "--json", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["surroundings"]["ranks"] == 2
    results = document["measurements"]
    assert list(dict.fromkeys(result["operation"] for result in results)) == list(OPERATIONS)
    assert len(results) == 2 * (len(OPERATIONS) - 1) + 1
    assert all(result["wrong"] == 0 and result["time_us"] > 0 and result["algorithm"] for result in results)
    assert {result["size"] for result in results if result["operation"] == "all_gather"} == {8, 4096}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.process
def test_one_rank_alone_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    done = run("all", "--nproc", "1", "--sizes", "4", *QUICK, "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(rows(done.stdout)) == len(OPERATIONS)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_what_is_pinned_is_used(transport: str) -> None:
    pins = ("--transport", transport, "--algorithm", "tree", "--dtype", "bfloat16", "--redop", "max", "--calibrate")
    done = run("--sizes", "4K", *QUICK, *pins)
    assert done.returncode == 0, done.stderr
    assert f"{transport} lanes" in done.stdout
    ((_, _, dtype, redop, *_, algorithm),) = rows(done.stdout)
    assert (dtype, redop, algorithm) == ("bfloat16", "max", "tree")


@pytest.mark.soak
@pytest.mark.process
def test_a_full_disk_is_one_line() -> None:
    words = ("--nproc", "1", "--sizes", "4", *QUICK, "--json")
    with open("/dev/full", "wb") as full, start(*words, stdout=full.fileno()) as process:
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert stderr.endswith("asyncpar bench: the report cannot be written: No space left on device\n")
    assert "Traceback" not in stderr


@pytest.mark.soak
@pytest.mark.process
def test_rows_fit_a_narrow_terminal() -> None:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with start("--sizes", "4,1K", *QUICK, stdout=terminal) as process:
        os.close(terminal)
        shown = b""
        try:
            while chunk := os.read(controller, 4096):
                shown += chunk
        except OSError:  # the other end is closed
            pass
        os.close(controller)
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    table = [line for line in shown.decode().replace("\r", "").splitlines() if not line.startswith("# ")]
    assert max(map(len, table)) <= 40
    assert [row[0] for row in rows("\n".join(table))] == ["4", "1024"]


@pytest.mark.soak
@pytest.mark.process
def test_ctrl_c_ends_it_in_good_order(tmp_path: Path) -> None:
    words = ("--nproc", "1", "--sizes", "4,8", "--budget", "1000")
    with start(*words, env={"TMPDIR": str(tmp_path)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("# asyncpar")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "ended by SIGINT" in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.process
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    """A rank kills itself in the middle: the launcher's usual report, and its exit code."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading, signal\n"
        "if os.environ.get('RANK') == '1':\n"
        "    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
    )
    done = run("--sizes", "4,8", "--budget", "1000", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 137
    assert "rank 1 failed first: was killed by SIGKILL" in done.stderr
