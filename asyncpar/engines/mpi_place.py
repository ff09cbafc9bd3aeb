"""The program of a place that ``mpiexec`` starts: ``python -m asyncpar.engines.mpi_place ADDRESS``.

``ADDRESS`` is that of the caller's host for this one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

from asyncpar.core.addresses import route_to, spell_host
from asyncpar.engines.polled_place import describe_process
from asyncpar.engines.stream_place import serve_caller

MPI_VARIABLES: Final = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL")
"""Prefixes of the variables in which ``mpiexec`` gives a process its rank in an MPI world."""
_ASKED_TO_END: Final = "was asked to end by mpiexec, which got a signal or lost its host"


def main(caller: str) -> None:
    """Serve the caller.  The ranks belong to asyncpar's world, not to the MPI world of this one process."""
    for name in [name for name in os.environ if name.startswith(MPI_VARIABLES)]:
        del os.environ[name]
    address = spell_host(os.environ.get("ASYNCPAR_BIND") or "") or route_to(caller)
    asyncio.run(serve_caller(describe_process(address), asked_to_end=_ASKED_TO_END))


if __name__ == "__main__":
    main(sys.argv[1])
