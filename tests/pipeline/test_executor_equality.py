"""A pipeline computes what one process computes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.core.config.parallel import PipelineScheduleType as Kind
from asyncpar.nn import Block, Embedding, Initializer, LayerNorm, Linear, Sequential, Stage, softmax_cross_entropy
from asyncpar.nn.parameter import Array
from asyncpar.pipeline import CustomSchedule, PipelineSchedule, Schedule, parse_schedule
from asyncpar.pipeline.result import PipelineResult
from tests.pipeline.real_stages import (
    FEATURES,
    alone,
    cut_model,
    gradients_of,
    make_executors,
    make_samples,
    make_worker,
    run_all,
)
from tests.pipeline.worlds import Ranks, in_virtual_time, open_ranks
from tests.soak import chosen

MICRO_BATCHES = 6


def schedule_of(kind: Kind, ranks: int, *, micro_batches: int = MICRO_BATCHES, chunks: int = 1) -> PipelineSchedule:
    return PipelineSchedule(
        num_stages=ranks, num_microbatches=micro_batches, schedule_type=kind, num_model_chunks=chunks
    )


def train(
    schedule: Schedule, inputs: Any, targets: Any, **options: Any
) -> tuple[list[PipelineResult], list[dict[str, Array]]]:
    async def main(ranks: Ranks) -> tuple[list[PipelineResult], list[dict[str, Array]]]:
        executors, held = make_executors(schedule, ranks, **options)
        results = await run_all(executors, inputs, targets)
        return results, [gradients_of(stages) for stages in held]

    return in_virtual_time(schedule.num_stages, main)


def check_equal(
    schedule: Schedule, results: list[PipelineResult], gradients: list[dict[str, Array]], want: Any
) -> None:
    losses, expected = want
    for rank, result in enumerate(results):
        has_last = schedule.rank_of(schedule.num_virtual_stages - 1) == rank
        assert result.losses == (tuple(losses) if has_last else ())
    found = {name: gradient for one in gradients for name, gradient in one.items()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)
        assert np.abs(gradient).max() > 0.0


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        (kind, ranks)
        for place, kind in enumerate(Kind)
        for ranks in chosen([1 + place % 2, 3 + place % 2], soak=[1, 2, 3, 4])
    ],
)
def test_losses_and_gradients_are_those_of_one_process(kind: Kind, ranks: int) -> None:
    schedule = schedule_of(kind, ranks)
    inputs, targets = make_samples(MICRO_BATCHES, rows=lambda number: 1 + number % 3)
    results, gradients = train(schedule, inputs, targets)
    check_equal(schedule, results, gradients, alone(cut_model(schedule.num_virtual_stages), inputs, targets))


@pytest.mark.parametrize("kind", [Kind.INTERLEAVED_ONE_F1B, Kind.GPIPE, Kind.ZERO_BUBBLE])
def test_several_chunks_per_rank_compute_the_same(kind: Kind) -> None:
    schedule = schedule_of(kind, 2, chunks=2, micro_batches=4)
    inputs, targets = make_samples(4)
    results, gradients = train(schedule, inputs, targets)
    check_equal(schedule, results, gradients, alone(cut_model(4), inputs, targets))


def test_a_schedule_of_ones_own_computes_the_same() -> None:
    text = "0F0,0F1,0I1,0W1,0B0\n1F1,1F0,1I1,1I0,1W0,1W1\n"
    schedule = parse_schedule(text)
    assert isinstance(schedule, CustomSchedule)
    inputs, targets = make_samples(2)
    results, gradients = train(schedule, inputs, targets)
    check_equal(schedule, results, gradients, alone(cut_model(2), inputs, targets))


def cut_language_model(count: int) -> list[Stage[Any]]:
    initializer = Initializer.from_seed(5, "float64")
    stages: list[Stage[Any]] = [Embedding("embedding", 11, 8, max_length=5, initializer=initializer)]
    stages += [Block(f"block{place}", 8, 2, initializer=initializer) for place in range(count - 2)]
    head: list[Stage[Any]] = [
        LayerNorm("norm", 8, initializer=initializer),
        Linear("head", 8, 11, initializer=initializer, has_bias=False),
    ]
    return [*stages, Sequential(head)]


def language_loss(logits: Array, targets: Any) -> tuple[float, Array]:
    return softmax_cross_entropy(logits, targets, scale=0.01)


@pytest.mark.parametrize("kind", [Kind.ONE_FORWARD_ONE_BACKWARD, Kind.ZBV])
def test_a_language_model_takes_tokens_at_its_first_stage(kind: Kind) -> None:
    schedule = schedule_of(kind, 3, micro_batches=4)
    rng = np.random.default_rng(2)
    tokens = [rng.integers(0, 11, (1 + number, 5)) for number in range(4)]
    targets = [rng.integers(0, 11, one.shape) for one in tokens]
    results, gradients = train(schedule, tokens, targets, cut=cut_language_model, loss=language_loss)
    want = alone(cut_language_model(schedule.num_virtual_stages), tokens, targets, language_loss)
    check_equal(schedule, results, gradients, want)


class ToHalf(Stage[np.dtype[Any]]):
    """Rounds to float32 on odd sizes: dtypes change from message to message."""

    def forward(self, x: Array) -> tuple[Array, np.dtype[Any]]:
        return x.astype(np.float32 if x.shape[0] % 2 else np.float64), x.dtype

    def backward(self, saved: np.dtype[Any], dy: Array, on_gradient: Any = None, deferred: Any = None) -> Array:
        return dy.astype(saved)

    def parameters(self) -> tuple[()]:
        return ()


def test_dtypes_may_differ_between_micro_batches() -> None:
    schedule = schedule_of(Kind.GPIPE, 2, micro_batches=4)
    inputs, targets = make_samples(4, rows=lambda number: 1 + number)

    def cut(count: int) -> list[Stage[Any]]:
        first, second = cut_model(2)
        return [Sequential([first, ToHalf()]), second]

    results, gradients = train(schedule, inputs, targets, cut=cut)
    check_equal(schedule, results, gradients, alone(cut(2), inputs, targets))


async def test_compute_threads_and_messages_larger_than_eager_ones_change_nothing() -> None:
    schedule = schedule_of(Kind.ONE_FORWARD_ONE_BACKWARD, 2, micro_batches=4)
    inputs, targets = make_samples(4, rows=lambda number: 900)  # 86 kB each
    losses, expected = alone(cut_model(2), inputs, targets)
    async with ap.testing.local_world(2, transport="tcp") as nodes:
        ranks: Any = type("Ranks", (), {"communicators": [node.world for node in nodes]})
        executors, held = make_executors(schedule, ranks, compute=make_worker)
        results = await asyncio.wait_for(run_all(executors, inputs, targets), 30)
        await asyncio.gather(*(executor.close() for executor in executors))
    check_equal(schedule, results, [gradients_of(stages) for stages in held], (losses, expected))


def test_traffic_is_two_activations_for_each_boundary_and_micro_batch() -> None:
    schedule = schedule_of(Kind.ONE_FORWARD_ONE_BACKWARD, 4)
    inputs, targets = make_samples(MICRO_BATCHES, rows=lambda number: 1 + number)
    results, _ = train(schedule, inputs, targets)
    there = sum(x.nbytes for x in inputs)
    sent = [result.bytes_sent for result in results]
    assert sent == [there, 2 * there, 2 * there, there]
    assert [result.bytes_received for result in results] == [there, 2 * there, 2 * there, there]
    (boundary,) = results[3].received
    assert (boundary.before, boundary.activation_bytes, boundary.messages) == (2, there, MICRO_BATCHES)


@pytest.mark.parametrize("kind", list(Kind))
def test_outputs_of_inference_are_those_of_one_process(kind: Kind) -> None:
    schedule = schedule_of(kind, 3)
    inputs, _ = make_samples(MICRO_BATCHES)

    async def main(ranks: Ranks) -> list[tuple[Array, ...]]:
        executors, _ = make_executors(schedule, ranks)
        calls = [executor.run_forward(inputs if executor.has_first_stage else None) for executor in executors]
        return await asyncio.gather(*calls)

    outputs = in_virtual_time(3, main)
    whole = Sequential(cut_model(schedule.num_virtual_stages))
    for rank, found in enumerate(outputs):
        has_last = schedule.rank_of(schedule.num_virtual_stages - 1) == rank
        assert len(found) == (MICRO_BATCHES if has_last else 0)
        for y, x in zip(found, inputs if has_last else [], strict=True):
            np.testing.assert_array_equal(y, whole.forward(x)[0])


@pytest.mark.parametrize("kind", list(Kind))
def test_gradients_are_reported_once_when_they_are_final(kind: Kind) -> None:
    schedule = schedule_of(kind, 2, micro_batches=4)
    inputs, targets = make_samples(4)
    seen: list[dict[str, Array]] = [{}, {}]

    async def main(ranks: Ranks) -> list[dict[str, Array]]:
        executors, held = make_executors(schedule, ranks)

        def listen(rank: int) -> Any:
            parameters = {one.name: one for stage in held[rank] for one in stage.parameters()}

            def on_gradient(name: str) -> None:
                assert name not in seen[rank]
                seen[rank][name] = parameters[name].grad.copy()

            return on_gradient

        await asyncio.gather(
            *(executor.run(inputs, targets, on_gradient=listen(rank)) for rank, executor in enumerate(executors))
        )
        return [gradients_of(stages) for stages in held]

    for found, final in zip(seen, in_virtual_time(2, main), strict=True):
        assert found.keys() == final.keys()
        for name, gradient in found.items():
            np.testing.assert_array_equal(gradient, final[name])


async def test_gradients_of_runs_add_up() -> None:
    schedule = schedule_of(Kind.ONE_FORWARD_ONE_BACKWARD, 2)
    inputs, targets = make_samples(MICRO_BATCHES)
    async with open_ranks(2) as ranks:
        executors, held = make_executors(schedule, ranks)
        await run_all(executors, inputs, targets)
        first = [gradients_of(stages) for stages in held]
        await run_all(executors, inputs, targets)
    for once, stages in zip(first, held, strict=True):
        for name, gradient in gradients_of(stages).items():
            np.testing.assert_allclose(gradient, 2 * once[name], rtol=1e-12)


def test_the_measured_peak_is_what_the_first_stage_keeps() -> None:
    schedule = schedule_of(Kind.GPIPE, 2)
    inputs, targets = make_samples(MICRO_BATCHES)

    def cut(count: int) -> list[Stage[Any]]:
        initializer = Initializer.from_seed(1, "float64")
        return [Linear(f"linear{place}", FEATURES, FEATURES, initializer=initializer) for place in range(count)]

    results, _ = train(schedule, inputs, targets, cut=cut)
    each = inputs[0].nbytes
    assert results[0].peak_bytes == MICRO_BATCHES * each  # a linear layer keeps its input
    assert results[1].peak_bytes == MICRO_BATCHES * 2 * each  # and here there is the gradient of the loss
