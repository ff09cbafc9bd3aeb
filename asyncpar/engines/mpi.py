"""``ap.mpi``: run a function on hosts where ``mpiexec`` starts processes (``launch``, ``run``), without an MPI library.

A program that ``mpiexec`` itself starts as ranks needs none of this: ``ap.init`` finds its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from asyncpar.engines.awaited_arguments import with_values
from asyncpar.engines.blocking_run import make_run
from asyncpar.engines.job import JobOptions, make_spec, run_job
from asyncpar.engines.mpi_engine import MpiEngine
from asyncpar.engines.output import Console

__all__ = ["launch", "run"]


async def launch(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    hosts: Sequence[str] = (),
    mpiexec: str | Sequence[str] = "mpiexec",
    python: str = sys.executable,
    pickle: bool = False,
    console: Console | None = None,
    **options: Unpack[JobOptions],
) -> list[Any]:
    """Run ``function(*arguments)`` in ``ranks`` processes where ``mpiexec`` starts them; return their results by rank.

    ``hosts`` are filled in their order, with ``per_place`` ranks each (None: as few as are needed); () is the default
    host of ``mpiexec``.  ``mpiexec`` is the command, with options of its own in a list (``["mpiexec", "-launcher",
    "ssh"]``).  ``python`` is Python on the hosts, which have this directory and asyncpar.  In ``function``,
    ``asyncpar.init()`` joins the world of these ranks, which are not ranks of MPI.  It travels by its name, and
    arguments and results as plain data and arrays; with ``pickle=True`` it travels as code.  ``console`` takes output
    and progress (None: printed).

    Raises as ``ap.cluster.launch`` does; ``LaunchError`` with the message of ``mpiexec`` if it starts nothing on a
    host.  A host that is lost is a ``PeerLost`` for each of its ranks.
    """
    function, arguments = await with_values(function, arguments)
    spec = make_spec(function, arguments, ranks=ranks, pickle=pickle, **options)
    return await run_job(MpiEngine(hosts=hosts, mpiexec=mpiexec, python=python), spec, console)


run = make_run(launch)
