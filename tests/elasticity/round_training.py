"""A small training program in rounds of DiLoCo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import asyncpar as ap
from asyncpar.elasticity.rounds import ElasticRound
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.parallel.local.outer import OuterConfig
from tests.elasticity.training import Model

WORKERS = 4
STEPS = 5


@dataclass
class RoundResult:
    """What a member comes to."""

    parameters: bytes = b""
    digest: bytes = b""
    losses: dict[int, float] = field(default_factory=dict)
    contributed: dict[int, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    attempts: int = 0
    is_drained: bool = False


async def train_rounds(
    source: WorldSource | None,
    name: str = "alone",
    *,
    until: int = 6,
    quorum: float = 1.0,
    grace: float = 0.5,
    pause: Callable[[str, ElasticRound, int], float] = lambda _name, _round, _portion: 0.01,
    counted: int = 0,
    outer: OuterConfig | None = None,
) -> RoundResult:
    """Train ``until`` rounds are committed; ``pause`` is the number of seconds of an inner step.

    ``counted`` is what this program adds to a value of the state in each round, as the program of another host.
    """
    model, result = Model(), RoundResult()
    async with ap.elastic(portions=WORKERS, seed=11, source=source) as job:
        state = job.state(model.parameters, model.optimizer, outer=outer or OuterConfig(), count=0)
        async for current in job.rounds(state, steps=STEPS, quorum=quorum, grace=grace, until=until):
            async with current:
                result.attempts += 1
                if counted:
                    state["count"] += counted
                for portion in current.portions:
                    with current.worker(portion) as worker:
                        for step in range(current.steps):
                            gradients, loss = model.backward(current.rng(portion, step))
                            for parameter in model.parameters:
                                parameter.grad = gradients[parameter.name]
                            worker.optimizer.step(0.003)
                            worker.loss += loss
                            await asyncio.sleep(pause(name, current, portion))
            if current.is_committed:
                result.losses[current.number] = current.loss
                result.contributed[current.number] = current.contributed
            if current.change is not None:
                result.changes.append(str(current.change))
        result.parameters = b"".join(parameter.value.tobytes() for parameter in model.parameters)
        result.digest = (await state.lineage()).digest
        result.is_drained = job.is_drained
    return result
