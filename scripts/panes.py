"""Run a command, and show how its training gets on in panes of a terminal: a loss curve for each task, and its output.

    python scripts/panes.py asyncpar launch --nproc-per-node 4 scripts/examples/train_lm.py --check

The command's stderr is read: plain lines of ``ap.progress`` become panes, the last lines of the rest are in a pane of
their own, and all of these are printed at the end.  Its stdout is printed then, too.  Signals are passed on; the exit
status is the command's.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, TYPE_CHECKING

from asyncpar.harmless import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

_PROGRESS = re.compile(r"(?:\[[^\]]*\] )?(?P<task>.+?) (?P<done>\d+)/(?P<total>\d+) \(\d+%\)(?P<fields>( \S+=.*)?)")
_LOSS = re.compile(r"\bloss=([\d.]+)")
_BLOCKS = " ▁▂▃▄▅▆▇█"
_CURVE_LINES, _OUTPUT_LINES, _WIDE = 4, 5, 100
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Task:
    """How far one task is, and the losses that it has shown, each with its step."""

    done: int = 0
    total: int = 1
    fields: str = ""
    losses: dict[int, float] = field(default_factory=dict)


class Screen:
    """The tasks of a command in the order of their first lines, and its other lines."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.output: list[str] = []

    def take(self, line: str) -> None:
        """Take a line of the command's stderr."""
        found = _PROGRESS.fullmatch(line)
        if found is None:
            self.output.append(harmless(line))
            return
        task = self.tasks.setdefault(harmless(found["task"]), Task())
        task.done, task.total, task.fields = int(found["done"]), int(found["total"]), harmless(found["fields"]).strip()
        loss = _LOSS.search(found["fields"])
        if loss is not None:
            task.losses[task.done] = float(loss[1])

    def draw(self, width: int) -> RenderableType:
        """Return the panes, below each other or, where there is room, side by side."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        inner = (width // 2 if width >= _WIDE and len(self.tasks) > 1 else width) - 4
        panes = [
            Panel(Text("\n".join(draw_task(task, inner)), no_wrap=True, overflow="crop"), title=name)
            for name, task in self.tasks.items()
        ]
        last = [line for line in self.output if line.strip()][-_OUTPUT_LINES:]
        shown = Panel(Text("\n".join(last) or "starting", no_wrap=True, overflow="ellipsis"), title="output")
        if len(panes) > 1 and width >= _WIDE:
            row = Table.grid(expand=True)
            row.add_row(*panes)
            return Group(row, shown)
        return Group(*panes, shown)


def draw_task(task: Task, width: int) -> list[str]:
    """Return the lines of a task: a bar, the last figures, and the curve of its losses over all of its steps."""
    count = f"{task.done}/{task.total}"
    room = max(1, width - len(count) - 1)
    full = round(room * min(1.0, task.done / task.total))
    return [f"{'━' * full}{'─' * (room - full)} {count}", task.fields[:width], *curve(task, width)]


def curve(task: Task, width: int, height: int = _CURVE_LINES) -> list[str]:
    """Return the losses of a task as columns of blocks, from the smallest to the largest; steps to come are empty."""
    if not task.losses:
        return []
    least, most = min(task.losses.values()), max(task.losses.values())
    heights = [0] * width
    steps = sorted(task.losses)
    for column in range(width):
        step = (column + 1) * task.total / width
        latest = max((each for each in steps if each <= step), default=steps[0])
        if step < steps[-1] + task.total / width:
            share = (task.losses[latest] - least) / (most - least or 1.0)
            heights[column] = 1 + round(share * (8 * height - 1))
    return [
        "".join(_BLOCKS[min(8, max(0, each - 8 * (height - 1 - line)))] for each in heights) for line in range(height)
    ]


def run(command: Sequence[str]) -> int:
    """Run ``command`` below the panes.  Returns its exit status, 128 + N for signal N."""
    from rich.console import Console
    from rich.live import Live

    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None

        def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

        for number in _FORWARDED:
            signal.signal(number, forward)
        screen, printed = Screen(), list[str]()
        readers = [
            threading.Thread(target=_read, args=(child.stderr, screen.take)),
            threading.Thread(target=_read, args=(child.stdout, printed.append)),
        ]
        for reader in readers:
            reader.start()
        console = Console(stderr=True)
        with Live(console=console, get_renderable=lambda: screen.draw(console.width), refresh_per_second=8):
            for reader in readers:
                reader.join()
            code = child.wait()
    _print(screen.output, sys.stderr)
    _print(map(harmless, printed), sys.stdout)
    return code if code >= 0 else 128 - code


def _read(stream: IO[bytes], take: Callable[[str], None]) -> None:
    for line in stream:
        take(line.decode(errors="replace").rstrip("\r\n"))


def _print(lines: Iterable[str], stream: IO[str]) -> None:
    for line in lines:
        print(line, file=stream)
    stream.flush()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("panes: expected a command: python scripts/panes.py asyncpar launch ...")
    try:
        sys.exit(run(sys.argv[1:]))
    except FileNotFoundError:
        sys.exit(f"panes: {sys.argv[1]}: program not found")
