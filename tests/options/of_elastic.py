"""Effects of the options of elastic jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import asyncpar as ap
from asyncpar.bootstrap import attach_alone
from asyncpar.elasticity.donors import SnapshotShelf
from asyncpar.elasticity.worlds import LoneWorld, Membership
from asyncpar.hosts.lineage import Decision, Lineage
from asyncpar.hosts.messages import WorldChange
from asyncpar.net.transport.serving import Serving
from tests.options.effects import effects


class LaterWorld(LoneWorld):
    """A world of one, with another number."""

    async def join(self, lineage: Lineage, shelf: SnapshotShelf, *, is_healed: bool) -> Membership:
        change, attach = WorldChange(generation=7), attach_alone(Serving(), None)
        return Membership(
            generation=7, rank=0, size=1, attach=attach, lineage=lineage, decision=Decision.ABORT, change=change
        )


async def one_step(**settings: Any) -> Sequence[Any]:
    """Return what one step of a job shows."""
    async with ap.ElasticJob(**{"portions": 2, **settings}) as job:
        state = job.state({"w": np.zeros(2)})
        async for step in job.steps(state, until=1):
            async with step:
                for portion in step.portions:
                    step.add(portion, [step.rng(portion).standard_normal(2)])
                total = (await step.reduce())[0]
                seen = [total.tolist(), step.generation]
    return seen


EFFECTS = [*effects("ElasticJob", one_step, seed=5, source=LaterWorld())]
