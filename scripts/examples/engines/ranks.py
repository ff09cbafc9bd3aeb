"""Train the language model as a rank of whatever starts it, several times:

    mpiexec -n 4 python scripts/examples/engines/ranks.py --steps 20
    srun --kill-on-bad-exit=1 -N 2 -n 4 python scripts/examples/engines/ranks.py --steps 20
    asyncpar k8s --image site/train:1 --nodes 2 --tasks-per-node 2 scripts/examples/engines/ranks.py --steps 20

The first rank prints one line of JSON.
"""

from __future__ import annotations

import os
import sys
import time

from language_model import check_options, show_figures, train_rank  # type: ignore[import-not-found]  # beside this script

import asyncpar as ap
from asyncpar.core.config.rank_place import find_rank_place


def name_launcher() -> str:
    """Return what has started this rank."""
    place = find_rank_place(os.environ)
    if place is not None:
        return place.launcher
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else "asyncpar launch"


async def main() -> None:
    """Train, and show the figures on the first rank."""
    launcher, begun = name_launcher(), time.perf_counter()
    run = await train_rank(sys.argv[1:])
    if run.is_first:
        show_figures(launcher, run.summary.ranks, run.losses, begun)


if __name__ == "__main__":
    check_options()
    ap.run(main)
