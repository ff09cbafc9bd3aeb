"""A small training program whose state is sharded, or whose gradients are encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import asyncpar as ap
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.worlds import WorldSource
from tests.elasticity.training import PORTIONS, Model, OnStep, Result, Trace


async def train_sharded(
    source: WorldSource | None,
    name: str = "alone",
    *,
    until: int = 8,
    trace: Trace | None = None,
    on_step: OnStep | None = None,
    pause: float = 0.01,
    portions: int = PORTIONS,
    clip_norm: float | None = None,
    learning_rate: float = 0.01,
    **cut: Any,
) -> Result:
    """Train ``until`` steps are committed, and return what came out; ``cut`` goes to ``job.state``."""
    trace = Trace() if trace is None else trace
    model, result = Model(), Result()
    whole = cut.get("zero", 0) < 3
    async with ap.elastic(portions=portions, seed=11, source=source) as job:
        state = job.state(model.parameters, model.optimizer, losses=[], **cut)
        async for step in job.steps(state, until=until):
            async with step:
                update = {"clip_norm": clip_norm, "learning_rate": learning_rate}
                await one_step(step, model, state, name, trace, on_step, pause, update, is_whole=whole)
                if not whole and not step.is_replay:
                    await step.gather()
                    values = b"".join(parameter.value.tobytes() for parameter in model.parameters)
            if step.is_committed and not step.is_replay:
                trace.committed.setdefault(step.number, set()).add(step.began_in)
                result.parameters = b"" if whole else values
            if step.change is not None:
                result.changes.append(str(step.change))
        if whole:
            result.parameters = b"".join(parameter.value.tobytes() for parameter in model.parameters)
        result.digest = (await state.lineage()).digest
        result.losses = list(state["losses"])
        result.is_drained = job.is_drained
    return result


async def one_step(
    step: ElasticStep,
    model: Model,
    state: Any,
    name: str,
    trace: Trace,
    on_step: OnStep | None,
    pause: float,
    update: Mapping[str, Any],
    *,
    is_whole: bool,
) -> None:
    """Do all that a step does."""
    if not is_whole:
        await step.gather()
    for portion in step.portions:
        gradients, loss = model.backward(step.rng(portion))
        step.add(portion, gradients, loss=loss)
        await asyncio.sleep(pause)
    if on_step is not None:
        on_step("computed", step)
    if not step.is_replay:
        trace.summed.setdefault((step.number, step.began_in), {})[name] = step.portions
    mean = await step.reduce("mean")
    if on_step is not None:
        on_step("reduced", step)
    await step.update(model.optimizer, mean, **update)
    state["losses"].append(step.loss)
    if on_step is not None:
        on_step("updated", step)
