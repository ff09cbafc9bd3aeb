"""Measure Gloo through torch.distributed; started by ``compare.py``, one process per rank, over a rendezvous file."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from rules import ROOT, Case, Peer, run
from torch_ranks import join, largest


def _gather(case: Case) -> Callable[[], object]:
    source = torch.from_numpy(case.source)
    parts = list(torch.from_numpy(case.target).chunk(case.ranks)) if case.rank == ROOT else None
    return lambda: dist.gather(source, parts, dst=ROOT)


def _scatter(case: Case) -> Callable[[], object]:
    target = torch.from_numpy(case.target)
    parts = list(torch.from_numpy(case.source).chunk(case.ranks)) if case.rank == ROOT else None
    return lambda: dist.scatter(target, parts, src=ROOT)


def _both(
    call: Callable[[torch.Tensor, torch.Tensor], object],
) -> Callable[[Case], Callable[[], object]]:
    """Bind the tensors of a case to ``call(target, source)``."""

    def bind(case: Case) -> Callable[[], object]:
        target, source = torch.from_numpy(case.target), torch.from_numpy(case.source)
        return lambda: call(target, source)

    return bind


def _peer() -> Peer:
    rank, ranks = join()
    return Peer(
        rank=rank,
        ranks=ranks,
        calls={
            "all_reduce": _both(lambda target, source: dist.all_reduce(target)),  # noqa: ARG005
            "all_gather": _both(dist.all_gather_into_tensor),
            "reduce_scatter": _both(dist.reduce_scatter_tensor),
            "broadcast": _both(lambda target, source: dist.broadcast(target, src=ROOT)),  # noqa: ARG005
            "all_to_all": _both(dist.all_to_all_single),
            "reduce": _both(lambda target, source: dist.reduce(target, dst=ROOT)),  # noqa: ARG005
            "gather": _gather,
            "scatter": _scatter,
            "barrier": lambda case: dist.barrier,  # noqa: ARG005
        },
        barrier=dist.barrier,
        largest=largest,
    )


if __name__ == "__main__":
    run(_peer)
    dist.destroy_process_group()
