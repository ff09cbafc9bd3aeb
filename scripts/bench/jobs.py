"""Jobs of measurements: processes that run together to their end, and the JSON lines that they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.bench.namespaces import End

LAUNCH = (sys.executable, "-m", "asyncpar", "launch")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""For processes that compute in one thread."""

_PATIENCE = 5.0


class JobFailedError(Exception):
    """A job of a peer, or of ours, did not end well; the message has the end of what it wrote."""


def run(command: Sequence[str], *, limit: float | None = None) -> str:
    """Run a command to its end and return its standard output."""
    return run_together([command], [os.environ], limit=limit)


def run_ranks(
    prefixes: Sequence[Sequence[str]],
    program: Sequence[str],
    *,
    limit: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run ``program`` as a rank of torch behind each of the command ``prefixes``; return what rank 0 printed.

    Ranks get their numbers as torchrun sets them, and a file for their rendezvous.
    """
    with tempfile.TemporaryDirectory(prefix="asyncpar-bench-") as directory:
        common = os.environ | dict(environment or {})
        common |= {"WORLD_SIZE": str(len(prefixes)), "RENDEZVOUS": f"{directory}/rendezvous"}
        return run_together(
            [[*prefix, *program] for prefix in prefixes],
            [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(prefixes))],
            limit=limit,
        )


def launch_across(
    ends: Sequence[End],
    program: Sequence[str],
    *,
    port: int,
    limit: float,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run ``program`` as a job with a host on each of ``ends``; return what rank 0 printed.

    The hosts meet at ``port`` of the first end; ``options`` go to `asyncpar launch`.  A rank computes in one thread.
    """
    with _secret_file() as secret:
        launch = [*LAUNCH, f"--nnodes={len(ends)}", f"--rdzv-endpoint={ends[0].address}:{port}", *options]
        launch += ["--secret-file", str(secret)]
        commands = [end.enter([*launch, f"--node-rank={place}", *program]) for place, end in enumerate(ends)]
        variables = os.environ | ONE_THREAD | dict(environment or {})
        return run_together(commands, [variables] * len(ends), limit=limit)


@contextmanager
def _secret_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="asyncpar-bench-") as directory:
        path = Path(directory) / "secret"
        path.touch(mode=0o600)
        path.write_bytes(os.urandom(32))
        yield path


def run_together(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, limit: float | None = None
) -> str:
    """Run commands at the same time and return the standard output of the first.

    Raises ``JobFailedError`` when one fails or takes more than ``limit`` seconds.  No process of theirs is left,
    whatever happens.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with _interrupts_held():  # one that comes before a process is in the list would leave it behind
                for command, environment in zip(commands, environments, strict=True):
                    stdout = subprocess.DEVNULL if processes else output
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=stdout,
                            stderr=errors,
                            start_new_session=True,
                        )
                    )
            codes = [process.wait(limit) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise JobFailedError(f"{_shown(commands[0])} did not end within {limit:.0f} s") from error
        finally:
            for process in processes:
                _end(process)
        if any(codes):
            errors.seek(0)
            tail = "\n".join(errors.read().splitlines()[-15:])
            raise JobFailedError(f"{_shown(commands[0])} ended with {next(filter(None, codes))}\n{tail}")
        output.seek(0)
        return output.read()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block, which is to be short."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for held in dict.fromkeys(came):
            signal.raise_signal(held)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a process' group."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _shown(command: Sequence[str]) -> str:
    return " ".join(command)[:200]


def records_of(output: str) -> list[dict[str, Any]]:
    """Return the objects of JSON that are among the lines of ``output``."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def tell(text: str) -> None:
    """Say how it goes, apart from the results."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
