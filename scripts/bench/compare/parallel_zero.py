"""A step of each ZeRO stage, and of plain data parallelism, on a model of which compute is next to nothing.

Each layer is one weight; its forward pass hands on, its backward pass adds a constant to the gradient, which is what
every backward pass does at the least.  All of the rest is the coordinator's: buckets reduced while layers compute, the
agreement on the step, AdamW, and from stage 1 on the gathering of values.  Since first values and gradients are equal
all over a layer, every value that a rank owns can be checked, to the last bit, against a weight of one value.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import asyncpar as ap
from asyncpar.core.config.parallel import MemoryOptimizationStrategy, ThreeDParallelismConfig
from asyncpar.hybrid import HybridConfig, Loss, ParallelModel, StageLayers, StagePlace, ThreeDParallelismCoordinator
from asyncpar.nn.optimizers import AdamW
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage, report
from asyncpar.nn.tensor.group import TensorGroup
from asyncpar.node import Node
from asyncpar.zero import ZeROConfig, ZeROStage
from asyncpar.zero.share import VALUE

_LAYERS = 8
_RATE = 1e-3
_WARM_UP = 2
_RULE = AdamW(weight_decay=0.0)


class Weight(Stage[None]):
    """A layer of one weight that hands on its input; its gradient is one more than the replica's number."""

    def __init__(self, name: str, count: int, replica: int) -> None:
        self._weight = Parameter(name, np.zeros(count, np.float32))
        self._gradient = 1.0 + replica

    def forward(self, x: Array) -> tuple[Array, None]:
        assert self._weight.value.size, "the values are here"
        return x, None

    def backward(
        self,
        saved: None,  # noqa: ARG002
        dy: Array,
        on_gradient: OnGradient | None = None,
        deferred: Deferred | None = None,  # noqa: ARG002
    ) -> Array:
        self._weight.accumulate(self._gradient)
        report((self._weight,), on_gradient)
        return dy

    def parameters(self) -> tuple[Parameter, ...]:
        return (self._weight,)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsModel(ParallelModel):
    """Layers of ``values`` values in all."""

    values: int

    @property
    def num_layers(self) -> int:
        return _LAYERS

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"kind": "weights", "values": self.values}

    def check(self, config: ThreeDParallelismConfig) -> None:
        """Everything goes: it is run with replicas only."""

    def build(self, place: StagePlace, group: TensorGroup) -> StageLayers:  # noqa: ARG002
        count = self.values // _LAYERS
        return StageLayers(blocks=[Weight(f"weight{layer}", count, place.replica) for layer in place.layers])

    def make_loss(self, group: TensorGroup, scale: Callable[[], float]) -> Loss:  # noqa: ARG002
        return _no_loss

    def count(self, targets: Any) -> int:  # noqa: ARG002
        return 1


def _no_loss(y: Array, target: Any) -> tuple[float, Array]:  # noqa: ARG001
    return 0.0, np.ones_like(y)


@dataclass(slots=True, kw_only=True)
class _Trial:
    """One stage under way: seconds of backward pass with reduction and of the update, by step."""

    stage: ZeROStage
    coordinator: ThreeDParallelismCoordinator
    halves: list[tuple[float, float]] = field(default_factory=list)
    sent: int = 0

    async def step(self, comm: ap.Communicator) -> None:
        batch = [np.zeros(1, np.float32)]
        before = self._sent()
        await comm.barrier()
        began = time.perf_counter()
        await self.coordinator.backward_pass(batch, batch)
        reduced = time.perf_counter()
        await self.coordinator.optimizer_step(_RATE)
        self.halves.append((reduced - began, time.perf_counter() - reduced))
        self.sent = self._sent() - before

    async def figures(self, comm: ap.Communicator) -> dict[str, float | int]:
        """Return medians of the slowest rank, the most that a rank sent in a step and holds, and what is wrong."""
        halves = np.array(self.halves[_WARM_UP:])
        seconds = [statistics.median(times) for times in (halves.sum(axis=1), halves[:, 0], halves[:, 1])]
        held = self.coordinator.monitor.measures[-1].memory_used
        wrong = _count_wrong(self.coordinator, len(self.halves), comm.size)
        every = await comm.all_gather(np.array([*seconds, self.sent, held, wrong]))
        whole, reduction, update = every[every[:, 0].argmax(), :3].tolist()
        return {
            "seconds": whole,
            "reduction": reduction,
            "update": update,
            "sent": int(every[:, 3].max()),
            "held": int(every[:, 4].max()),
            "wrong": int(every[:, 5].sum()),
        }

    def _sent(self) -> int:
        groups = self.coordinator.groups
        return groups.world.traffic.payload_bytes + groups.dp.traffic.payload_bytes


async def measure_stages(node: Node, *, values: int, steps: int) -> None:
    """Measure all stages, which take their steps in turn; rank 0 prints a line for each."""
    async with AsyncExitStack() as stack:
        trials = []
        for stage in ZeROStage:
            coordinator = await stack.enter_async_context(await _make(node, stage, values))
            trials.append(_Trial(stage=stage, coordinator=coordinator))
        for _ in range(_WARM_UP + steps):
            for trial in trials:
                await trial.step(node.world)
        for trial in trials:
            figures = await trial.figures(node.world)
            if node.rank == 0:
                record = {"what": "zero", "lane": node.links.lane_kind(1), "stage": trial.stage, "values": values}
                sys.stdout.write(json.dumps(record | figures) + "\n")
                sys.stdout.flush()


async def _make(node: Node, stage: ZeROStage, values: int) -> ThreeDParallelismCoordinator:
    parallelism = ThreeDParallelismConfig(
        dp_size=node.world.size, num_layers=_LAYERS, memory_strategy=MemoryOptimizationStrategy.BASIC
    )
    config = HybridConfig(parallelism=parallelism, rule=_RULE, zero=ZeROConfig(stage=stage))
    world = node.world.subgroup(range(node.world.size), name=f"world of {stage}")
    assert world is not None, "it has all ranks"
    return await ThreeDParallelismCoordinator.create(config, WeightsModel(values=values), world)


def _count_wrong(coordinator: ThreeDParallelismCoordinator, steps: int, ranks: int) -> int:
    """Return how many of this rank's values are not, bit by bit, those of a weight of one value."""
    value = np.zeros(1, np.float32)
    gradient = np.full(1, (1 + ranks) / 2, np.float32)
    states = {name: np.zeros(1, np.float32) for name in _RULE.state_names}
    for step in range(1, steps + 1):
        _RULE.update(value, gradient, states, step=step, learning_rate=_RATE, decays=True)
    pieces = [piece for piece in coordinator.pieces() if piece.kind == VALUE]
    return sum(int(np.count_nonzero(piece.array != value)) for piece in pieces) + (not pieces)
