"""Layers whose parameters are sharded, too, and parameters in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.errors import UsageError
from asyncpar.multinode import MultiNodeTrainer
from asyncpar.nn import Array, Initializer, Linear, Parameter, Stage
from asyncpar.nn.half import HalfInitializer, stored_value
from asyncpar.nn.optimizers import Adam, Optimizer
from asyncpar.node import Node
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.multinode.worlds import TINY_BUCKETS, config_of, node_world, on_all

FEATURES = (5, 7, 3)
STEPS, MICRO_STEPS = 3, 2
STAGES = [ZeROStage.of(number) for number in range(4)]


class Net:
    """Two layers that learn to give back the sum of their input."""

    def __init__(self, initializer: Initializer) -> None:
        sizes = zip(("first", "second"), FEATURES[:-1], FEATURES[1:], strict=True)
        self.layers: tuple[Stage[Any], ...] = tuple(
            Linear(name, wide, narrow, initializer=initializer) for name, wide, narrow in sizes
        )
        self.parameters: list[Parameter] = [one for layer in self.layers for one in layer.parameters()]

    def train(self, *batch: int, ready: Callable[[str], None] | None = None) -> float:
        """Add the gradients of the mean loss of a micro-batch, and return the loss."""
        x: Array = np.random.default_rng(batch).normal(size=(4, FEATURES[0])).astype(self.parameters[0].dtype)
        hidden, first = self.layers[0].forward(x)
        y, second = self.layers[1].forward(np.tanh(hidden))
        difference = y - x.sum(axis=1, keepdims=True)
        scale = np.asarray(2.0 / difference.size, x.dtype)
        back = self.layers[1].backward(second, scale * difference, ready)
        assert back is not None
        self.layers[0].backward(first, back * (1.0 - np.tanh(hidden) ** 2), ready)
        return float((difference**2).mean())


def losses_alone(ranks: int) -> list[list[float]]:
    """Return the losses of each rank's batches, as one process computes them."""
    net = Net(Initializer.from_seed(3, "float64"))
    optimizer = Optimizer(net.parameters, Adam())
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        for rank in range(ranks):
            losses[rank] += [net.train(step, rank, micro) for micro in range(MICRO_STEPS)]
        optimizer.scale(1.0 / (ranks * MICRO_STEPS))
        optimizer.step(0.05)
        optimizer.zero_grad()
    return losses


async def losses_of(node: Node, nodes: int, devices: int, stage: ZeROStage, *, overlaps: bool) -> list[float]:
    """Return the losses of the batches of a rank of a world."""
    net = Net(Initializer.from_seed(3, "float64"))
    bridge = LoopBridge()
    worker = WorkerThread(f"rank {node.rank}", bridge)
    config = config_of(node.rank, nodes, devices, stage=stage, gradient_bucket_size_mb=TINY_BUCKETS)
    losses = []
    try:
        async with MultiNodeTrainer(config, Adam(), communicator=node.world) as trainer:
            net.layers = await trainer.register_layers(net.layers, bridge=bridge)
            for step in range(STEPS):
                batches = [(step, node.rank, micro) for micro in range(MICRO_STEPS)]
                for batch in batches[: MICRO_STEPS - overlaps]:
                    losses.append(await worker.run(net.train, *batch))
                    trainer.update_gradients()
                if overlaps:
                    async with trainer.synchronization() as ready:
                        losses.append(await worker.run(_train_last, net, batches[-1], ready))
                else:
                    await trainer.synchronize_gradients()
                await trainer.apply_gradients(MICRO_STEPS)
                await trainer.optimizer_step(0.05)
    finally:
        worker.close()
    return losses


def _train_last(net: Net, batch: tuple[int, int, int], ready: Callable[[str], None]) -> float:
    return net.train(*batch, ready=ready)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("stage", STAGES)
async def test_layers_train_as_in_one_process_in_all_stages(stage: ZeROStage, overlaps: bool) -> None:
    async with node_world(2, 2) as nodes:
        losses = await on_all(nodes, lambda node: losses_of(node, 2, 2, stage, overlaps=overlaps))
    np.testing.assert_allclose(losses, losses_alone(4), rtol=1e-12, atol=0)


async def test_parameters_are_away_between_passes_in_stage_3_only() -> None:
    for stage in STAGES:
        async with node_world(1, 2) as nodes:

            async def main(node: Node, stage: ZeROStage = stage) -> tuple[int, list[bool]]:
                net = Net(Initializer.from_seed(3, "float64"))
                config = config_of(node.rank, 1, 2, stage=stage)
                async with MultiNodeTrainer(config, Adam(), communicator=node.world) as trainer:
                    await trainer.register_layers(net.layers)
                    held = trainer.get_memory_usage().parameters
                    return held, [parameter.is_released for parameter in net.parameters]

            results = await on_all(nodes, main)
        values = 5 * 7 + 7 + 7 * 3 + 3
        is_away = stage is ZeROStage.STAGE3
        assert sum(held for held, _ in results) == (8 * values if is_away else 2 * 8 * values)
        assert all(released == [is_away] * 4 for _, released in results)


async def test_parameters_without_layers_are_refused_in_stage_3() -> None:
    async with node_world(1, 1) as [node]:
        config = config_of(0, 1, 1, stage=ZeROStage.STAGE3)
        async with MultiNodeTrainer(config, Adam(), communicator=node.world) as trainer:
            with pytest.raises(UsageError, match="stage 3 gathers parameters layer by layer; await register_layers"):
                await trainer.register_parameters([Parameter("weight", np.ones(3))])


@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
async def test_half_precision_trains_alike_on_all_ranks(storage: str, stage: ZeROStage) -> None:
    async def main(node: Node) -> tuple[bytes, list[float]]:
        net = Net(HalfInitializer.from_seed(3 + node.rank, storage=storage))
        config = config_of(node.rank, 2, 2, zero_config=ZeROConfig(stage=stage))
        losses = []
        async with MultiNodeTrainer(config, Adam(), communicator=node.world) as trainer:
            await trainer.register_parameters(net.parameters)
            for step in range(12):
                losses.append(net.train(0, node.rank, step % 2))
                trainer.update_gradients()
                await trainer.synchronize_gradients()
                await trainer.apply_gradients()
                await trainer.optimizer_step(0.02)
        return b"".join(stored_value(parameter).tobytes() for parameter in net.parameters), losses

    async with node_world(2, 2) as nodes:
        results = await on_all(nodes, main)
    assert len({bits for bits, _ in results}) == 1
    losses = np.array([losses for _, losses in results])
    assert losses[:, -2:].mean() < 0.7 * losses[:, :2].mean(), "it learns"
