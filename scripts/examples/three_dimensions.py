"""Train a transformer in three dimensions.

asyncpar launch --nproc-per-node 4 scripts/examples/three_dimensions.py
"""

import numpy as np

import asyncpar as ap
from asyncpar.hybrid import (
    HybridConfig,
    PipelineScheduleType,
    ThreeDParallelismConfig,
    ThreeDParallelismCoordinator,
    TransformerModel,
)
from asyncpar.nn import TransformerConfig
from asyncpar.nn.optimizers import AdamW
from asyncpar.zero import ZeROConfig, ZeROStage

MICRO_BATCHES, ROWS = 4, 8


async def main() -> None:
    async with ap.init() as node:
        stages = 2 if node.size % 2 == 0 else 1
        config = HybridConfig(
            parallelism=ThreeDParallelismConfig(
                dp_size=node.size // stages,
                pp_size=stages,
                num_layers=4,
                pipeline_schedule=PipelineScheduleType.ZBV,
            ),
            micro_batches=MICRO_BATCHES,
            rule=AdamW(weight_decay=0.1),
            clip_norm=1.0,
            zero=ZeROConfig(stage=ZeROStage.STAGE1),
        )
        shape = TransformerConfig(vocabulary=64, length=32, features=64, layers=4)
        model = TransformerModel(config=shape)
        create = ThreeDParallelismCoordinator.create
        async with await create(config, model, node.world) as coordinator:
            replica = coordinator.groups.mapping.dp_rank
            tokens = np.random.default_rng(replica).integers(0, 64, (ROWS, 33))
            inputs = np.array_split(tokens[:, :-1], MICRO_BATCHES)
            targets = np.array_split(tokens[:, 1:], MICRO_BATCHES)
            for step in range(20):
                result = await coordinator.train_step(inputs, targets, learning_rate=3e-3)
                if node.rank == 0 and step % 5 == 4:
                    norm = result.gradient_norm
                    print(f"step {step}: loss {result.loss:.3f}, gradient norm {norm:.2f}")


ap.run(main)
