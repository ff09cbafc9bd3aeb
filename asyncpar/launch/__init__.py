"""`asyncpar launch`: one agent per host starts, watches and ends the ranks of a job."""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach(__name__, submodules=["slurm"])
