"""Measure an MPI library through mpi4py; started by ``compare.py`` with the mpiexec of the same environment."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI
from rules import ROOT, Case, Peer, run

_WORLD = MPI.COMM_WORLD


def _reduce(case: Case) -> Callable[[], object]:
    if case.rank == ROOT:
        return lambda: _WORLD.Reduce(MPI.IN_PLACE, case.target, op=MPI.SUM, root=ROOT)
    return lambda: _WORLD.Reduce(case.source, None, op=MPI.SUM, root=ROOT)


def _peer() -> Peer:
    return Peer(
        rank=_WORLD.Get_rank(),
        ranks=_WORLD.Get_size(),
        calls={
            "all_reduce": lambda case: lambda: _WORLD.Allreduce(MPI.IN_PLACE, case.target, op=MPI.SUM),
            "all_gather": lambda case: lambda: _WORLD.Allgather(case.source, case.target),
            "reduce_scatter": lambda case: lambda: _WORLD.Reduce_scatter_block(case.source, case.target, op=MPI.SUM),
            "broadcast": lambda case: lambda: _WORLD.Bcast(case.target, root=ROOT),
            "all_to_all": lambda case: lambda: _WORLD.Alltoall(case.source, case.target),
            "reduce": _reduce,
            "gather": lambda case: (
                lambda: _WORLD.Gather(case.source, case.target if case.rank == ROOT else None, root=ROOT)
            ),
            "scatter": lambda case: (
                lambda: _WORLD.Scatter(case.source if case.rank == ROOT else None, case.target, root=ROOT)
            ),
            "barrier": lambda case: _WORLD.Barrier,  # noqa: ARG005
        },
        barrier=_WORLD.Barrier,
        largest=lambda value: float(_WORLD.allreduce(value, op=MPI.MAX)),
    )


if __name__ == "__main__":
    run(_peer)
