"""Ranks whose synchronizers have other settings: all of them hear of it in the first step, with both ranks named."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.core.config.placement import Placement, Replication
from asyncpar.errors import AsyncparError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer, NonFinitePolicy
from asyncpar.nn import Array
from asyncpar.node import Node
from asyncpar.testing.world import local_world

SECONDS = 30.0


@dataclass
class Tensor:
    grad: Array
    name: str = "norm"
    placement: Placement = field(default_factory=lambda: Placement(replicated=Replication.WHOLE))


SIZES = {"dp_size": 2, "tp_size": 2}
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "order": ({"order": "dp-tp-pp"}, {}),
    "another layout": ({"dp_size": 1, "tp_size": 4}, {}),
    "data parallelism only": ({"dp_size": 4, "tp_size": 1}, {}),
    "stages": ({"tp_size": 1, "pp_size": 2}, {}),
    "strategy": ({"comm_strategy": CommunicationStrategy.RING_ALL_REDUCE}, {}),
    "codec": ({}, {"compression": GradientCompressionConfig(codec="int8")}),
    "chosen codec": ({}, {"compression": GradientCompressionConfig(codec="auto")}),
    "feedback": ({}, {"compression": GradientCompressionConfig(error_feedback=False)}),
    "buckets": ({}, {"bucketing": GradientBucketingConfig(bucket_size_mb=1.0)}),
    "policy": ({}, {"when_not_finite": NonFinitePolicy.SKIP_STEP}),
}


@pytest.mark.parametrize("culprits", [(3,), (1, 3)], ids=["one rank", "all of one slice"])
@pytest.mark.parametrize("difference", DIFFERENCES)
async def test_all_ranks_hear_of_settings_that_differ(difference: str, culprits: tuple[int, ...]) -> None:
    layout, settings = DIFFERENCES[difference]

    async def step(node: Node) -> None:
        is_odd = node.rank in culprits
        config = ThreeDParallelismConfig(**(SIZES | (layout if is_odd else {})))
        synchronizer = GradientSynchronizer(
            config, RankMapping(config, node.rank), communicator=node.world, **(settings if is_odd else {})
        )
        async with synchronizer.step([Tensor(np.ones(8, np.float32))]):
            pass

    async with local_world(4) as nodes, asyncio.timeout(SECONDS):
        errors = await asyncio.gather(*map(step, nodes), return_exceptions=True)
    for rank, error in enumerate(errors):
        assert isinstance(error, AsyncparError), f"rank {rank}: {error!r}"
        assert f"rank {culprits[0]}" in str(error), f"rank {rank}: {error}"
        assert "rank 0" in str(error), f"rank {rank}: {error}"
