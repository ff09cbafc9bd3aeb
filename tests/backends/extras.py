"""Tests that need an extra, in processes of their own with an environment of their own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
REQUIRED = "ASYNCPAR_TEST_BACKENDS"
"""Set where the extras must be there: then their absence fails tests instead of skipping them."""

PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def need(module: str, install: str) -> None:
    """Skip the test, or fail it where extras are required, unless ``module`` can be imported."""
    if importlib.util.find_spec(module) is None:
        _miss(f"{module} is not installed: {install}")


def need_program(program: str, install: str) -> str:
    """Return the path of ``program``; skip or fail without it."""
    path = shutil.which(program, path=PROGRAMS)
    if path is None:
        _miss(f"{program} is not installed: {install}")
    return path


def _miss(message: str) -> NoReturn:
    if os.environ.get(REQUIRED):
        pytest.fail(message)
    pytest.skip(message)


def environment(home: Path) -> dict[str, str]:
    """Return an environment with nothing of the caller's but the path of programs."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowded = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    common = {"PATH": PROGRAMS, "HOME": str(home), "TMPDIR": str(home), "PYTHONUNBUFFERED": "1"}
    alike = {"OMP_NUM_THREADS": "1"}  # as launched ranks have it: threads of BLAS may change last bits
    return common | alike | root | crowded


def outputs_of(*commands: list[str], home: Path, timeout: float = 60, statuses: Sequence[int] = ()) -> list[str]:
    """Run ``commands`` at once in the root of the project and return what they printed.

    They must end within ``timeout`` seconds, with ``statuses`` (default: 0 each); whatever happens, none is left over.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(_started(command, home)) for command in commands]
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        for process, output, status in zip(processes, outputs, statuses or [0] * len(commands), strict=True):
            assert process.returncode == status, output
    return outputs


@contextmanager
def _started(command: list[str], home: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def pytest_command(module: str) -> list[str]:
    """Return what runs the tests of a module of this package."""
    path = f"tests/backends/{module}.py"
    return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=120", path]
