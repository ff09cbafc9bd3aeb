"""One rank of a job that trains a tiny model; rank 0 prints what came of it as one line of JSON.

Arguments: dp, tp, pp, the stage of ZeRO, the schedule, steps.
"""

from __future__ import annotations

import json
import sys

import asyncpar as ap
from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.hybrid import HybridConfig, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import TransformerConfig
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.worlds import make_config, train_step

MODEL = TransformerConfig(
    vocabulary=13, length=6, features=8, layers=8, heads=8, dtype="float64", tied_embeddings=True, mlp_hidden=29
)
ROWS = 16


def make(dp: int, tp: int, pp: int, stage: ZeROStage, schedule: PipelineScheduleType) -> HybridConfig:
    """Return the settings of the job."""
    zero = ZeROConfig(stage=stage)
    return make_config(
        dp, tp, pp, layers=MODEL.layers, micro_batches=2, zero=zero, pipeline_schedule=schedule, clip_norm=0.3
    )


async def main() -> None:
    dp, tp, pp, stage, schedule, steps = sys.argv[1:]
    config = make(int(dp), int(tp), int(pp), ZeROStage(stage), PipelineScheduleType(schedule))
    async with ap.init() as node:
        made = await ThreeDParallelismCoordinator.create(config, TransformerModel(config=MODEL), node.world)
        async with made as coordinator:
            results = [await train_step(coordinator, MODEL, step, rows=ROWS) for step in range(int(steps))]
        every = await node.world.all_gather_object([one.loss for one in results])
        if node.rank == 0:
            losses, norms = [one.loss for one in results], [one.gradient_norm for one in results]
            print(json.dumps({"losses": losses, "norms": norms, "agree": all(one == losses for one in every)}))


if __name__ == "__main__":
    ap.run(main)
