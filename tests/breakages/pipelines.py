"""Mistakes in what pipelines keep between forward and backward passes."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.parallel import MemoryOptimizationStrategy, PipelineScheduleType
from asyncpar.nn import Array, Dropout, Initializer, LayerNorm, Linear, Sequential, Stage
from asyncpar.nn.parameter import OnGradient, Parameter
from asyncpar.nn.stage import Deferred
from asyncpar.pipeline import PipelineSchedule
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.pipeline.offload import MemoryManager
from asyncpar.pipeline.offload.entry import OffloadEntry
from asyncpar.pipeline.recompute import Recomputed, RecomputedSaved, apply_memory_strategy
from asyncpar.pipeline.result import PipelineResult
from tests.breakages.breakage import Breakage, Mistake
from tests.pipeline.timed_stages import VirtualCompute
from tests.pipeline.worlds import Ranks, in_virtual_time

WIDTH, ROWS, STAGES, LAYERS = 6, 5, 2, 3
SCHEDULE = PipelineSchedule(
    num_stages=STAGES, num_microbatches=4, schedule_type=PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD
)

# -- checks -----------------------------------------------------------------------------------------------------------


def make_stage(number: int, *, recomputes: bool) -> Stage[Any]:
    """Return a stage whose input, output and values in between all have one shape, so that they could be mixed up."""
    initializer = Initializer.from_seed(3 + number, "float64")
    layers: list[Stage[Any]] = [
        Sequential(
            [
                LayerNorm(f"{number}/{layer}/norm", WIDTH, initializer=initializer),
                Linear(f"{number}/{layer}/map", WIDTH, WIDTH, initializer=initializer),
                Dropout(f"{number}/{layer}/dropout", 0.3, seed=7),
            ]
        )
        for layer in range(LAYERS)
    ]
    strategy = MemoryOptimizationStrategy.BASIC
    return Sequential(apply_memory_strategy(strategy, layers, recompute_all=recomputes))


def distance(y: Array, target: Array) -> tuple[float, Array]:
    """A loss."""
    return float(np.sum((y - target) ** 2)) / 2, y - target


def make_batches() -> tuple[list[Array], list[Array]]:
    rng, count = np.random.default_rng(1), SCHEDULE.num_microbatches
    inputs: list[Array] = [rng.normal(size=(ROWS, WIDTH)) for _ in range(count)]
    targets: list[Array] = [rng.normal(size=(ROWS, WIDTH)) for _ in range(count)]
    return inputs, targets


def train_alone() -> dict[str, Array]:
    """Return the gradients that one process has."""
    model = Sequential([make_stage(number, recomputes=False) for number in range(STAGES)])
    for x, target in zip(*make_batches(), strict=True):
        y, saved = model.forward(x)
        model.backward(saved, distance(y, target)[1])
    return {parameter.name: parameter.grad for parameter in model.parameters()}


def run_pipeline(*, recomputes: bool = False, shift: float = 0.0) -> tuple[list[PipelineResult], dict[str, Array]]:
    """Return what each rank's run gave, and all gradients; parameters are moved by ``shift`` in a fixed direction."""
    stages = [make_stage(number, recomputes=recomputes) for number in range(STAGES)]
    for name, parameter in sorted(parameters_of(stages).items()):
        parameter.value[...] += shift * direction_of(name, parameter.shape)

    async def main(ranks: Ranks) -> list[PipelineResult]:
        executors = [
            PipelineExecutor(SCHEDULE, [stage], communicator=communicator, compute=VirtualCompute(), loss=distance)
            for stage, communicator in zip(stages, ranks.communicators, strict=True)
        ]
        results = await asyncio.gather(*(executor.run(*make_batches()) for executor in executors))
        await asyncio.gather(*(executor.close() for executor in executors))
        return results

    results = in_virtual_time(STAGES, main)
    return results, {name: parameter.grad for name, parameter in parameters_of(stages).items()}


def parameters_of(stages: Sequence[Stage[Any]]) -> dict[str, Parameter]:
    return {parameter.name: parameter for stage in stages for parameter in stage.parameters()}


