"""Steps of the demo model in several layouts of the same ranks, by the rules of ``peers/model_rules.py``."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import asyncpar as ap
from asyncpar.core.config.parallel import MemoryOptimizationStrategy, PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.hybrid import HybridConfig, PerformanceAnalysis, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import TransformerConfig
from asyncpar.nn.optimizers import AdamW
from asyncpar.node import Node
from asyncpar.zero import ZeROConfig, ZeROStage
from scripts.bench.compare.comparison import OURS
from scripts.bench.peers import model_rules
from scripts.bench.peers.model_rules import Rules

ALONE = "alone"
_PART = re.compile(r"(dp|tp|pp|zero)(\d+)")


def config_of(layout: str, rules: Rules, micro_batches: int) -> HybridConfig:
    """Return the settings of a layout such as ``dp2xpp2`` or ``dp2-zero3``: micro-batches where there are stages.

    Nothing is recomputed, as nothing is by torch.
    """
    parts = {name: int(count) for name, count in _PART.findall(layout)}
    return HybridConfig(
        parallelism=ThreeDParallelismConfig(
            dp_size=parts.get("dp", 1),
            tp_size=parts.get("tp", 1),
            pp_size=parts.get("pp", 1),
            num_layers=rules.layers,
            memory_strategy=MemoryOptimizationStrategy.BASIC,
            pipeline_schedule=PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD,
        ),
        micro_batches=micro_batches if "pp" in parts else 1,
        rule=AdamW(
            beta1=model_rules.BETAS[0], beta2=model_rules.BETAS[1], epsilon=model_rules.EPSILON, weight_decay=0.0
        ),
        zero=ZeROConfig(stage=ZeROStage.of(parts.get("zero", 0))),
    )


def transformer_of(rules: Rules) -> TransformerConfig:
    """Return the shape of the demo model."""
    return TransformerConfig(
        vocabulary=model_rules.VOCABULARY,
        length=rules.length,
        features=rules.features,
        layers=rules.layers,
        heads=rules.heads,
    )


@dataclass(slots=True, kw_only=True)
class _Trial:
    """One layout under way."""

    layout: str
    coordinator: ThreeDParallelismCoordinator
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    async def step(self, comm: ap.Communicator, rules: Rules, number: int) -> None:
        coordinator, config = self.coordinator, self.coordinator.config
        if number == model_rules.WARM_UP:
            coordinator.monitor.clear()
        await comm.barrier()
        began = time.perf_counter()
        batch = rules.batch(number, coordinator.groups.mapping.dp_rank, config.parallelism.dp_size)
        tokens, targets = (np.array_split(part, config.micro_batches) for part in batch)
        result = await coordinator.train_step(tokens, targets, learning_rate=model_rules.LEARNING_RATE)
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(result.loss)

    async def figures(self, comm: ap.Communicator) -> dict[str, Any]:
        """Return the median of a step on the slowest rank, and what it is made of."""
        slowest = np.array([statistics.median(self.seconds[model_rules.WARM_UP :])])
        await comm.all_reduce(slowest, "max")
        parts = shares(await self.coordinator.get_performance_stats())
        return {
            "layout": self.layout,
            "micro_batches": self.coordinator.config.micro_batches,
            "seconds": float(slowest[0]),
            "losses": self.losses,
            **parts,
        }


async def measure_layouts(node: Node, layouts: Sequence[str], rules: Rules, micro_batches: int) -> None:
    """Train in all layouts, which take their steps in turn; rank 0 prints a line for each."""
    model, size = TransformerModel(config=transformer_of(rules)), node.world.size
    async with AsyncExitStack() as stack:
        trials = []
        for layout in layouts:
            world = node.world.subgroup(range(size), name=f"world of {layout}")
            assert world is not None, "it has all ranks"
            config = config_of(layout, rules, micro_batches)
            made = await ThreeDParallelismCoordinator.create(config, model, world)
            trials.append(_Trial(layout=layout, coordinator=await stack.enter_async_context(made)))
        for number in range(rules.total_steps):
            for trial in trials:
                await trial.step(node.world, rules, number)
        lane = node.links.lane_kind(1) if size > 1 else "none"
        for trial in trials:
            figures = await trial.figures(node.world)
            if node.rank == 0:
                sys.stdout.write(json.dumps({"what": "train", "side": OURS, "lane": lane} | figures) + "\n")
                sys.stdout.flush()


def shares(analysis: PerformanceAnalysis) -> dict[str, float]:
    """Return the parts of a step that ranks, in the mean, compute, communicate, and wait for other stages."""
    ranks = analysis.ranks
    return {
        "computing": statistics.mean(one.compute_seconds / one.seconds for one in ranks),
        "communicating": statistics.mean(one.communication_share for one in ranks),
        "waiting": statistics.mean(1.0 - one.pipeline_utilization for one in ranks),
    }
