"""Train the language model on Ray: ``python scripts/examples/engines/ray_cluster.py --steps 20``.

``RAY_ADDRESS`` names a cluster; without it there is one on this machine.
"""

from __future__ import annotations

import os
import sys

from language_model import RANKS, check_options, run_on, train_language_model  # type: ignore[import-not-found]  # beside this script

import asyncpar as ap

try:
    import ray
except ModuleNotFoundError:
    sys.exit('ray_cluster: there is no ray: pip install "asyncpar[ray]"')

if __name__ == "__main__":
    check_options()
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init("local", num_cpus=RANKS, include_dashboard=False)
    run_on("ray", lambda arguments: ap.ray.run(train_language_model, list(arguments), ranks=RANKS))
    ray.shutdown()
