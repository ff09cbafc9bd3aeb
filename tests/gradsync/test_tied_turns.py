"""Both ends of a pipeline come to their tied tensors in one order, also where they reduce one bucket at a time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.core.config.placement import Placement
from asyncpar.gradsync import GradientBucketingConfig, GradientSynchronizer
from asyncpar.node import Node
from asyncpar.testing.world import local_world

TIES = ("positions", "tokens", "types")


class Gradient:
    """A parameter of the user's own, tied or not."""

    def __init__(self, name: str, tied: str | None, value: float) -> None:
        self.name = name
        self.placement = Placement(tied=tied)
        self.grad = np.full(300, value, np.float32)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 1, 2), (2, 1, 2), (2, 2, 2), (1, 1, 3)])
async def test_tied_tensors_may_be_registered_in_any_order(dp: int, tp: int, pp: int, overlaps: bool) -> None:
    config = ThreeDParallelismConfig(dp_size=dp, tp_size=tp, pp_size=pp)
    bucketing = GradientBucketingConfig(bucket_size_mb=0.0005, max_buckets=64, overlap_communication=overlaps)

    async def main(node: Node) -> None:
        mapping = RankMapping(config, node.rank)
        stage, place = mapping.pp_rank, f"stage{mapping.pp_rank}"
        ties = TIES[::-1] if stage == 0 else TIES
        tied = [Gradient(f"{place}/{tie}", tie, TIES.index(tie) + 1.0) for tie in ties]
        own = [Gradient(f"{place}/weight{index}", None, 5.0) for index in range(2)]
        is_end = stage in (0, pp - 1)
        gradients = [own[0], *(tied if is_end else []), own[1]]
        synchronizer = GradientSynchronizer(config, mapping, communicator=node.world, bucketing=bucketing)
        for _ in range(2):  # the second in observed order
            for gradient in gradients:
                gradient.grad[:] = 5.0 if gradient.placement.tied is None else TIES.index(gradient.placement.tied) + 1.0
            async with synchronizer.step(gradients) as step:
                for gradient in gradients:
                    step.ready(gradient.name)
            for gradient in gradients:
                tie = gradient.placement.tied
                assert (gradient.grad == (5.0 if tie is None else 2.0 * (TIES.index(tie) + 1.0))).all()

    async with local_world(config.world_size) as nodes, asyncio.timeout(30):
        await asyncio.gather(*map(main, nodes))
