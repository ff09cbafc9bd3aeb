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
class Kernel:
    """A kernel that runs, and its client."""

    manager: Any
    client: Any

    def run(self, cell: str) -> tuple[str, str]:
        """Run a cell; return what it printed, and the name of the exception that ended it ("": none)."""
        return self.wait(self.client.execute(cell))

    def wait(self, message: str) -> tuple[str, str]:
        """Return what a cell that was begun has printed, and what ended it."""
        deadline, printed = time.monotonic() + SECONDS, ""
        while True:
            said = _next_of(message, self.client.get_iopub_msg, deadline)
            content = said["content"]
            if said["msg_type"] == "stream" and content["name"] == "stdout":
                printed += content["text"]
            elif said["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        reply = _next_of(message, self.client.get_shell_msg, deadline)
        return printed, reply["content"].get("ename", "")


def _next_of(message: str, take: Callable[..., dict[str, Any]], deadline: float) -> dict[str, Any]:
    """Return the next message that belongs to ``message``: clients ask on their own, too."""
    while True:
        said = take(timeout=max(0.0, deadline - time.monotonic()))
        if said["parent_header"].get("msg_id") == message:
            return said


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
        _, error = kernel.run(_IMPORTS)
        assert not error, error
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def interrupt_a_cell(kernel: Kernel) -> None:
    """Launch two ranks in a cell, interrupt it while they run, see that they are gone, and launch again."""
    with tempfile.TemporaryDirectory() as folder:
        cell = kernel.client.execute(f"ap.cluster.run(programs.linger, {folder!r}, ranks=2, grace=10.0)")
        deadline = time.monotonic() + SECONDS
        while len(pids := os.listdir(folder)) < 2:
            assert time.monotonic() < deadline, "the ranks have not started"
            time.sleep(0.02)
        kernel.manager.interrupt_kernel()
        _, error = kernel.wait(cell)
        assert error == "KeyboardInterrupt", f"the cell ended with {error or 'no exception'}"
        left = [pid for pid in pids if Path("/proc", pid).exists()]
        assert not left, f"ranks are left: {left}"
    printed, error = kernel.run("print(ap.cluster.run(programs.add, 1, 2, ranks=2))")
    assert (printed.strip(), error) == ("[3, 1003]", ""), (printed, error)
