"""Train the language model on Ray: ``python scripts/examples/engines/ray_cluster.py --steps 20``.

``RAY_ADDRESS`` names a cluster; without it there is one on this machine.
"""

from __future__ import annotations

import os

import ray
from language_model import RANKS, run_on, train_language_model  # type: ignore[import-not-found]  # beside this script

import asyncpar as ap

if __name__ == "__main__":
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init(num_cpus=RANKS, include_dashboard=False)
    run_on("ray", lambda arguments: ap.ray.run(train_language_model, list(arguments), ranks=RANKS))
    ray.shutdown()
