"""Progress goes where it is watched."""

from __future__ import annotations

import io
import json
import os

from asyncpar.core.observe.reporting import Reporter
from asyncpar.train import open_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_once_per_second_and_at_the_end() -> None:
    stream, now = io.StringIO(), [0.0]
    with open_progress(
        description="train", total=10, reporter=Reporter(None), stream=stream, clock=lambda: now[0]
    ) as progress:
        for step in range(10):
            now[0] = step * 0.3
            progress.show(step + 1, {"loss": f"{step}", "ratio": "1"})
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "5/10", "9/10", "10/10"]
    assert lines[0] == "train 1/10  loss 0  ratio 1"


def test_a_terminal_gets_a_bar_with_the_figures() -> None:
    stream = Terminal()
    with open_progress(description="train", total=2, reporter=Reporter(None), stream=stream) as progress:
        progress.show(2, {"loss": "1.5"})
    assert "2/2" in stream.getvalue()
    assert "loss 1.5" in stream.getvalue()


def test_a_launcher_is_told() -> None:
    read, write = os.pipe()
    with open_progress(description="train", total=2, reporter=Reporter(write)) as progress:
        progress.show(1, {"loss": "1.5"})
    os.close(write)
    with os.fdopen(read) as pipe:
        record = json.loads(pipe.readline())
    assert (record["description"], record["completed"], record["total"]) == ("train", 1.0, 2.0)
    assert record["fields"] == {"loss": "1.5"}


def test_a_rank_that_nobody_watches_is_silent() -> None:
    stream = io.StringIO()
    with open_progress(
        description="train", total=1, reporter=Reporter(None), is_watched=False, stream=stream
    ) as progress:
        progress.show(1, {})
    assert stream.getvalue() == ""
