"""First steps: collectives, and an actor on another rank.  docs/start.md shows it."""

import asyncio

import numpy as np

import asyncpar as ap


class Counter(ap.Actor):
    def __init__(self) -> None:
        self.total = 0

    @ap.endpoint
    async def add(self, n: int) -> int:
        self.total += n
        return self.total


async def main() -> None:
    async with ap.init() as node:  # alone, or one rank of many under `asyncpar launch`
        comm = node.world  # Communicator over all ranks
        x = np.full(1 << 20, comm.rank, np.float32)
        await comm.all_reduce(x)  # in place, bit-identical on every rank
        y = await comm.all_gather(x[:4])  # shape (size, 4)
        s = await comm.reduce_scatter(x, op="max")  # this rank's slice along axis 0
        async with asyncio.timeout(5):  # every operation honours timeouts and cancellation
            await comm.broadcast(x, root=0)

        await node.spawn(Counter, name="counter")
        await comm.barrier()
        neighbour = node.ref("counter", rank=(comm.rank + 1) % comm.size)
        total = await neighbour.add(3)  # of an actor on another rank
        print(comm.rank, x[0], y.shape, s.shape, total)
        await comm.barrier()


ap.run(main)
