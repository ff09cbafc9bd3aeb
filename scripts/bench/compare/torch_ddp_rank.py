"""One rank of ``torch_ddp.py``: single calls, DDP and FSDP2 over the process group of one side; rank 0 prints JSON.

Calls are measured by the rules of ``peers/rules.py``, which `asyncpar bench` keeps, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

from asyncpar.core.config.names import Name
from scripts.bench.compare.torch_ddp_options import SIZES
from scripts.bench.compare.torch_ddp_steps import measure_ddp, measure_fsdp
from scripts.bench.peers.rules import Case, Peer, make_case, measure
from scripts.bench.peers.torch_ranks import join, largest, leave

_NOTHING = "nothing"
_CALLS = 5_000
_SHARDS = (1_000_000, 25_000_000)
"""Of all_gather and reduce_scatter, which FSDP lives on: bytes of the whole."""

_Call = Callable[[Any, Any], object]

CALLS: dict[str, tuple[str, _Call]] = {
    "all_reduce": ("all_reduce", lambda target, _: dist.all_reduce(target)),
    "async": ("all_reduce", lambda target, _: dist.all_reduce(target, async_op=True).wait()),
    "all_gather": ("all_gather", dist.all_gather_single),
    "reduce_scatter": ("reduce_scatter", dist.reduce_scatter_single),
}
"""What is measured: an operation, and how it is called with (target, source)."""


def measure_calls(sizes: list[int], budget: float) -> Iterator[dict[str, object]]:
    """Yield a record for each call and size, and one of what torch itself takes for a call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for form, (op, call) in CALLS.items():
        peer = Peer(rank=rank, ranks=ranks, calls={op: _bound(call)}, barrier=dist.barrier, largest=largest)
        for size in sizes if op == "all_reduce" else [one for one in _SHARDS if one <= max(sizes)]:
            record = measure(peer, make_case(op, size, rank=rank, ranks=ranks), budget=budget)
            yield {"what": "call", **record, "op": form}
    yield {"what": "call", "op": _NOTHING, "size": 4, "seconds": largest(time_nothing()), "wrong": 0}


def _bound(call: _Call) -> Callable[[Case], Callable[[], object]]:
    def bind(case: Case) -> Callable[[], object]:
        target, source = torch.from_numpy(case.target), torch.from_numpy(case.source)
        return lambda: call(target, source)

    return bind


def time_nothing() -> float:
    """Return the seconds of an all_reduce by a process group, written in Python, that does nothing."""

    class Done(dist.Work):  # type: ignore[misc]
        def wait(self, timeout: object = None) -> bool:  # noqa: ARG002
            return True

    class Nothing(dist.ProcessGroup):  # type: ignore[misc]
        def allreduce(self, tensors: object, options: object = None) -> Done:  # noqa: ARG002
            return Done()

        def getBackendName(self) -> str:  # noqa: N802
            return _NOTHING

        def setGroupName(self, name: str) -> None:  # noqa: N802
            self._name = name

        def getGroupName(self) -> str:  # noqa: N802
            return self._name

        def setGroupDesc(self, description: str) -> None:  # noqa: N802
            self._description = description

        def getGroupDesc(self) -> str:  # noqa: N802
            return self._description

    def make(given: Any, _: object) -> Nothing:
        return Nothing(given.group_rank, given.group_size)

    dist.Backend.register_backend(_NOTHING, make, extended_api=True, devices=["cpu"])
    group = dist.new_group(backend=_NOTHING)
    tensor = torch.zeros(1)
    times = []
    for _ in range(_CALLS):
        started = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def hook_of(codec: str | None) -> tuple[Any, Any] | None:
    """Return the state and the hook that compress gradients with ``codec``."""
    if codec is None:
        return None
    from asyncpar.torch import GradientHook, gradient_hook

    return GradientHook(codec=Name(codec)), gradient_hook


def records(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Measure what is asked for."""
    parts = arguments.parts.split(",")
    if "calls" in parts:
        yield from measure_calls([int(size) for size in arguments.sizes.split(",")], arguments.budget)
    for model in arguments.models.split(","):
        if "ddp" in parts:
            hook = hook_of(arguments.codec)
            yield {
                "what": "ddp",
                "model": model,
                **measure_ddp(SIZES[model], hook, arguments.budget, is_zero_copy=arguments.zero_copy),
            }
        if "fsdp" in parts:
            yield {
                "what": "fsdp",
                "model": model,
                **measure_fsdp(SIZES[model], arguments.budget, is_zero_copy=arguments.zero_copy),
            }


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "asyncpar"), required=True)
    parser.add_argument("--parts", required=True)
    parser.add_argument("--models", default="tiny")
    parser.add_argument("--sizes", default="4")
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--codec")
    parser.add_argument("--zero-copy", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.backend == "asyncpar":
        import asyncpar.torch  # noqa: F401
    join(arguments.backend)
    for record in records(arguments):
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
    leave()


if __name__ == "__main__":
    main()
