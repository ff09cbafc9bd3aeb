"""The program of a place in Slurm, which one ``srun`` per node starts: ``python -m asyncpar.engines.slurm_place``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Final

from asyncpar.core.addresses import loopback, resolve, route_to, spell_host
from asyncpar.engines.polled_place import describe_process
from asyncpar.engines.stream_place import serve_caller

_ASKED_TO_END: Final = "was asked to end by Slurm: scancel, preemption, or the time limit"


def describe_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the facts that the caller needs; the address is the one by which this host reaches ``srun``'s."""
    address = spell_host(environment.get("ASYNCPAR_BIND") or "")
    if not address:
        address = route_to(resolve(environment.get("SRUN_COMM_HOST") or loopback()))
    step = f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    return {**describe_process(address), "host": environment.get("SLURMD_NODENAME") or "localhost", "step": step}


if __name__ == "__main__":
    asyncio.run(serve_caller(describe_place(os.environ), asked_to_end=_ASKED_TO_END))
