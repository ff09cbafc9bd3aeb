"""asyncpar in a program without an event loop: every call blocks.  Run it alone, or under `asyncpar launch`."""

import numpy as np

import asyncpar as ap
import asyncpar.blocking


class Counter(ap.Actor):
    def __init__(self) -> None:
        self.total = 0

    @ap.endpoint
    async def add(self, n: int) -> int:
        self.total += n
        return self.total


with asyncpar.blocking.init() as node:  # the loop of the node runs in a background thread
    comm = node.world
    x = np.full(1 << 20, comm.rank + 1, np.float32)
    comm.all_reduce(x, timeout=60)  # PeerTimeout names the rank that is missing

    pending = comm.start.all_gather(x[:2])  # returns at once: compute something meanwhile
    node.spawn(Counter, name="counter")
    rows = pending.wait()

    comm.barrier()
    neighbour = node.ref("counter", rank=(comm.rank + 1) % comm.size, actor_class=Counter)
    print(comm.rank, x[0], rows.shape, neighbour.add(3))  # an actor on another rank

    async def several() -> float:  # whatever has no blocking form runs on the node's loop
        results = await node.on_loop.world.all_reduce_many([np.ones(2), np.ones(3)])
        return float(results[1][0])

    assert node.run(several) == comm.size
