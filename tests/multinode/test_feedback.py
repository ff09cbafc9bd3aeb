"""Compressed gradients have error feedback in every stage, on one node and on several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncpar.nn import Array, Parameter
from asyncpar.nn.optimizers import SGD
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.multinode.worlds import Member, Model, members, on_all
from tests.products import in_turn
from tests.soak import chosen

STAGES = [ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE2]
STEPS, RATE = chosen(15, soak=50), 0.1


def constant_gradient(parameter: Parameter, rank: int) -> Array:
    return np.asarray(np.random.default_rng([rank, *parameter.name.encode()]).normal(size=parameter.shape), np.float32)


async def train(member: Member) -> None:
    trainer = member.trainer
    for _ in range(STEPS):
        for parameter in member.model.parameters:
            parameter.accumulate(constant_gradient(parameter, member.rank))
        trainer.update_gradients()
        await trainer.synchronize_gradients()
        await trainer.apply_gradients()
        await trainer.optimizer_step(RATE)


@pytest.mark.parametrize(
    ("stage", "nodes", "asked"),
    in_turn(STAGES, [(1, 3), (2, 2), (3, 1)], ["gradient_compression", "zero_config.gradient_compression"]),
)
async def test_a_constant_gradient_drifts_no_further_in_many_steps_than_in_one(
    stage: ZeROStage, nodes: tuple[int, int], asked: str
) -> None:
    is_zero = asked == "zero_config.gradient_compression"
    zero = ZeROConfig(stage=stage, gradient_compression=is_zero)
    settings: dict[str, Any] = {"zero_config": zero, "gradient_compression": not is_zero}
    async with members(*nodes, rule=SGD(), dtype="float32", seeds=lambda _: 5, **settings) as ranks:
        await on_all(ranks, train)
        begun = Model(seed=5, dtype="float32").values()
        for name, value in ranks[0].model.values().items():
            parameter = Parameter(name, value)
            mean = np.mean([constant_gradient(parameter, member.rank) for member in ranks], axis=0, dtype=np.float64)
            np.testing.assert_allclose(value, begun[name] - STEPS * RATE * mean, atol=0.004)
            for member in ranks[1:]:
                np.testing.assert_array_equal(member.model.values()[name], value)
