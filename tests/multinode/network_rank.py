"""Rank of test_network: trains a model on its batches, in several ways, and prints the results.

network_rank.py NODES DEVICES REPORTS
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import asyncpar as ap
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.multinode import MultiNodeConfig, MultiNodeTrainer
from asyncpar.nn import Array, Initializer, Linear, Parameter
from asyncpar.nn.optimizers import AdamW
from asyncpar.zero import ZeROConfig, ZeROStage

FEATURES, ROWS, STEPS, MICRO_STEPS = 160, 4, 3, 2
RULE = AdamW(weight_decay=0.01)
RATE = 0.01

WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "replicated": MappingProxyType({"zero_config": ZeROConfig(stage=ZeROStage.NONE)}),
        "sharded": MappingProxyType({"zero_config": ZeROConfig(stage=ZeROStage.STAGE2)}),
        "compressed": MappingProxyType({"zero_config": ZeROConfig(stage=ZeROStage.NONE), "gradient_compression": True}),
    }
)


class Model:
    """Two layers that learn to give back the mean of their input."""

    def __init__(self) -> None:
        initializer = Initializer.from_seed(3, "float64")
        self.layers = [Linear(name, FEATURES, FEATURES, initializer=initializer) for name in ("first", "second")]
        self.parameters: list[Parameter] = [one for layer in self.layers for one in layer.parameters()]

    def train(self, *batch: int, ready: Any = None) -> float:
        """Add the gradients of the mean loss of a micro-batch, and return the loss."""
        x: Array = np.random.default_rng(batch).normal(size=(ROWS, FEATURES))
        hidden, first = self.layers[0].forward(x)
        y, second = self.layers[1].forward(np.tanh(hidden))
        difference = y - x.mean(axis=1, keepdims=True)
        back = self.layers[1].backward(second, 2.0 / difference.size * difference, ready)
        assert back is not None
        self.layers[0].backward(first, back * (1.0 - np.tanh(hidden) ** 2), ready)
        return float((difference**2).mean())

    def digest(self) -> str:
        """Return a hash of all bits of all parameters."""
        return hashlib.sha256(b"".join(one.value.tobytes() for one in self.parameters)).hexdigest()


def bytes_left() -> int:
    """Return what this host has sent over the wire between hosts."""
    with open("/proc/net/dev") as table:
        return sum(int(line.split(":")[1].split()[8]) for line in table if line.lstrip().startswith("link"))


async def train(trainer: MultiNodeTrainer, worker: WorkerThread) -> dict[str, Any]:
    """Train a new model, and report."""
    model, rank = Model(), trainer.config.global_rank
    await trainer.register_parameters(model.parameters)
    await trainer.barrier()
    before = bytes_left()
    losses = []
    for step in range(STEPS):
        batches = [(step, rank, micro) for micro in range(MICRO_STEPS)]
        total = 0.0
        for batch in batches[:-1]:
            total += await worker.run(model.train, *batch)
            trainer.update_gradients()
        async with trainer.synchronization() as ready:
            total += await worker.run(partial(model.train, *batches[-1], ready=ready))
        await trainer.apply_gradients(MICRO_STEPS)
        await trainer.optimizer_step(RATE)
        losses.append(total / MICRO_STEPS)
    await trainer.barrier()
    values = {parameter.name: parameter.value.ravel()[:3].tolist() for parameter in model.parameters}
    return {"losses": losses, "digest": model.digest(), "values": values, "left": bytes_left() - before}


async def main() -> None:
    nodes, devices = int(sys.argv[1]), int(sys.argv[2])
    place = MultiNodeConfig.new(nodes, devices, int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"]))
    worker = WorkerThread("compute")
    async with MultiNodeTrainer(place, RULE, name="outer") as outer:  # opens the world
        world = outer.groups.world
        reports = {}
        for name, settings in WAYS.items():
            async with MultiNodeTrainer(replace(place, **settings), RULE, communicator=world, name=name) as trainer:
                reports[name] = await train(trainer, worker)
        Path(sys.argv[3], f"{world.rank}.json").write_text(json.dumps(reports))
        await outer.barrier()
    worker.close()


if __name__ == "__main__":
    ap.run(main)
