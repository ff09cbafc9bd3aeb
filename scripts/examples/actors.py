"""Actors: ask, tell, stream, watch, supervise.  Runs alone and under `asyncpar launch`; the README explains it."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np

import asyncpar as ap


class Sensor(ap.Actor):
    """Measures; breaks when it is told to."""

    def __init__(self, offset: float) -> None:
        self.offset = offset

    @ap.endpoint
    async def measure(self, count: int) -> AsyncIterator[np.ndarray]:  # a stream, at the caller's pace
        for n in range(count):
            yield np.full(4, self.offset + n)

    @ap.endpoint(concurrency=8)
    async def read(self) -> float:  # answered beside everything else
        return self.offset

    @ap.endpoint
    def calibrate(self, samples: np.ndarray) -> float:  # plain def: runs in a thread, never on the loop
        return float(np.median(samples)) - self.offset

    @ap.endpoint
    async def shake(self) -> None:
        raise RuntimeError("a cable came off")


async def main() -> None:
    async with ap.init() as node:
        sensors = [ap.Child(Sensor, float(index), name=f"sensor-{index}") for index in range(2)]
        await node.spawn(ap.Supervisor, sensors, strategy="one_for_one", name="sensors")
        await node.world.barrier()

        neighbour = node.ref("sensor-1", rank=(node.rank + 1) % node.size, actor_class=Sensor)
        total = 0.0
        async for sample in neighbour.measure.stream(3):
            total += float(sample.sum())
        async with asyncio.timeout(5):  # the endpoint sees this deadline, too
            drift = await neighbour.calibrate(np.arange(9.0))
        print(node.rank, total, drift, await neighbour.read())
        await node.world.barrier()

        own = node.ref("sensor-1", actor_class=Sensor)
        watch = node.watch(own)
        own.shake.tell()  # no caller waits for an answer, so this failure is the supervisor's business
        print(node.rank, (await watch).reason)
        while True:  # until it is restarted under the same name, asks raise ActorDown
            try:
                print(node.rank, "back with", await own.read())
                break
            except ap.ActorDown:
                await asyncio.sleep(0.01)
        await node.world.barrier()


ap.run(main)
