"""Progress goes where it is watched."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import pytest

import asyncpar as ap
from asyncpar.core.observe.rank_reports import ProgressRecord
from asyncpar.core.observe.reporting import Reporter, process_reporter
from asyncpar.errors import UsageError
from asyncpar.observe import progress as module

lines_of = sys.modules[module.__module__]
"""The module, whose name is that of the function."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test finds the reporter of its own environment."""
    monkeypatch.delenv("ASYNCPAR_REPORT_FD", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    process_reporter.cache_clear()
    yield
    process_reporter.cache_clear()


def shown_on(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_plain_lines_come_once_a_second_and_at_the_end() -> None:
    stream, now = io.StringIO(), [0.0]
    display = lines_of._display(ProgressRecord("train", 0.0, 10.0), stream=stream, clock=lambda: now[0])  # noqa: SLF001  # a clock of its own
    bar = ap.observe.Progress(display, Reporter(None), "train", 10.0)
    for step in range(10):
        now[0] = step * 0.3
        bar.advance(loss=f"{step}", ratio=1.0)
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "5/10", "9/10", "10/10"]
    assert lines[0] == "train 1/10 (10%) loss=0 ratio=1"


def test_the_last_line_is_written_when_the_block_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = shown_on(io.StringIO(), monkeypatch)

    def fail() -> None:
        with ap.progress("train") as bar:
            bar.advance(2)
            bar.advance(0.5)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert stream.getvalue().splitlines() == ["train 2", "train 2.5"]


def test_a_terminal_gets_bars_that_may_be_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = shown_on(Terminal(), monkeypatch)
    for _ in range(2):
        with ap.progress("epochs", 2) as outer:
            outer.advance()
            with ap.progress("steps", total=7) as inner:
                inner.show(7, loss=1.53219)
                print("above the bars", file=sys.stderr)
    assert "epochs" in stream.getvalue()
    assert "7/7" in stream.getvalue()
    assert "loss 1.532" in stream.getvalue()
    assert "above the bars\n" in stream.getvalue()


def test_a_narrow_terminal_gets_no_line_that_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = shown_on(Terminal(), monkeypatch)
    with ap.progress("a description that is longer than the line", 3) as bar:
        bar.advance(loss=1.0, rate=2.0, tokens=3)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").splitlines()
    assert any("1/3" in line for line in lines)
    assert all(len(line) <= 30 for line in lines), lines


def test_a_launcher_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv("ASYNCPAR_REPORT_FD", str(write))
    stream = shown_on(io.StringIO(), monkeypatch)
    with ap.progress("train", 2) as bar:
        bar.advance(loss="1.5")
    os.close(write)
    with os.fdopen(read) as pipe:
        record = json.loads(pipe.readline())
    assert (record["description"], record["completed"], record["total"]) == ("train", 1.0, 2.0)
    assert record["fields"] == {"loss": "1.5"}
    assert stream.getvalue() == ""


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}])
def test_of_the_ranks_of_another_launcher_the_first_shows_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", variables.get("OMPI_COMM_WORLD_RANK", "0"))
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    stream = shown_on(io.StringIO(), monkeypatch)
    with ap.progress("train", 1) as bar:
        bar.advance()
    assert stream.getvalue() == ""


def test_a_notebook_gets_a_bar() -> None:
    program = """
import sys, types

class ZMQInteractiveShell:
    pass

sys.modules["IPython"] = types.SimpleNamespace(get_ipython=ZMQInteractiveShell)
from asyncpar.observe.progress import is_notebook
assert is_notebook()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_program_without_a_console_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with ap.progress("train", 1) as bar:
        bar.advance()
    assert bar.completed == 1.0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: ap.progress("", 1), "description: expected a text"),
        (lambda: ap.progress("train", 0), "total: expected a positive number"),
        (lambda: ap.progress("train", -1), "total: expected a finite number of steps, 0 or more"),
        (lambda: ap.progress("train", cast("float", "many")), "total: expected a number of steps, got 'many'"),
        (lambda: ap.progress("train", float("nan")), "total: expected a finite number"),
    ],
)
def test_wrong_arguments_are_reported(wrong: object, told: str) -> None:
    with pytest.raises(UsageError, match=told), wrong():  # type: ignore[operator]
        pass


def test_steps_that_are_no_numbers_are_reported() -> None:
    with ap.progress("train") as bar:
        with pytest.raises(UsageError, match="steps: expected a number"):
            bar.advance("one")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="completed: expected a finite number"):
            bar.show(float("inf"))
