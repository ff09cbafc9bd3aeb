"""Ranks whose synchronizers have other settings: all of them learn it in the first step, with both ranks named."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.core.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.core.config.placement import Placement, Replication
from asyncpar.errors import AsyncparError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer, NonFinitePolicy
from asyncpar.nn import Array
from asyncpar.node import Node
from asyncpar.testing.loop import run_virtual
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
    "limit": ({"communication_timeout_ms": 9_000}, {}),
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


NONE = "no communication_timeout_ms but the timeout of its communicator, 300 s"


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ((2_000, 9_000, 2_000), ("communication_timeout_ms 2000", "communication_timeout_ms 9000")),
        ((None, 2_000, None), (NONE, "communication_timeout_ms 2000")),
        ((2_000, None, None), ("communication_timeout_ms 2000", NONE)),
    ],
)
def test_limits_that_differ_are_both_named_at_once_and_in_every_step(
    limits: tuple[int | None, ...], named: tuple[str, str]
) -> None:
    async def steps(node: Node) -> list[SettingsDiffer]:
        limit = limits[node.rank]
        given: dict[str, Any] = {} if limit is None else {"communication_timeout_ms": limit}
        config = ThreeDParallelismConfig(dp_size=3, **given)
        synchronizer = GradientSynchronizer(config, RankMapping(config, node.rank), communicator=node.world)
        errors = []
        for _ in range(2):
            with pytest.raises(SettingsDiffer) as caught:
                await synchronizer.synchronize_gradients({"w": np.ones(8, np.float32)})
            errors.append(caught.value)
        return errors

    async def main() -> tuple[list[list[SettingsDiffer]], float]:
        async with local_world(3, transport="inproc") as nodes:
            begun = asyncio.get_running_loop().time()
            errors = await asyncio.gather(*map(steps, nodes))
            return errors, asyncio.get_running_loop().time() - begun

    errors, waited = run_virtual(main())
    for error in (error for of_rank in errors for error in of_rank):
        assert f"where rank 0 has {named[0]}, rank 1 has {named[1]}" in str(error)
    assert waited < 1.0


def test_a_limit_that_is_the_timeout_of_the_communicator_agrees_with_none() -> None:
    async def step(node: Node) -> float:
        given: dict[str, Any] = {"communication_timeout_ms": 300_000} if node.rank == 1 else {}
        config = ThreeDParallelismConfig(dp_size=2, **given)
        synchronizer = GradientSynchronizer(config, RankMapping(config, node.rank), communicator=node.world)
        gradient = np.full(8, node.rank, np.float32)
        for _ in range(2):
            await synchronizer.synchronize_gradients({"w": gradient})
        return float(gradient[0])

    async def main() -> list[float]:
        async with local_world(2, transport="inproc") as nodes:
            return list(await asyncio.gather(*map(step, nodes)))

    assert run_virtual(main()) == [0.5, 0.5]
