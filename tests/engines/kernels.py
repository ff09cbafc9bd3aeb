"""A Jupyter kernel, as a notebook has it, for tests and benchmarks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 120.0
"""Seconds that a cell may take, on a machine that does many other things."""

_IMPORTS = """
import asyncpar as ap
from asyncpar.testing import engine_programs as programs
"""


@dataclass
class Cell:
    """A cell that was begun: what it has shown so far on both streams, and whether it has ended.

    ``raised`` is the name of the exception that ended it ("": none).
    """

    message: str
    printed: str = ""
    errors: str = ""
    raised: str = ""
    has_ended: bool = False


@dataclass
class Kernel:
    """A kernel that runs, and its client."""

    manager: Any
    client: Any

    def begin(self, code: str) -> Cell:
        """Begin a cell."""
        return Cell(self.client.execute(code))

    def run(self, code: str) -> Cell:
        """Run a cell to its end."""
        return self.finish(self.begin(code))

    def finish(self, cell: Cell) -> Cell:
        """Wait for the end of a cell."""
        self.wait(cell, lambda: cell.has_ended)
        return cell

    def wait(self, cell: Cell, is_so: Callable[[], bool]) -> None:
        """Take what belongs to ``cell`` until ``is_so``."""
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert not cell.has_ended, cell
            received = _next_of(cell.message, self.client.get_iopub_msg, deadline)
            content = received["content"]
            if received["msg_type"] == "stream" and content["name"] == "stdout":
                cell.printed += content["text"]
            elif received["msg_type"] == "stream":
                cell.errors += content["text"]
            elif received["msg_type"] == "status" and content["execution_state"] == "idle":
                reply = _next_of(cell.message, self.client.get_shell_msg, deadline)
                cell.raised, cell.has_ended = reply["content"].get("ename", ""), True


def _next_of(message: str, take: Callable[..., dict[str, Any]], deadline: float) -> dict[str, Any]:
    """Return the next message that belongs to ``message``: clients ask on their own, too."""
    while True:
        received = take(timeout=max(0.0, deadline - time.monotonic()))
        if received["parent_header"].get("msg_id") == message:
            return received


@contextmanager
def start_kernel() -> Iterator[Kernel]:
    """Start a kernel of this Python in which asyncpar is imported."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=SECONDS)
        kernel = Kernel(manager, client)
        imported = kernel.run(_IMPORTS)
        assert not imported.raised, imported
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def interrupt_a_cell(kernel: Kernel) -> None:
    """Launch two ranks in a cell, interrupt it while they run, see that they are gone, and launch again."""
    with tempfile.TemporaryDirectory() as folder:
        cell = kernel.begin(f"ap.cluster.run(programs.linger, {folder!r}, ranks=2, grace=10.0)")
        deadline = time.monotonic() + SECONDS
        while len(pids := os.listdir(folder)) < 2:
            assert time.monotonic() < deadline, "the ranks have not started"
            time.sleep(0.02)
        kernel.manager.interrupt_kernel()
        kernel.finish(cell)
        assert cell.raised == "KeyboardInterrupt", cell
        left = [pid for pid in pids if Path("/proc", pid).exists()]
        assert not left, f"ranks are left: {left}"
    again = kernel.run("print(ap.cluster.run(programs.add, 1, 2, ranks=2))")
    assert (again.printed.strip(), again.raised) == ("[3, 1003]", ""), again
