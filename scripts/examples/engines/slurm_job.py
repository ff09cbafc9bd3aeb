"""Train the language model as a job of Slurm: ``python scripts/examples/engines/slurm_job.py --steps 20``.

Submits ``ranks.py``, waits for its end, and prints its line of JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

from language_model import check_options  # type: ignore[import-not-found]  # beside this script

import asyncpar as ap
from asyncpar.errors import UsageError


async def main() -> None:
    """Submit, wait, and show."""
    ranks = Path(__file__).with_name("ranks.py").resolve()
    try:
        job = await ap.slurm.submit(ranks, *sys.argv[1:], nodes=2, tasks_per_node=2, job_name="language-model")
    except UsageError as error:
        sys.exit(f"slurm_job: {error}")
    print(f"{job}", file=sys.stderr)
    ending = await job.wait()
    output = job.output.read_text()
    if ending.exit_code:
        sys.exit(f"{output}the job has ended: {ending}")
    print(next(line for line in output.splitlines() if line.startswith("{")))


if __name__ == "__main__":
    check_options()
    ap.run(main)
