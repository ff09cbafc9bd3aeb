"""Train the language model on Dask: ``python scripts/examples/engines/dask_cluster.py --steps 20``.

``DASK_SCHEDULER_ADDRESS`` names a cluster; without it there is one of four workers on this machine.
"""

from __future__ import annotations

import os
import sys

from language_model import RANKS, check_options, run_on, train_language_model  # type: ignore[import-not-found]  # beside this script

import asyncpar as ap

try:
    from distributed import Client
except ModuleNotFoundError:
    sys.exit('dask_cluster: there is no distributed: pip install "asyncpar[dask]"')

if __name__ == "__main__":
    check_options()
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    with (
        Client(address)
        if address
        else Client(n_workers=RANKS, threads_per_worker=1, dashboard_address="127.0.0.1:0") as client
    ):
        run_on("dask", lambda arguments: ap.dask.run(client, train_language_model, list(arguments), ranks=RANKS))
