"""An actor that outlives its rank.  Runs alone and under `asyncpar launch --elastic ranks`; kill any rank meanwhile.

asyncpar launch --nproc-per-node 3 --elastic ranks --max-restarts 3 scripts/examples/elastic_actors.py
"""

import asyncio
import os
import sys

import numpy as np

import asyncpar as ap


class Tickets(ap.ElasticActor):
    """Gives out numbers, each once."""

    def __init__(self) -> None:
        self.given = 0

    def state(self) -> int:  # what it goes on from elsewhere
        return self.given

    def restore(self, state: int) -> None:
        self.given = state

    async def on_world(self, change: object) -> None:  # before the first message of each world
        print(f"tickets: {self.given} given; {change}", flush=True)

    @ap.endpoint
    async def draw(self) -> int:
        self.given += 1
        return self.given


async def main() -> None:
    if not all(word.isdecimal() for word in sys.argv[1:2]):
        sys.exit(f"elastic_actors: expected a number of steps, got {sys.argv[1]!r}")
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    weight = np.zeros(1000, np.float32)
    async with ap.elastic(portions=8) as job:
        # save_every=1: another rank knows of each draw before it is answered
        tickets = job.actors.declare("tickets", Tickets, save_every=1)
        state = job.state({"weight": weight})
        async for step in job.steps(state, until=steps):
            ticket = None
            async with step:
                for portion in step.portions:
                    step.add(portion, [np.ones_like(weight)])
                    await asyncio.sleep(0.02)
                weight += (await step.reduce("mean"))[0]
                if not step.is_replay:
                    ticket = await tickets.draw()  # wherever the actor lives now
            if ticket is not None:  # a step that is aborted comes again, what an actor did stays
                print(f"pid {os.getpid()}: step {step.number}, ticket {ticket}", flush=True)
        print(f"done: weight {weight[0]:g}", flush=True)


ap.run(main)
