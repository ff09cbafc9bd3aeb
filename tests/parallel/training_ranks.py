"""Program of the rank processes of test_killed_replica: train until the end, and print when and how it came."""

from __future__ import annotations

import json
import sys

import numpy as np

import asyncpar as ap
from asyncpar.nn import Initializer, Linear
from asyncpar.parallel import DDPConfig, SynchronizationMode, create_distributed_data_parallel

FEATURES = 200


def report(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def main() -> None:
    bound = {"synchronous": 0, "asynchronous": None, "bounded": 2}[sys.argv[1]]
    model = Linear("layer", FEATURES, FEATURES, initializer=Initializer.from_seed(0))
    x = np.random.default_rng(0).normal(size=(4, FEATURES)).astype(np.float32)
    ddp = await create_distributed_data_parallel(
        model, mode=SynchronizationMode(bound), config=DDPConfig(delay_all_reduce=False)
    )
    try:
        for step in range(1_000_000_000):
            ddp.zero_grad()
            y, saved = await ddp.forward(x)
            await ddp.backward(saved, y)
            await ddp.update(lambda: np.subtract(model.weight.value, 1e-4, out=model.weight.value))
            if step == 3:
                report(ready=True)
    except ap.PeerLost as error:
        report(blamed=error.rank, operation=error.operation)
    finally:
        await ddp.close(failed=True)


ap.run(main)
