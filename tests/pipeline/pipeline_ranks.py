"""Program of the rank processes of test_killed_stage: train until the end, and print when and how it came."""

from __future__ import annotations

import json

import numpy as np

import asyncpar as ap
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.nn import Array, Initializer, Linear
from asyncpar.pipeline import PipelineSchedule
from asyncpar.pipeline.executor import PipelineExecutor

FEATURES = 100
MICRO_BATCHES = 4


def report(**values: object) -> None:
    print(json.dumps(values), flush=True)


def square(y: Array, target: Array) -> tuple[float, Array]:
    difference = y - target
    return 0.5 * float((difference * difference).sum()), difference


async def main() -> None:
    async with ap.init() as node:
        world = node.world
        schedule = PipelineSchedule(
            num_stages=world.size,
            num_microbatches=MICRO_BATCHES,
            schedule_type=PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD,
        )
        stage = Linear("layer", FEATURES, FEATURES, initializer=Initializer.from_seed(world.rank))
        worker = WorkerThread("test")
        executor = PipelineExecutor(schedule, [stage], communicator=world, compute=worker, loss=square)
        inputs = [np.full((300, FEATURES), float(number), np.float32) for number in range(MICRO_BATCHES)]
        try:
            for step in range(1_000_000_000):
                await executor.run(inputs, inputs)
                if step == 3:
                    report(ready=True)
        except ap.PeerLost as error:
            report(blamed=error.rank, text=str(error))
        finally:
            await executor.close()
            worker.close()


ap.run(main)
