"""``ap.slurm``: run a function on nodes of Slurm (``launch``, ``run``), or submit a program to it (``submit``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from asyncpar.engines.awaited_arguments import with_values
from asyncpar.engines.blocking_run import make_run
from asyncpar.engines.job import JobOptions, make_spec, run_job
from asyncpar.engines.output import Console
from asyncpar.engines.slurm_engine import SlurmEngine
from asyncpar.launch.slurm import JobEnding, QueuedJob, SlurmOptions, submit

__all__ = ["JobEnding", "QueuedJob", "SlurmOptions", "launch", "run", "submit"]


async def launch(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    per_node: int = 1,
    salloc: Sequence[str] = (),
    python: str = sys.executable,
    pickle: bool = False,
    console: Console | None = None,
    **options: Unpack[JobOptions],
) -> list[Any]:
    """Run ``function(*arguments)`` in ``ranks`` processes on nodes of Slurm; return their results in order of ranks.

    ``per_node`` of them share a node.  In a job (``salloc``, or a batch script) the nodes are those of the job;
    otherwise they are requested with ``salloc``'s options (``salloc=["--partition=gpu", "--time=60"]``), and released
    at the end.  ``python`` is Python on the nodes, which have this directory and asyncpar.  In ``function``,
    ``asyncpar.init()`` joins the world of these ranks.  It travels by its name, and arguments and results as plain data
    and arrays; with ``pickle=True`` it travels as code.  ``console`` takes output and progress (None: printed).

    Raises as ``ap.cluster.launch`` does; ``UsageError`` with Slurm's message if it has no such nodes, or does not grant
    them within ``timeout`` and ``wait``.  A node that is lost is a ``PeerLost`` for each of its ranks.
    """
    options.setdefault("per_place", per_node)
    function, arguments = await with_values(function, arguments)
    spec = make_spec(function, arguments, ranks=ranks, pickle=pickle, **options)
    return await run_job(SlurmEngine(allocation=salloc, python=python), spec, console)


run = make_run(launch)
