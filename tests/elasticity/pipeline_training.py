"""A small model of three stages, with dropout, that is trained as a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

import asyncpar as ap
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.nn.dropout import Dropout
from asyncpar.nn.linear import Linear
from asyncpar.nn.optimizers import Adam, Optimizer
from asyncpar.nn.parameter import Initializer
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import Stage
from tests.elasticity.training import Result, Trace

PORTIONS = 8


def make_stages(count: int = 3) -> list[Stage[Any]]:
    """Return the stages of the model."""
    init = Initializer.from_seed(3)
    first = [Sequential([Linear("in", 6, 16, initializer=init), Dropout("drop", 0.1, seed=1)])]
    middle = [Linear(f"middle{n}", 16, 16, initializer=init) for n in range(count - 2)]
    return [*first, *middle, Linear("out", 16, 4, initializer=init)]


def squares(output: Any, target: Any) -> tuple[float, Any]:
    """Return the sum of squared errors, and its gradient."""
    error = output - target
    return float((error.astype(np.float64) ** 2).sum()), 2 * error


async def train_pipeline(
    source: WorldSource | None,
    name: str = "alone",
    *,
    until: int = 8,
    trace: Trace | None = None,
    on_step: Callable[[str, ElasticStep], None] | None = None,
    stages: int = 3,
    clip_norm: float | None = None,
    pause: float = 0.02,
) -> Result:
    """Train ``until`` steps are committed, and return what came out."""
    trace = Trace() if trace is None else trace
    model, result, values = make_stages(stages), Result(), b""
    parameters = [parameter for stage in model for parameter in stage.parameters()]
    optimizer = Optimizer(parameters, Adam())
    async with ap.elastic(portions=PORTIONS, seed=11, source=source) as job:
        state = job.state(parameters, optimizer, pipeline=model, losses=[])
        async for step in job.steps(state, until=until):
            async with step:

                def sample(portion: int, number: int = step.number) -> Any:
                    return np.random.default_rng([number, portion]).standard_normal((5, 6)).astype(np.float32)

                await asyncio.sleep(pause)
                if on_step is not None:
                    on_step("computed", step)
                gradients = await step.run_pipeline(sample, lambda p: sample(p)[:, :4] ** 2, squares, op="mean")
                if on_step is not None:
                    on_step("reduced", step)
                await step.update(optimizer, gradients, learning_rate=0.01, clip_norm=clip_norm)
                state["losses"].append(step.loss)
                if on_step is not None:
                    on_step("updated", step)
                await step.gather()
                values = b"" if step.is_replay else b"".join(parameter.value.tobytes() for parameter in parameters)
            if step.is_committed and not step.is_replay:
                trace.committed.setdefault(step.number, set()).add(step.began_in)
                result.parameters = values
            if step.change is not None:
                result.changes.append(str(step.change))
        result.digest = (await state.lineage()).digest
        result.losses, result.is_drained = list(state["losses"]), job.is_drained
    return result
