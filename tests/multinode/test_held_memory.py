"""The memory that a trainer reports is what numpy gave it, in every stage, compressed or not, on one node or more."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.multinode import MultiNodeTrainer
from asyncpar.nn import Parameter
from asyncpar.nn.optimizers import Adam
from asyncpar.zero import ZeROStage
from tests.held import held_arrays
from tests.multinode.worlds import config_of, node_world, on_all
from tests.products import sampled

SHAPES = {"table": (256, 128), "weight": (128, 200), "bias": (4096,)}


async def train(trainer: MultiNodeTrainer) -> None:
    await trainer.initialize_environment()
    parameters = [Parameter(name, np.zeros(shape, np.float32)) for name, shape in SHAPES.items()]
    await trainer.register_parameters(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.accumulate(np.ones(parameter.shape, np.float32))
        trainer.update_gradients()
        await trainer.synchronize_gradients()
        await trainer.apply_gradients()
        await trainer.optimizer_step(0.1)


@pytest.mark.parametrize(
    ("stage", "nodes", "is_compressed"),
    sampled([ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE2], [(1, 3), (2, 2)], [False, True]),
)
async def test_all_that_is_held_is_told(stage: ZeROStage, nodes: tuple[int, int], is_compressed: bool) -> None:
    async with node_world(*nodes) as world:
        with held_arrays() as held:
            trainers = [
                MultiNodeTrainer(
                    config_of(
                        node.rank,
                        *nodes,
                        stage=stage,
                        gradient_compression=is_compressed,
                        gradient_bucket_size_mb=0.1,
                    ),
                    Adam(),
                    communicator=node.world,
                )
                for node in world
            ]
            await on_all(trainers, train)
        usages = [trainer.get_memory_usage() for trainer in trainers]
        assert sum(usage.total for usage in usages) == pytest.approx(held.nbytes, rel=0.02)
        compresses = is_compressed and nodes[0] > 1
        assert [usage.residuals > 0 for usage in usages] == [
            compresses and rank % nodes[1] == 0 for rank in range(len(usages))
        ]
        for trainer, usage in zip(trainers, usages, strict=True):
            assert trainer.get_training_stats().memory == usage
            assert usage.buffers > 0
