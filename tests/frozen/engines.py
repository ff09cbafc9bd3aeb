"""The ways to train a small model over ranks, to compare what they make of frozen layers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.core.config.names import Name
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from asyncpar.multinode import MultiNodeConfig, MultiNodeTrainer
from asyncpar.nn import Array, Initializer, LayerNorm, Linear, OnGradient, Parameter, Sequential, Stage
from asyncpar.nn.optimizers import EarlyStep, Optimizer, Rule
from asyncpar.node import Node
from asyncpar.parallel import DDPConfig
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeroEngine, ZeROStage
from tests.parallel.replicas import open_replica

SIZE = 2
RATE = 0.05
NAMES = ("one", "norm", "two", "three")
PATIENCE = 60.0


class Net:
    """Layers of which some are ``constant``: no parameters of the model at all."""

    def __init__(self, constant: frozenset[str] = frozenset(), dtype: str = "float64") -> None:
        make = Initializer.from_seed(3, dtype)
        self._dtype = dtype
        self.layers: list[Stage[Any]] = [
            Linear("one", 6, 9, initializer=make),
            LayerNorm("norm", 9, initializer=make),
            Linear("two", 9, 5, initializer=make),
            Linear("three", 5, 4, initializer=make),
        ]
        self._known = {
            parameter.name
            for name, layer in zip(NAMES, self.layers, strict=True)
            for parameter in layer.parameters()
            if name not in constant
        }
        self._all = Sequential(self.layers)
        self.model: Stage[Any] = self._all

    def shard(self, shard: Callable[[Stage[Any]], Stage[Any]]) -> None:
        """Compute with what ``shard`` returns for each layer with parameters of the model."""
        self.model = Sequential([shard(one) if self._has(one) else one for one in self.layers])

    def _has(self, layer: Stage[Any]) -> bool:
        return any(parameter.name in self._known for parameter in layer.parameters())

    def forward(self, x: Any) -> tuple[Array, Any]:
        return self.model.forward(x)

    def backward(self, saved: Any, dy: Array, on_gradient: OnGradient | None = None) -> Array | None:
        def report(name: str) -> None:
            if on_gradient is not None and name in self._known:
                on_gradient(name)

        return self.model.backward(saved, dy, report)

    def parameters(self) -> Sequence[Parameter]:
        return [parameter for parameter in self._all.parameters() if parameter.name in self._known]

    def zero_grad(self) -> None:
        self._all.zero_grad()

    def freeze(self, layers: frozenset[str]) -> None:
        """Freeze ``layers``, and no others."""
        for name, layer in zip(NAMES, self.layers, strict=True):
            for parameter in layer.parameters():
                parameter.requires_grad = name not in layers

    def compute(self, rank: int, step: int, on_gradient: OnGradient | None = None) -> None:
        """Make a forward and a backward pass over this rank's batch of a step."""
        x = np.random.default_rng([rank, step]).normal(size=(3, 6)).astype(self._dtype)
        y, saved = self.forward(x)
        self.backward(saved, y / y.size, on_gradient)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``frozen`` says which layers are frozen in a step, ``constant`` which are no parameters of the model."""

    rule: Rule
    frozen: Callable[[int], frozenset[str]] = lambda _: frozenset()
    constant: frozenset[str] = frozenset()
    steps: int = 4
    size: int = SIZE
    frozen_of: Callable[[int, int], frozenset[str]] | None = None
    """What is frozen by rank and step, where ranks differ."""

    def freeze(self, net: Net, rank: int, step: int) -> None:
        """Set what is frozen on a rank in a step."""
        net.freeze(self.frozen(step) if self.frozen_of is None else self.frozen_of(rank, step))


Values: TypeAlias = "dict[str, Array]"
Engine: TypeAlias = Callable[[Plan], Coroutine[Any, Any, list[Values]]]
"""Trains by a plan, and returns values by parameter, and norms of gradients where there are any, for each rank."""


def values_of(net: Net, norms: Sequence[float] = ()) -> Values:
    """Return copies of the values."""
    return {parameter.name: parameter.value.copy() for parameter in net.parameters()} | {"norms": np.array(norms)}


def train_alone(plan: Plan) -> Values:
    """Train on the batches of all ranks in one process."""
    net, norms = Net(plan.constant), []
    optimizer = Optimizer(net.parameters(), plan.rule)
    for step in range(plan.steps):
        plan.freeze(net, 0, step)
        net.zero_grad()
        for rank in range(plan.size):
            net.compute(rank, step)
        optimizer.scale(1.0 / plan.size)
        norms.append(math.sqrt(optimizer.squared_norm()))
        optimizer.step(RATE)
    return values_of(net, norms)


async def _on_all(plan: Plan, main: Callable[[Node], Coroutine[Any, Any, Values]], **world: Any) -> list[Values]:
    async with local_world(plan.size, **world) as nodes, asyncio.timeout(PATIENCE):
        results = await asyncio.gather(*map(main, nodes), return_exceptions=True)
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:
        raise ExceptionGroup("ranks failed", errors)
    return [result for result in results if not isinstance(result, BaseException)]


def synchronized(codec: str = "none", *, early: bool = False, views: bool = False, micro_steps: int = 1) -> Engine:
    """Return the engine of a ``GradientSynchronizer`` and an ``Optimizer``."""

    async def train(plan: Plan) -> list[Values]:
        async def main(node: Node) -> Values:
            net, norms = Net(plan.constant), []
            optimizer = Optimizer(net.parameters(), plan.rule)
            synchronizer = GradientSynchronizer.data_parallel(
                node.world,
                compression=None if codec == "none" else GradientCompressionConfig(codec=Name(codec)),
                bucketing=GradientBucketingConfig(bucket_size_mb=0.0002, max_buckets=64, gradient_as_bucket_view=views),
            )
            for step in range(plan.steps):
                plan.freeze(net, node.rank, step)
                net.zero_grad()
                for _ in range(micro_steps - 1):
                    net.compute(node.rank, step)
                    synchronizer.accumulate(net)
                update = EarlyStep(optimizer, RATE) if early else None
                async with synchronizer.step(net.parameters(), update=update) as current:
                    net.compute(node.rank, step, current.ready)
                norms.append(math.sqrt(optimizer.squared_norm()))
                if update is None:
                    optimizer.step(RATE)
            return values_of(net, norms)

        return await _on_all(plan, main)

    return train


def ddp(**settings: Any) -> Engine:
    """Return the engine of ``DistributedDataParallel``."""

    async def train(plan: Plan) -> list[Values]:
        async def main(node: Node) -> Values:
            net = Net(plan.constant)
            optimizer = Optimizer(net.parameters(), plan.rule)
            async with open_replica(node, net, config=DDPConfig(**settings)) as replica:
                for step in range(plan.steps):
                    plan.freeze(net, node.rank, step)
                    replica.zero_grad()
                    y, saved = await replica.forward(np.random.default_rng([node.rank, step]).normal(size=(3, 6)))
                    await replica.backward(saved, y / y.size)
                    optimizer.step(RATE)
                return values_of(net)

        return await _on_all(plan, main)

    return train


def zero(stage: ZeROStage, *, dtype: str = "float64", **settings: Any) -> Engine:
    """Return the engine of ``ZeroEngine``."""

    async def train(plan: Plan) -> list[Values]:
        async def main(node: Node) -> Values:
            net, norms, bridge = Net(plan.constant, dtype), [], LoopBridge()
            config = ZeROConfig(stage=stage, **settings)
            engine = ZeroEngine(net.parameters(), plan.rule, config, node.world, bridge=bridge)
            net.shard(engine.shard)
            worker = WorkerThread(f"rank {node.rank}", bridge)
            try:
                await engine.prepare()
                for step in range(plan.steps):
                    plan.freeze(net, node.rank, step)
                    engine.zero_grad()
                    await worker.run(net.compute, node.rank, step, engine.ready)
                    await engine.reduce()
                    norms.append(await engine.global_norm())
                    await engine.step(RATE)
                if stage.shards_parameters:
                    await engine.gather()
                return values_of(net, norms)
            finally:
                worker.close()

        return await _on_all(plan, main)

    return train


def multinode(stage: ZeROStage, **settings: Any) -> Engine:
    """Return the engine of ``MultiNodeTrainer`` over nodes of one rank."""

    async def train(plan: Plan) -> list[Values]:
        async def main(node: Node) -> Values:
            net, norms = Net(plan.constant), []
            config = MultiNodeConfig.of_rank(plan.size, 1, node.rank, zero_config=ZeROConfig(stage=stage), **settings)
            async with MultiNodeTrainer(config, plan.rule, communicator=node.world) as trainer:
                await trainer.register_parameters(net.parameters())
                for step in range(plan.steps):
                    plan.freeze(net, node.rank, step)
                    net.compute(node.rank, step)
                    trainer.update_gradients()
                    await trainer.synchronize_gradients()
                    await trainer.apply_gradients()
                    norms.append(await trainer.optimizer_step(RATE))
                return values_of(net, norms)

        return await _on_all(plan, main, hosts=[f"host{rank}" for rank in range(plan.size)])

    return train


ENGINES: dict[str, Engine] = {
    "synchronizer": synchronized(),
    "synchronizer, early update": synchronized(early=True),
    "synchronizer, views": synchronized(views=True),
    "synchronizer, micro-steps": synchronized(micro_steps=3),
    "ddp": ddp(),
    "ddp, unused parameters": ddp(find_unused_parameters=True),
    "ddp, views": ddp(gradient_as_bucket_view=True),
    **{f"zero {stage}": zero(stage) for stage in ZeROStage},
    "zero 1, small buckets": zero(ZeROStage.STAGE1, bucket_size_mb=0.0002),
    "zero 2, small buckets": zero(ZeROStage.STAGE2, bucket_size_mb=0.0002),
    "multi-node 0": multinode(ZeROStage.NONE),
    "multi-node 1": multinode(ZeROStage.STAGE1),
    "multi-node 2": multinode(ZeROStage.STAGE2),
}
