"""A small training program, whose numbers depend on the order of every addition."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncpar as ap
from asyncpar.nn.optimizers import Adam, Optimizer
from asyncpar.nn.parameter import Initializer, Parameter

if TYPE_CHECKING:  # processes of ranks run this program, too
    from asyncpar.elasticity.step import ElasticStep
    from asyncpar.elasticity.worlds import WorldSource
    from asyncpar.testing.elastic_worlds import TaskWorld

PORTIONS = 8

OnStep = Callable[[str, "ElasticStep"], None]


class Model:
    """Two layers, trained with Adam on noise."""

    def __init__(self, width: int = 17) -> None:
        init = Initializer.from_seed(3)
        self.first = init.normal("first", (8, width), std=0.3)
        self.second = init.normal("second", (width, 4), std=0.3)
        self.optimizer = Optimizer(self.parameters, Adam())

    @property
    def parameters(self) -> list[Parameter]:
        return [self.first, self.second]

    def backward(self, rng: np.random.Generator) -> tuple[dict[str, Any], float]:
        """Return gradients and loss of one portion."""
        x = rng.standard_normal((4, 8)).astype(np.float32)
        hidden = np.tanh(x @ self.first.value)
        error = hidden @ self.second.value - x[:, :4] ** 2
        back = (error @ self.second.value.T) * (1 - hidden**2)
        return {"first": x.T @ back, "second": hidden.T @ error}, float((error**2).sum())


@dataclass
class Result:
    """What a member comes to."""

    parameters: bytes = b""
    digest: bytes = b""
    losses: list[float] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)
    average: bytes = b""
    changes: list[str] = field(default_factory=list)
    is_drained: bool = False


@dataclass
class Trace:
    """What members of a run note of each step, as it is summed up and when it is over."""

    summed: dict[tuple[int, int], dict[str, range]] = field(default_factory=dict)
    committed: dict[int, set[int]] = field(default_factory=dict)
    """The generations in which a step was seen to be committed."""
    attempts: int = 0

    def portions(self, step: int) -> list[int]:
        """Return the portions that went into the committed step."""
        (generation,) = self.committed[step]
        return sorted(p for portions in self.summed[step, generation].values() for p in portions)


async def train(
    source: WorldSource | None,
    name: str = "alone",
    *,
    until: int = 12,
    trace: Trace | None = None,
    on_step: OnStep | None = None,
    width: int = 17,
    pause: float = 0.01,
    linger: float = 0.0,
) -> Result:
    """Train ``until`` steps are committed, linger for so many seconds, and return what came out."""
    trace = Trace() if trace is None else trace
    model, rng, average = Model(width), np.random.default_rng(5), np.zeros(4, np.float64)
    result = Result()
    async with ap.elastic(portions=PORTIONS, seed=11, source=source) as job:
        state = job.state(model.parameters, model.optimizer, rng=rng, losses=[], draws=[], average=average, rate=0.01)
        async for step in job.steps(state, until=until):
            async with step:
                await one_step(step, model, state, rng, average, name, trace, on_step, pause)
            if step.is_committed and not step.is_replay:
                trace.committed.setdefault(step.number, set()).add(step.began_in)
            if step.change is not None:
                result.changes.append(str(step.change))
        await asyncio.sleep(linger)
        result.parameters = b"".join(parameter.value.tobytes() for parameter in model.parameters)
        result.digest = (await state.lineage()).digest
        result.losses, result.draws, result.average = list(state["losses"]), list(state["draws"]), average.tobytes()
        result.is_drained = job.is_drained
    return result


async def one_step(
    step: ElasticStep,
    model: Model,
    state: Any,
    rng: np.random.Generator,
    average: np.ndarray[Any, Any],
    name: str,
    trace: Trace,
    on_step: OnStep | None,
    pause: float,
) -> None:
    """Do all that a step does; every kind of state is changed."""
    trace.attempts += 1
    draw = float(rng.random())
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
    await step.update(model.optimizer, mean, learning_rate=state["rate"])
    average[:] = 0.9 * average + 0.1 * model.second.value[0]
    state["rate"] *= 0.99
    state["losses"].append(step.loss)
    state["draws"].append(draw)
    if on_step is not None:
        on_step("updated", step)


def check_equal(result: Result, wanted: Result) -> None:
    """Raise unless everything has the same bits."""
    assert result.losses == wanted.losses
    assert result.draws == wanted.draws
    assert result.parameters == wanted.parameters
    assert result.average == wanted.average
    assert result.digest == wanted.digest


def encode(result: Result) -> str:
    """Return everything that must be equal, as text."""
    losses = [loss.hex() for loss in result.losses]
    return json.dumps(
        [result.parameters.hex(), result.digest.hex(), losses, [draw.hex() for draw in result.draws], result.is_drained]
    )


def most_left_at_once(worlds: Sequence[TaskWorld]) -> int:
    """Return how many members have left, at most, while as many steps were committed."""
    left: dict[int, int] = {}
    for world in worlds:
        left[world.lineage.step] = left.get(world.lineage.step, 0) + len(world.change.left)
    return max(left.values())
