"""Hand a batch script to ``sbatch``."""

from __future__ import annotations

import shutil
import subprocess

from asyncpar.errors import LaunchError, UsageError

_SECONDS = 60.0


def submit(script: str, *, is_tested: bool = True) -> str:
    """Submit the batch ``script`` and return the number of its job; ``is_tested``: refuse one that could not run now.

    Slurm itself takes jobs for more nodes than there are, and lets them wait for ever.
    Raises ``UsageError`` where there is no ``sbatch``, and ``LaunchError`` with its words if it refuses.
    """
    if shutil.which("sbatch") is None:
        raise UsageError(
            "sbatch: it is not in PATH; run this where jobs are submitted, or see the script with --dry-run"
        )
    if is_tested:
        _run(["sbatch", "--test-only"], script, "could not run here (--queue-anyway lets it wait)")
    return _run(["sbatch", "--parsable"], script, "was refused").strip().partition(";")[0]  # number;cluster


def _run(command: list[str], script: str, what: str) -> str:
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"sbatch did not answer within {_SECONDS:g} s; try `scontrol ping`") from error
    if done.returncode != 0:
        words = "; ".join(done.stderr.strip().splitlines()) or f"exit code {done.returncode}"
        raise LaunchError(f"the job {what}: {words}")
    return done.stdout
