"""Synchronize the gradients of ``link.py`` with torch: Gloo by itself, and DistributedDataParallel with its hooks.

Runs in the environment of Gloo; one process per rank, over a rendezvous file.  Prints a JSON object per form.

``gloo`` is one ``all_reduce`` in place of all gradients in one tensor, with nothing to pack or to write back: the least
that Gloo needs.  The others time ``backward()`` of a model whose backward pass only hands out gradients that were made
beforehand, in tensors that torch may keep without a copy: so what is timed is what DistributedDataParallel does with
gradients, in buckets of its own choice, up to means in ``.grad``, which are views of its buckets.  ``fp16`` and
``powersgd`` register torch's ``fp16_compress_hook`` and ``powerSGD_hook`` (rank 4, warm start, error feedback, from the
third step on).  With ``powersgd`` everything is in one bucket: the hook begins its later rounds from callbacks, of
several buckets in an order that differs between ranks now and then, and Gloo then mistakes one for another.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import gradients
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch_ranks import join, largest, leave

FORMS = ("gloo", "ddp", "fp16", "powersgd")
_POWERSGD_RANK = 4
_TOLERANCE = {"gloo": 1e-6, "ddp": 1e-6, "fp16": 2.0**-9}
"""Of the largest magnitude."""


class _HandOut(torch.autograd.Function):
    """A loss whose gradients are those in ``given``, which is emptied."""

    @staticmethod
    def forward(ctx: Any, given: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        ctx.given = given
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:  # noqa: ARG004
        handed = (None, *ctx.given)
        ctx.given.clear()
        return handed


class _Model(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in gradients.shapes(count))

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = _HandOut.apply(given, *self.weights)
        return loss


Step = Callable[[], float]
"""Synchronizes once and returns the seconds of it."""


def _gloo(source: torch.Tensor) -> tuple[Step, Callable[[], torch.Tensor]]:
    target = torch.empty_like(source)

    def step() -> float:
        target.copy_(source)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(target)
        return time.perf_counter() - started

    return step, lambda: target / dist.get_world_size()


def _ddp(source: torch.Tensor, form: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    count = source.numel()
    model = _Model(count)
    whole = math.ceil(4 * count / 2**20) if form == "powersgd" else None
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=whole)
    if form == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif form == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=_POWERSGD_RANK, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def step() -> float:
        parallel.zero_grad(set_to_none=True)
        given = [torch.from_numpy(part.copy()) for part in gradients.split(source.numpy(), count)]
        loss = parallel(given)
        dist.barrier()
        started = time.perf_counter()
        loss.backward()
        return time.perf_counter() - started

    return step, lambda: torch.cat([weight.grad.flatten() for weight in model.weights])


def _measure(form: str, source: torch.Tensor, expected: torch.Tensor, budget: float) -> dict[str, object]:
    step, result = _gloo(source) if form == "gloo" else _ddp(source, form)
    once = [step() for _ in range(gradients.WARM_UP)][-1]
    times = [step() for _ in range(gradients.iterations(largest(once), budget))]
    found = result()
    limit = _TOLERANCE.get(form, float("inf")) * float(expected.abs().max())
    is_right = bool(torch.isfinite(found).all()) and float((found - expected).abs().max()) <= limit
    return {
        "form": form,
        "seconds": largest(statistics.median(times)),
        "iterations": len(times),
        "wrong": int(largest(float(not is_right))),
    }


def main() -> None:
    """Be one rank; rank 0 prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--size", type=int, required=True, help="bytes of all gradients")
    parser.add_argument("--budget", type=float, required=True, help="seconds per form")
    arguments = parser.parse_args()
    rank, ranks = join()
    count = arguments.size // 4
    source = torch.from_numpy(gradients.draw(count, rank))
    expected = torch.from_numpy(gradients.mean(count, ranks))
    for form in arguments.forms.split(","):
        record = _measure(form, source, expected, arguments.budget)
        if rank == 0:
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
    leave()


if __name__ == "__main__":
    main()
