"""``scripts/panes.py`` shows the progress of a command in panes, and ends as the command does."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from scripts.panes import Screen, Task, curve

PANES = Path(__file__).parents[2] / "scripts" / "panes.py"


def drawn(screen: Screen, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(screen.draw(width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def filled() -> Screen:
    screen = Screen()
    for step in range(1, 41):
        screen.take(f"[vm:0] train {step}/40 ({step}%) loss={6.0 - step / 10:.4f} bytes/s=7,224 norm=1.85 wait=159 ms")
    for step in range(1, 11):
        screen.take(f"[vm:0] check in one process {step}/40 ({step}%) loss={6.0 - step / 10:.4f}")
    screen.take("[vm:0] rank 3 computes longest, \x1b[2J1.05 times the mean, which is a longer line than fits into it")
    return screen


@pytest.mark.parametrize(("width", "rows"), [(60, 19), (120, 11)])
def test_panes_fit_the_terminal_and_stand_beside_each_other_where_there_is_room(width: int, rows: int) -> None:
    lines = drawn(filled(), width)
    assert len(lines) == rows
    assert {len(line) for line in lines} == {width}
    text = "\n".join(lines)
    for part in ("train", "check in one process", "40/40", "10/40", "loss=2.0000", "loss=5.0000", "rank 3 computes"):
        assert part in text
    assert "\x1b" not in text


def test_a_curve_falls_with_the_loss_and_is_empty_where_steps_are_to_come() -> None:
    task = Task(done=10, total=20, losses={step: 3.0 - step / 10 for step in range(1, 11)})
    lines = curve(task, 20, height=2)
    assert [len(line) for line in lines] == [20, 20]
    heights = [" ▁▂▃▄▅▆▇█".index(top) + " ▁▂▃▄▅▆▇█".index(low) for top, low in zip(*lines, strict=True)]
    assert heights[0] == 16
    assert heights[:10] == sorted(heights[:10], reverse=True)
    assert heights[9] == 1
    assert set(heights[11:]) == {0}
    assert curve(Task(), 20) == []
    assert curve(Task(done=1, total=2, losses={1: 2.0}), 4, height=1) != []


def test_other_lines_are_output() -> None:
    screen = Screen()
    for line in ("ready 1/2", "train 1/2 (50%)", "[vm:0] train 2/2 (100%) loss=nan"):
        screen.take(line)
    assert screen.output == ["ready 1/2"]
    assert (screen.tasks["train"].done, screen.tasks["train"].losses) == (2, {})
    assert any("ready 1/2" in line for line in drawn(screen, 60))


CHILD = """
import sys, time
print("train 1/2 (50%) loss=2.0", file=sys.stderr)
print("about to end", file=sys.stderr, flush=True)
print("a sentence")
if len(sys.argv) > 1:
    print("waiting", file=sys.stderr, flush=True)
    time.sleep(60)
sys.exit(3)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "code"), [((), 3), (("wait",), 128 + signal.SIGINT)], ids=["ends", "interrupted"]
)
def test_it_ends_as_the_command_does_and_prints_what_that_printed(arguments: tuple[str, ...], code: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    command = [sys.executable, str(PANES), sys.executable, "-c", CHILD, *arguments]
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # Linux: nobody has the other side any more
                break
            if not chunk:
                break
            shown += chunk
            if arguments and b"waiting" in shown:
                arguments = ()
                process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.read() == "a sentence\n"
        assert process.wait(30) == code
    os.close(ours)
    assert b"loss=2.0" in shown
    assert b"about to end" in shown