def direction_of(name: str, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng([*name.encode()]).normal(size=shape)


def gradients_are_slopes_of_the_loss() -> None:
    """Asked of forward passes alone, which need nothing that is kept."""
    step = 1e-5
    _, gradients = run_pipeline()
    losses = [sum(run_pipeline(shift=shift)[0][-1].losses) for shift in (step, -step)]
    slope = sum(float(np.sum(gradient * direction_of(name, gradient.shape))) for name, gradient in gradients.items())
    np.testing.assert_allclose(slope, (losses[0] - losses[1]) / (2 * step), rtol=1e-6, err_msg="slope of the loss")


def recomputed_gradients_are_those_of_one_process() -> None:
    """One process keeps everything."""
    _, gradients = run_pipeline(recomputes=True)
    for name, expected in train_alone().items():
        np.testing.assert_array_equal(gradients[name], expected, err_msg=f"gradient of {name}")


def recomputing_keeps_inputs_only() -> None:
    """What is measured is exactly what the formula says: the input of each layer, and the last stage's gradient."""
    results, _ = run_pipeline(recomputes=True)
    tensor = ROWS * WIDTH * 8
    expected = [result.peak_in_flight * LAYERS * tensor for result in results]
    expected[-1] += tensor
    assert [result.peak_bytes for result in results] == expected, "bytes of activations as measured"


def what_is_on_disk_is_not_in_memory() -> None:
    async def main(_: Ranks) -> None:
        async with MemoryManager(strategy=MemoryOptimizationStrategy.EXTREME) as memory:
            value = np.ones(10_000)
            watched = weakref.ref(value)
            memory.store_activation((0, 0), value)
            del value
            for later in range(1, 4):
                memory.store_activation((0, later), np.ones(10))
                await memory.make_room()
            await asyncio.sleep(1.0)
            assert memory.stats.current_bytes == 0
            assert watched() is None, "memory that is counted as free is still in use"
            np.testing.assert_array_equal(await memory.retrieve_activation((0, 0)), np.ones(10_000))

    in_virtual_time(1, main)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def save_outputs_of_recomputed_layers(patch: pytest.MonkeyPatch) -> None:
    right = Recomputed.forward

    def wrong(self: Recomputed, x: Array) -> tuple[Array, RecomputedSaved]:
        y, saved = right(self, x)
        return y, RecomputedSaved(x=y, states=saved.states)

    patch.setattr(Recomputed, "forward", wrong)


def save_outputs_of_linear_maps(patch: pytest.MonkeyPatch) -> None:
    right = Linear.forward

    def wrong(self: Linear, x: Array) -> tuple[Array, Array]:
        y, _ = right(self, x)
        return y, y

    patch.setattr(Linear, "forward", wrong)


def recompute_from_zeros(patch: pytest.MonkeyPatch) -> None:
    right = Recomputed.backward

    def wrong(
        self: Recomputed,
        saved: RecomputedSaved,
        dy: Array,
        on_gradient: OnGradient | None = None,
        deferred: Deferred | None = None,
    ) -> Array | None:
        zeros = RecomputedSaved(x=np.zeros_like(saved.x), states=saved.states)
        return right(self, zeros, dy, on_gradient, deferred)

    patch.setattr(Recomputed, "backward", wrong)


def forget_the_state_of_generators(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("asyncpar.pipeline.recompute._restore", lambda stage, states: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeepsAll(RecomputedSaved):
    kept: Any


def keep_what_is_recomputed(patch: pytest.MonkeyPatch) -> None:
    right = Recomputed.forward

    def wrong(self: Recomputed, x: Array) -> tuple[Array, RecomputedSaved]:
        y, saved = right(self, x)
        return y, _KeepsAll(x=saved.x, states=saved.states, kept=self.stage.forward(x)[1])

    patch.setattr(Recomputed, "forward", wrong)


def keep_what_is_offloaded(patch: pytest.MonkeyPatch) -> None:
    leaked: list[object] = []
    right = OffloadEntry.of

    def wrong(key: tuple[int, int], value: Any, needed: int) -> OffloadEntry:
        leaked.append(value)
        return right(key, value, needed)

    patch.setattr(OffloadEntry, "of", wrong)


# -- cases ------------------------------------------------------------------------------------------------------------


def _recomputed(mistake: Mistake, where: str, switch_on: Callable[[pytest.MonkeyPatch], None]) -> Breakage:
    check = recomputed_gradients_are_those_of_one_process
    return Breakage(mistake=mistake, where=where, switch_on=switch_on, check=check, shows="gradient of")


CASES: Sequence[Breakage] = (
    _recomputed(Mistake.OUTPUTS_SAVED, "recompute", save_outputs_of_recomputed_layers),
    Breakage(
        mistake=Mistake.OUTPUTS_SAVED,
        where="layers",
        switch_on=save_outputs_of_linear_maps,
        check=gradients_are_slopes_of_the_loss,
        shows="slope of the loss",
    ),
    _recomputed(Mistake.ZEROS_RECOMPUTED, "recompute", recompute_from_zeros),
    _recomputed(Mistake.ZEROS_RECOMPUTED, "generators", forget_the_state_of_generators),
    Breakage(
        mistake=Mistake.UNMEASURED_MEMORY,
        where="recompute",
        switch_on=keep_what_is_recomputed,
        check=recomputing_keeps_inputs_only,
        shows="bytes of activations as measured",
    ),
    Breakage(
        mistake=Mistake.UNMEASURED_MEMORY,
        where="offload",
        switch_on=keep_what_is_offloaded,
        check=what_is_on_disk_is_not_in_memory,
        shows="memory that is counted as free is still in use",
    ),
)
