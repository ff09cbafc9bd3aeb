"""Activations that are not kept are computed again, with the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.parallel import MemoryOptimizationStrategy as Strategy
from asyncpar.core.config.parallel import PipelineScheduleType as Kind
from asyncpar.errors import UsageError
from asyncpar.nn import Block, Initializer, Linear, Sequential, Stage
from asyncpar.nn.dropout import Dropout
from asyncpar.nn.parameter import Array
from asyncpar.pipeline import PipelineSchedule
from asyncpar.pipeline.offload.packing import bytes_of
from asyncpar.pipeline.recompute import Recomputed, apply_memory_strategy
from tests.pipeline.real_stages import gradients_of, make_executors, make_samples, run_all
from tests.pipeline.worlds import Ranks, in_virtual_time

X = np.random.default_rng(3).normal(size=(2, 5, 8))


def make_layers(count: int = 8) -> list[Stage[Any]]:
    initializer = Initializer.from_seed(1, "float64")
    layers: list[Stage[Any]] = []
    for place in range(count // 2):
        layers.append(Block(f"block{place}", 8, 2, initializer=initializer))
        layers.append(Dropout(f"dropout{place}", 0.3, seed=2))
    return layers


def passes(stage: Stage[Any], times: int = 3, *, is_split: bool = False) -> tuple[list[Array], dict[str, Array], Any]:
    """Return all outputs and input gradients, the parameters' gradients, and what the generators draw next.

    Micro-batches overlap as in a pipeline: two forward passes come before the first backward pass.
    """
    found: list[Array] = []
    kept: list[tuple[Array, Any]] = []

    def forward(number: int) -> None:
        y, saved = stage.forward(X + number)
        found.append(y.copy())
        kept.append((y, saved))

    def backward() -> None:
        dy, saved = kept.pop(0)
        if is_split:
            dx, deferred = stage.backward_input(saved, dy)
            stage.backward_weight(deferred)
        else:
            dx = stage.backward(saved, dy)
        assert dx is not None
        found.append(dx)

    forward(0)
    for number in range(1, times):
        forward(number)
        backward()
    backward()
    return found, gradients_of([stage]), [generator.random(3).tolist() for generator in stage.generators()]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("strategy", list(Strategy))
def test_every_strategy_gives_the_same_bits_and_leaves_the_same_generators(strategy: Strategy, is_split: bool) -> None:
    found, gradients, drawn = passes(Sequential(apply_memory_strategy(strategy, make_layers())), is_split=is_split)
    want, wanted_gradients, wanted_draws = passes(Sequential(make_layers()))
    for one, other in zip(found, want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, wanted_gradients[name])
    assert drawn == wanted_draws
    assert all(np.abs(gradient).max() > 0.0 for gradient in gradients.values())


def test_all_layers_recomputed_give_the_same_bits() -> None:
    layers = apply_memory_strategy(Strategy.BASIC, make_layers(), recompute_all=True)
    assert all(isinstance(layer, Recomputed) for layer in layers)
    found, gradients, drawn = passes(Sequential(layers))
    want, wanted_gradients, wanted_draws = passes(Sequential(make_layers()))
    np.testing.assert_array_equal(np.stack(found), np.stack(want))
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, wanted_gradients[name])
    assert drawn == wanted_draws


def test_a_generator_that_two_layers_share_is_restored_too() -> None:
    class Shared(Stage[Array]):
        """Adds noise, and multiplies by it."""

        def __init__(self, generator: np.random.Generator) -> None:
            self._generator = generator

        def forward(self, x: Array) -> tuple[Array, Array]:
            noise = self._generator.normal(size=x.shape)
            return x * noise, noise

        def backward(self, saved: Array, dy: Array, on_gradient: Any = None, deferred: Any = None) -> Array:
            return dy * saved

        def parameters(self) -> tuple[()]:
            return ()

        def generators(self) -> tuple[np.random.Generator, ...]:
            return (self._generator,)

    def make(wrap: Any) -> Stage[Any]:
        generator = np.random.default_rng(9)
        return Sequential([wrap(Shared(generator)), wrap(Shared(generator))])

    found, _, drawn = passes(make(Recomputed))
    want, _, wanted = passes(make(lambda stage: stage))
    np.testing.assert_array_equal(np.stack(found), np.stack(want))
    assert drawn == wanted


def test_what_a_forward_pass_counts_is_counted_once() -> None:
    class Counting(Linear):
        passes = 0

        def forward(self, x: Array) -> tuple[Array, Array]:
            self.passes += 1
            return super().forward(x)

        def forward_again(self, x: Array) -> tuple[Array, Array]:
            return super().forward(x)

    layer = Counting("linear", 8, 3, initializer=Initializer.from_seed(0, "float64"))
    recomputed = Recomputed(Sequential([layer]))
    y, saved = recomputed.forward(X)
    recomputed.backward(saved, y)
    assert layer.passes == 1


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        (Strategy.BASIC, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Strategy.STANDARD, [1, 3, 5, 7]),
        (Strategy.AGGRESSIVE, [3, 7]),
        (Strategy.EXTREME, [3, 7]),
    ],
)
def test_a_strategy_keeps_as_many_layers_as_it_says(strategy: Strategy, kept: list[int]) -> None:
    layers = apply_memory_strategy(strategy, make_layers())
    assert [place for place, layer in enumerate(layers) if not isinstance(layer, Recomputed)] == kept


def test_a_recomputed_layer_saves_its_input_and_nothing_else() -> None:
    block = make_layers()[0]
    _, saved = Recomputed(block).forward(X)
    assert bytes_of(saved) == X.nbytes
    assert saved.x is X
    _, whole = block.forward(X)
    assert bytes_of(whole) > 10 * X.nbytes


def test_less_is_kept_the_stronger_the_strategy() -> None:
    def kept(strategy: Strategy) -> int:
        blocks = [layer for layer in make_layers(16) if isinstance(layer, Block)]
        _, saved = Sequential(apply_memory_strategy(strategy, blocks)).forward(X)
        return bytes_of(saved)

    basic, standard, aggressive, extreme = (kept(strategy) for strategy in Strategy)
    assert basic > standard > aggressive == extreme


def test_parameters_and_generators_are_those_of_the_layer() -> None:
    for layer in make_layers():
        assert Recomputed(layer).parameters() == layer.parameters()
        assert Recomputed(layer).generators() == layer.generators()


def test_gradients_are_reported_as_by_the_layer() -> None:
    layer = Linear("linear", 8, 3, initializer=Initializer.from_seed(0, "float64"))
    reported: list[str] = []
    y, saved = Recomputed(layer).forward(X)
    Recomputed(layer).backward(saved, y, reported.append)
    assert sorted(reported) == ["linear/bias", "linear/weight"]


def test_generators_are_restored_also_when_recomputing_fails() -> None:
    class Failing(Dropout):
        is_broken = False

        def forward(self, x: Array) -> Any:
            found = super().forward(x)
            if self.is_broken:
                raise ZeroDivisionError
            return found

    layer = Failing("dropout", 0.5, seed=0)
    recomputed = Recomputed(layer)
    y, saved = recomputed.forward(X)
    before = layer.generators()[0].bit_generator.state
    layer.is_broken = True
    with pytest.raises(ZeroDivisionError):
        recomputed.backward(saved, y)
    assert layer.generators()[0].bit_generator.state == before


def test_a_layer_is_not_wrapped_twice() -> None:
    layers = apply_memory_strategy(Strategy.STANDARD, make_layers())
    with pytest.raises(UsageError, match="layers: expected layers that are not recomputed yet"):
        apply_memory_strategy(Strategy.BASIC, layers, recompute_all=True)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_pipeline_computes_the_same_with_recomputed_stages(kind: Kind) -> None:
    schedule = PipelineSchedule(num_stages=2, num_microbatches=4, schedule_type=kind)
    inputs, targets = make_samples(4, rows=lambda number: 1 + number)

    async def main(ranks: Ranks) -> tuple[list[Any], list[dict[str, Array]]]:
        found = []
        for change in (lambda stage: stage, Recomputed):
            executors, held = make_executors(schedule, ranks, change=change)
            found.append((await run_all(executors, inputs, targets), [gradients_of(stages) for stages in held]))
            for executor in executors:
                await executor.close()
        (results, gradients), (others, same) = found
        assert [result.losses for result in results] == [result.losses for result in others]
        if kind in (Kind.GPIPE, Kind.ONE_FORWARD_ONE_BACKWARD):  # halves keep what was recomputed for the second one
            assert all(less.peak_bytes < more.peak_bytes for less, more in zip(others, results, strict=True))
        return gradients, same

    for once, again in zip(*in_virtual_time(2, main), strict=True):
        for name, gradient in once.items():
            np.testing.assert_array_equal(gradient, again[name])
