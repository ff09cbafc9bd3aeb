"""Programs of tests in processes that are forked from one that has imported torch: importing it takes seconds."""

from __future__ import annotations

import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.backends.extras import environment
from tests.fork_server import ForkedProcess, ForkServer


def open_server() -> ForkServer:
    """Start what the programs are forked from.

    It imports nothing of asyncpar: no process is forked after gRPC is imported, and pytest is to see modules first.
    """
    return ForkServer(["torch.distributed", "pytest", __name__], environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


def run_module(channel: socket.socket, name: str, *arguments: str) -> None:
    """Be ``python -m name *arguments``."""
    channel.close()
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_source(channel: socket.socket, source: str) -> None:
    """Be ``python -c source``."""
    channel.close()
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


def forked_outputs(
    server: ForkServer, *programs: Sequence[str], home: Path, timeout: float = 60, statuses: Sequence[int] = ()
) -> list[str]:
    """Run ``programs`` at once, as ``outputs_of`` does: each is the name of a function above and its arguments."""
    logs = [home / f"output-{number}" for number in range(len(programs))]
    with ExitStack() as stack:
        processes = [stack.enter_context(_started(server, *each)) for each in zip(programs, logs, strict=True)]
        ended = [process.wait(timeout) for process in processes]
    outputs = [log.read_text() for log in logs]
    assert ended == list(statuses or [0] * len(programs)), "\n".join(outputs)
    return outputs


@contextmanager
def _started(server: ForkServer, program: Sequence[str], path: Path) -> Iterator[ForkedProcess]:
    ours, theirs = socket.socketpair()
    with ours, theirs, path.open("wb") as log:
        process = server.start(
            f"{__name__}:{program[0]}",
            program[1:],
            environment=environment(path.parent),
            log=log.fileno(),
            channel=theirs.fileno(),
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
