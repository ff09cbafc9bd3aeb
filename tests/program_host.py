"""Programs run one after another in one process, which imports the package for all of them.

Each has a module ``__main__``, arguments, environment, folder, outputs and handlers of signals of its own; its modules
are forgotten with it.  What a program leaves to the exit of its process is not seen: with ``--soak`` each has one.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

PATIENCE = 120.0
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@dataclass(frozen=True, slots=True)
class Request:
    command: list[str]
    """The program and its arguments."""

    home: str
    environment: dict[str, str]
    outputs: str
    """The folder for both outputs."""


class ProgramHost:
    """A process that runs programs; one that takes too long or ends the process is followed by a fresh process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, *command: str | Path, home: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a program as ``python *command`` in the folder ``home``."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        words = [str(word) for word in command]
        with tempfile.TemporaryDirectory() as outputs:
            request = Request(words, str(home), dict(environment), outputs)
            print(json.dumps(asdict(request)), file=process.stdin, flush=True)
            readable, _, _ = select.select([process.stdout], [], [], PATIENCE)
            answer = process.stdout.readline() if readable else ""
            if not answer:
                self.close()
            status = json.loads(answer) if answer else f"no end within {PATIENCE:g} s" if not readable else "it exited"
            output, errors = (Path(outputs, name).read_text() for name in ("output", "errors"))
        assert isinstance(status, int), f"{words}: {status}\n{output}{errors}"
        return subprocess.CompletedProcess(words, status, output, errors)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        root = str(Path(__file__).resolve().parents[1])
        command = [sys.executable, "-m", "tests.program_host"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # its second thread would spin while the first computes
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environment
        )


def _serve() -> None:
    """Run what comes over the input, and say how each program has ended."""
    import numpy  # noqa: F401  # BLAS has as many threads as the environment says now

    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for line in requests:
        print(json.dumps(_run(Request(**json.loads(line)))), file=answers, flush=True)


def _run(request: Request) -> int:
    with ExitStack() as stack:
        for number, name in ((1, "output"), (2, "errors")):
            stack.enter_context(_redirected(number, os.path.join(request.outputs, name)))
        stack.enter_context(_place(request))
        try:
            runpy.run_path(request.command[0], run_name="__main__")
        except SystemExit as ended:
            return _status(ended.code)
        except BaseException:  # noqa: BLE001  # as an interpreter does with any exception of a program
            traceback.print_exc()
            return 1
        finally:
            for thread in threading.enumerate():
                if not thread.daemon and thread is not threading.main_thread():
                    thread.join()
    return 0


def _status(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


@contextmanager
def _redirected(number: int, path: str) -> Iterator[None]:
    """Let the output ``number`` of this process and its children go into a file."""
    kept = os.dup(number)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        (sys.stdout if number == 1 else sys.stderr).flush()
        os.dup2(kept, number)
        os.close(kept)


@contextmanager
def _place(request: Request) -> Iterator[None]:
    """Let this process look as one that was started for the program alone."""
    environment, arguments, path, folder = dict(os.environ), sys.argv, list(sys.path), os.getcwd()
    modules, handlers = set(sys.modules), {number: signal.getsignal(number) for number in _HANDLED}
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = request.command
    tempfile.tempdir = None  # or the next program would have the folder of the first one's environment
    beside = os.path.dirname(os.path.join(request.home, request.command[0]))
    sys.path.insert(0, beside)
    os.chdir(request.home)
    tempfile.tempdir = None  # the environment may name another folder than that of the last program
    try:
        yield
    finally:
        tempfile.tempdir = None
        os.chdir(folder)
        sys.argv, sys.path[:] = arguments, path
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in set(sys.modules) - modules:  # the next program may have other modules of these names
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and os.path.dirname(file) in (beside, request.home):
                del sys.modules[name]


if __name__ == "__main__":
    _serve()
