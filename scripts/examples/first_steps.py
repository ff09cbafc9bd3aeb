"""First steps: collectives, and an actor on another rank.  The README explains it."""

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
    async with ap.init() as node:  # alone: a world of one; under `asyncpar launch`: one rank of many
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
        print(comm.rank, x[0], y.shape, s.shape, await neighbour.add(3))  # an actor on another rank
        await comm.barrier()


ap.run(main)
