"""Steps of the demo model in several layouts of the same ranks, by the rules of ``peers/model_rules.py``."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

import asyncpar as ap
from asyncpar.config.parallel import PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.hybrid import HybridConfig, PerformanceAnalysis, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import TransformerConfig
from asyncpar.nn.optimizers import AdamW
from asyncpar.node import Node
from asyncpar.zero import ZeROConfig, ZeROStage
from scripts.bench.peers import model_rules
from scripts.bench.peers.model_rules import Rules

ALONE = "alone"
_PART = re.compile(r"(dp|tp|pp|zero)(\d+)")


def config_of(layout: str, rules: Rules, micro_batches: int) -> HybridConfig:
    """Return the settings of a layout such as ``dp2xpp2`` or ``dp2-zero3``: micro-batches where there are stages."""
    parts = {name: int(count) for name, count in _PART.findall(layout)}
    sizes = {f"{name}_size": parts[name] for name in ("dp", "tp", "pp") if name in parts}
    return HybridConfig(
        parallelism=ThreeDParallelismConfig(
            **sizes,
            num_layers=rules.layers,
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


async def measure_layouts(node: Node, layouts: Sequence[str], rules: Rules, micro_batches: int) -> None:
    """Train in each layout, one after the other; rank 0 prints a line for each."""
    model = TransformerModel(config=transformer_of(rules))
    for layout in layouts:
        config = config_of(layout, rules, micro_batches)
        async with await ThreeDParallelismCoordinator.create(config, model, node.world) as coordinator:
            seconds, losses = await _train(coordinator, node.world, rules)
            analysis = await coordinator.get_performance_stats()
        if node.rank == 0:
            record = {"what": "train", "side": "asyncpar", "layout": layout, "lane": _lane(node)}
            record |= {"micro_batches": config.micro_batches, "seconds": seconds, "losses": losses}
            sys.stdout.write(json.dumps(record | shares(analysis)) + "\n")
            sys.stdout.flush()


def shares(analysis: PerformanceAnalysis) -> dict[str, float]:
    """Return the parts of a step that ranks, in the mean, compute, communicate, and wait for other stages."""
    ranks = analysis.ranks
    return {
        "computing": statistics.mean(one.compute_seconds / one.seconds for one in ranks),
        "communicating": statistics.mean(one.communication_share for one in ranks),
        "waiting": statistics.mean(1.0 - one.pipeline_utilization for one in ranks),
    }


async def _train(
    coordinator: ThreeDParallelismCoordinator, comm: ap.Communicator, rules: Rules
) -> tuple[float, list[float]]:
    """Return the median seconds of a step on the slowest rank, and all losses."""
    config, replica = coordinator.config, coordinator.groups.mapping.dp_rank
    seconds, losses = [], []
    for number in range(rules.total_steps):
        if number == model_rules.WARM_UP:
            coordinator.monitor.clear()
        await comm.barrier()
        began = time.perf_counter()
        batch = rules.batch(number, replica, config.parallelism.dp_size)
        tokens, targets = (np.array_split(part, config.micro_batches) for part in batch)
        result = await coordinator.train_step(tokens, targets, learning_rate=model_rules.LEARNING_RATE)
        seconds.append(time.perf_counter() - began)
        losses.append(result.loss)
    slowest = np.array([statistics.median(seconds[model_rules.WARM_UP :])])
    return float((await comm.all_reduce(slowest, "max"))[0]), losses


def _lane(node: Node) -> str:
    return node.links.lane_kind(1) if node.world.size > 1 else "none"
