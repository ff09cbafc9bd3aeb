"""Gradients of 40,000 in float16 have a mean, although their sum is more than float16 holds, in all ways of adding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncpar.nn.optimizers import SGD
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.multinode.worlds import Member, Model, members, on_all

RATE = 2.0**-14
LARGE = 40_000.0


@pytest.mark.parametrize("compresses", [False, True])
@pytest.mark.parametrize("nodes", [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("stage", [ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE2])
async def test_the_mean_of_large_gradients_is_exact(stage: ZeROStage, nodes: tuple[int, int], compresses: bool) -> None:
    async def train(member: Member) -> None:
        trainer = member.trainer
        for parameter in member.model.parameters:
            parameter.accumulate(np.full(parameter.shape, LARGE, parameter.dtype))
        trainer.update_gradients()
        await trainer.synchronize_gradients()
        await trainer.apply_gradients()
        await trainer.optimizer_step(RATE)

    settings: dict[str, Any] = {"zero_config": ZeROConfig(stage=stage), "gradient_compression": compresses}
    async with members(*nodes, rule=SGD(), dtype="float16", seeds=lambda _: 5, **settings) as ranks:
        begun = Model(seed=5, dtype="float16").values()
        await on_all(ranks, train)
        for member in ranks:
            for name, value in member.model.values().items():
                np.testing.assert_allclose(value, begun[name] - np.float16(RATE * LARGE), rtol=2e-3, atol=0.02)
