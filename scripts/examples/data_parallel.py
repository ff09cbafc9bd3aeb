"""Data parallel training with uneven inputs: replicas stay equal, and ranks without samples left join in.

asyncpar launch --nproc-per-node 2 scripts/examples/data_parallel.py
asyncpar launch --nproc-per-node 2 scripts/examples/data_parallel.py --staleness 2
"""

import argparse

import numpy as np

import asyncpar as ap
from asyncpar.nn import Initializer, Linear, Mlp, Sequential
from asyncpar.parallel import DDPConfig, SynchronizationMode, create_distributed_data_parallel

FEATURES = 8
TRUTH = np.arange(1.0, FEATURES + 1.0)[:, np.newaxis] / FEATURES
ROWS = 32


def make_model() -> Sequential:
    initializer = Initializer.from_seed(0, "float64")
    return Sequential(
        [
            Mlp("mlp", FEATURES, 32, initializer=initializer),
            Linear("head", FEATURES, 1, initializer=initializer),
        ]
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, default=0, help="steps that a rank may be ahead (default: 0)")
    bound: int = parser.parse_args().staleness
    if bound < 0:
        parser.error(f"--staleness: expected 0 or more steps, got {bound}")
    model = make_model()
    mode = SynchronizationMode.BOUNDED_STALENESS(bound)
    config = DDPConfig(delay_all_reduce=False)  # gradients travel while others are computed
    async with await create_distributed_data_parallel(model, config=config, mode=mode) as ddp:

        def descend() -> None:
            for parameter in model.parameters():
                parameter.value -= 0.05 * parameter.grad

        for epoch in range(4):
            rng = np.random.default_rng((epoch, ddp.rank()))
            batches = 40 - 10 * ddp.rank() if ddp.rank() < 4 else 0
            async with ddp.join(on_shadow=descend):  # ranks without samples join in until all have none
                for _ in range(batches):
                    x = rng.normal(size=(ROWS, FEATURES))
                    ddp.zero_grad()
                    y, saved = await ddp.forward(x)
                    await ddp.backward(saved, (y - x @ TRUTH) / ROWS)
                    await ddp.update(descend)
            x = np.random.default_rng(1).normal(size=(200, FEATURES))
            loss = float(np.square(model.forward(x)[0] - x @ TRUTH).mean())
            group = ddp.runtime.get_group(ddp.process_group())
            every = await group.communicator.all_gather_object((batches, loss))
            if ddp.rank() == 0:
                told = ", ".join(f"{batches} batches: {loss:.6f}" for batches, loss in every)
                print(f"epoch {epoch}: loss on each rank after {told}")


ap.run(main)
