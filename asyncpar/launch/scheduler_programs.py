"""Commands of schedulers: sbatch, scontrol, kubectl."""

from __future__ import annotations

import subprocess

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import LaunchError

_SECONDS = 60.0


def ask_scheduler(command: list[str], given: str = "", *, refused: str, probe: str) -> str:
    """Run ``command`` with ``given`` as its input, and return its output.  Blocks.

    Raises ``LaunchError``: if the command fails, with the ``refused`` action and the command's message; if it does not
    answer, with ``probe``, a command that shows whether its service runs.
    """
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{command[0]} did not answer within {_SECONDS:g} s; try `{probe}`") from error
    except OSError as error:
        raise LaunchError(f"{command[0]}: it cannot be run: {os_reason(error)}") from error
    if done.returncode != 0:
        words = "; ".join(done.stderr.strip().splitlines()) or f"exit code {done.returncode}"
        raise LaunchError(f"{refused}: {words}")
    return done.stdout
