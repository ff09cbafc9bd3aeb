"""Engines place ranks on the infrastructure that users already have; everything between the ranks is the same.

An engine (``interface.py``) finds places and starts an agent at each (``place_agent.py``); a machine (``machine.py``)
decides, ``job.py`` acts, and the result is the same for all: values by rank, or an ``ExceptionGroup``.
"""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach(__name__, submodules=["dask", "mpi", "ray", "slurm"])
