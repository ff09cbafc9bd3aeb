"""Program of the rank processes of test_processes: a driver on rank 0, and trainers that reduce among themselves."""

from __future__ import annotations

import json

import numpy as np

import asyncpar as ap


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


class Trainer(ap.Actor):
    """Reduces along both axes of its mesh in each step."""

    @ap.endpoint
    async def step(self, number: int) -> float:
        x = np.full(1000, float(number + self.rank))
        await self.group("tp").all_reduce(x)
        await self.group("dp").all_reduce(x)
        return float(x[0])


async def drive(node: ap.Node) -> None:
    trainers = await node.nodes.reshape(dp=2, tp=2).spawn(Trainer)
    for number in range(1_000_000_000):
        values = await trainers.all(Trainer.step)(number)
        assert list(values.values()) == [4.0 * number + 6.0] * 4
        if number == 20:
            say(ready=True)


def report(failure: ap.MeshError) -> None:
    """Say who failed, how, and because of whom."""
    kinds = [
        error.type_name if isinstance(error, ap.RemoteError) else f"{type(error).__module__}.{type(error).__name__}"
        for error in failure.exceptions
    ]
    ranks = [
        rank for rank in range(4) if rank not in failure.values.by_rank()
    ]  # an error may name the rank that caused it
    say(kinds=kinds, ranks=ranks, arrived=len(failure.values), notes=failure.exceptions[-1].__notes__)


async def main() -> None:
    async with ap.init() as node:
        try:
            if node.rank == 0:
                await drive(node)
            await node.world.barrier()
        except ap.MeshError as failure:
            report(failure)
        except ap.PeerLost as error:
            say(blamed=error.rank, cause=error.cause)


ap.run(main)
