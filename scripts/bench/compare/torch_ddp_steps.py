"""Training steps of ``torch_ddp.py``: a small transformer under DistributedDataParallel and under FSDP2.

Every step starts behind a barrier.  Steps of different kinds (with and without communication, and communication alone)
are timed in turn, so that what disturbs one disturbs the others; figures are medians of the slowest rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from scripts.bench.compare.torch_ddp_options import VOCABULARY, Size
from scripts.bench.peers.torch_ranks import largest

CHECKED = 4
"""Steps before those that are timed; their losses are compared between the sides, and DDP plans its buckets anew."""

_LEAST, _MOST = 5, 200
_SEED = 20_261_122
_LEARNING_RATE = 1e-3

Step = Callable[[], object]


class Transformer(nn.Module):  # type: ignore[misc]
    """Embeddings, causal blocks and a head, of torch's own layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.features)
        self.positions = nn.Embedding(size.length, size.features)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.features,
                size.heads,
                4 * size.features,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.features)
        self.head = nn.Linear(size.features, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.length), persistent=False)

    def forward(self, x: Any) -> Any:
        x = self.tokens(x) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


class Training:
    """A model, its optimizer and this rank's batches, the same ones on every side."""

    def __init__(self, size: Size, spread: Callable[[Transformer], Any]) -> None:
        torch.manual_seed(_SEED)
        self.model = spread(Transformer(size))
        self._size = size
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=True)
        self._random = torch.Generator().manual_seed(_SEED + 1 + dist.get_rank())

    def step(self, *, without: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Any:
        """Train on the next batch, backward and forward ``without`` communication; return the loss."""
        rows = torch.randint(VOCABULARY // 4, (self._size.rows, self._size.length + 1), generator=self._random)
        self._optimizer.zero_grad()
        with without():
            logits = self.model(rows[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
        self._optimizer.step()
        return loss.detach()

    def check(self) -> list[float]:
        """Take the first steps and return the mean losses over ranks."""
        losses = torch.stack([self.step() for _ in range(CHECKED)]).double()
        dist.all_reduce(losses)
        return (losses / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


def measure_ddp(
    size: Size, hook: tuple[Any, Any] | None, budget: float, *, is_zero_copy: bool = False
) -> dict[str, object]:
    """Return the figures of DDP, asyncpar's own if ``is_zero_copy``, with a communication hook and its state, or none.

    ``alone`` is one all_reduce for each of DDP's buckets, as large and in the same order, with nothing beside them.
    """
    training = Training(size, _copies_none if is_zero_copy else _copies_once)
    if hook is not None:
        training.model.register_comm_hook(*hook)
    losses = training.check()
    sizes = training.model.bucket_sizes if is_zero_copy else bucket_sizes(training.model)
    buckets = [torch.zeros(count // 4) for count in sizes]
    kinds: dict[str, Step] = {"step": training.step, "compute": lambda: training.step(without=training.model.no_sync)}
    if hook is None:
        kinds["alone"] = lambda: reduce_all(buckets)
    return {**time_in_turn(kinds, budget), **_describe(training.model), "buckets": sizes, "losses": losses}


def _copies_once(model: Transformer) -> Any:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _copies_none(model: Transformer) -> Any:
    from asyncpar.torch import DistributedDataParallel

    return DistributedDataParallel(model)


def measure_fsdp(size: Size, budget: float, *, is_zero_copy: bool = False) -> dict[str, object]:
    """Return the figures of FSDP2, each block and the whole sharded, with buffers in shared memory if ``is_zero_copy``.

    ``compute`` is a step of the model as it is, so what FSDP2 does to tensors itself counts as communication; ``alone``
    is what it has the process group do, see ``exchange_shards``.
    """
    sharded, whole = (
        Training(size, _shard_in_shared_memory if is_zero_copy else _shard),
        Training(size, lambda model: model),
    )
    losses = sharded.check()
    whole.step()
    units = [Unit(count) for count in unit_counts(whole.model)]
    kinds = {"step": sharded.step, "compute": whole.step, "alone": lambda: exchange_shards(units)}
    return {**time_in_turn(kinds, budget), **_describe(whole.model), "losses": losses}


def _shard(model: Transformer) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _shard_in_shared_memory(model: Transformer) -> Any:
    sharded = _shard(model)
    for module in (*sharded.blocks, sharded):
        module.set_allocate_memory_from_process_group_for_comm(True)
    return sharded


class Unit:
    """Tensors of the size of what FSDP2 shards together: ``count`` values, and one rank's part of them."""

    def __init__(self, count: int) -> None:
        ranks = dist.get_world_size()
        self.shard = torch.zeros(math.ceil(count / ranks))
        self.whole = torch.zeros(ranks * self.shard.numel())

    def gather(self) -> None:
        dist.all_gather_single(self.whole, self.shard)

    def scatter(self) -> None:
        dist.reduce_scatter_single(self.shard, self.whole)


def unit_counts(model: Transformer) -> list[int]:
    """Return how many values what FSDP2 shards together has: what is in no block, and each block."""
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
    return [sum(parameter.numel() for parameter in model.parameters()) - sum(blocks), *blocks]


def exchange_shards(units: list[Unit]) -> None:
    """Gather parameters for forward, and for backward all but the first unit; reduce and scatter gradients."""
    for unit in units:
        unit.gather()
    for unit in reversed(units):
        if unit is not units[0]:
            unit.gather()
        unit.scatter()


def _describe(model: Any) -> dict[str, object]:
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def bucket_sizes(model: Any) -> list[int]:
    """Return the bytes of DDP's buckets, in the order in which it reduces them."""
    logged = model._get_ddp_logging_data()
    listed = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return [int(count) for count in listed.split(",")]


def reduce_all(buckets: list[Any]) -> None:
    """Reduce ``buckets``, begun one after another as DDP does."""
    works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
    for work in works:
        work.wait()


def time_in_turn(kinds: Mapping[str, Step], budget: float) -> dict[str, float]:
    """Return the median seconds of each kind on the slowest rank, and what ``step`` takes more than ``compute``.

    Each kind has about ``budget`` seconds.
    """
    for step in kinds.values():
        _time(step)
    once = max(_time(step) for step in kinds.values())
    count = min(max(math.ceil(budget / largest(once)), _LEAST), _MOST)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(count):
        for kind, step in kinds.items():
            times[kind].append(_time(step))
    medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    medians["exposed"] = medians["step"] - medians["compute"]
    return {kind: largest(seconds) for kind, seconds in medians.items()}


def _time(step: Step) -> float:
    dist.barrier()
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
