"""Members of collective groups, for actors of Ray: each makes its calls, and returns what it has got."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray.util.collective as collective
from ray.util.collective.types import ReduceOp

import asyncpar as ap

OPERATIONS = {ReduceOp.SUM: 5.0, ReduceOp.PRODUCT: 6.0, ReduceOp.MIN: 2.0, ReduceOp.MAX: 3.0}
"""What each makes of 2 and 3, the values of ranks 0 and 1."""


class Member:
    """A process that joins groups by ``init_collective_group``, or those that its driver has declared."""

    def __init__(self) -> None:
        ap.ray.register_collective_backend()

    def join(self, size: int, rank: int, group: str, backend: str = "asyncpar") -> tuple[int, int]:
        """Join a group, and return this rank's number and the size."""
        collective.init_collective_group(size, rank, backend, group)
        return collective.get_rank(group), collective.get_collective_group_size(group)

    def leave(self, group: str) -> None:
        """Leave a group."""
        collective.destroy_collective_group(group)

    def move(self, group: str, library: str) -> dict[str, Any]:
        """Call every operation of a group of two; return what came of each, as lists."""
        rank = collective.get_rank(group)
        make, results = self._maker(library), dict[str, Any]()
        for op in ReduceOp:
            x = make(rank + 2.0)
            collective.allreduce(x, group, op)
            results[f"allreduce {op.name}"] = x.tolist()
        x = make(rank + 2.0)
        collective.reduce(x, 1, group)
        results["reduce"] = x.tolist()
        x = make(rank + 2.0)
        collective.broadcast(x, 1, group)
        results["broadcast"] = x.tolist()
        places = [make(0.0), make(0.0)]
        collective.allgather(places, make(rank + 2.0), group)
        results["allgather"] = [place.tolist() for place in places]
        x, parts = make(0.0), [make(rank + 2.0), make(10.0 * (rank + 2.0))]
        collective.reducescatter(x, parts, group)
        results["reducescatter"] = x.tolist()
        results["parts"] = [part.tolist() for part in parts]
        x = make(rank + 2.0)
        if rank == 0:
            collective.send(x, 1, group)
        else:
            collective.recv(x, 0, group)
        results["recv"] = x.tolist()
        collective.barrier(group)
        return results

    def _maker(self, library: str) -> Any:
        if library == "numpy":
            return lambda value: np.full((2, 3), value, np.float32)
        import torch

        if library == "torch strided":
            return lambda value: torch.full((3, 2), value).t()
        return lambda value: torch.full((2, 3), value, dtype=torch.bfloat16 if "bfloat16" in library else None)

    def refuse(self, group: str, what: str) -> None:
        """Call an operation that must be refused."""
        rank = collective.get_rank(group)
        if what == "differ":
            collective.allreduce(np.zeros(3 + rank), group)
        elif what == "dtype":
            collective.allreduce(np.array(["text"]), group)
        elif what == "list":
            collective.allgather([np.zeros(3), np.zeros(4)], np.zeros(3), group)

    def wait(self, group: str) -> None:
        """Come to a barrier."""
        collective.barrier(group)

    def pid(self) -> int:
        """Return the number of this process."""
        import os

        return os.getpid()

    def time_rounds(self, groups: dict[str, str], elements: int, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of ``rounds`` all-reduces of float32 in each group, in turns; keys are those of groups."""
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        x = np.ones(elements, np.float32)
        for _ in range(rounds):
            for name, group in groups.items():
                x.fill(1.0)
                collective.barrier(group)
                begun = time.perf_counter()
                collective.allreduce(x, group)
                seconds[name].append(time.perf_counter() - begun)
        return seconds
