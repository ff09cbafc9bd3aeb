"""The synchronizer over real in-process worlds: it is what one process would get, or an error that changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest

from asyncpar.core.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.errors import NonFiniteValue, PeerCancelled, PeerLost, UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn import Array, Parameter
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from tests.products import sampled
from tests.soak import chosen

T = TypeVar("T")

SHAPES: dict[str, tuple[int, ...]] = {
    "layer_0_weight": (40, 30),
    "layer_0_bias": (30,),
    "layer_0_down_projection": (30, 17),
    "layer_1_weight": (257, 9),
    "layer_1_bias": (),
}
SMALL_BUCKETS = GradientBucketingConfig(bucket_size_mb=0.002)
INT8 = GradientCompressionConfig(codec="int8")
TRANSPORTS = ("inproc", "shm")
PERIOD = 9973
"""A prime: values of gradients that have more repeat themselves, as drawing takes longer than all else."""


class Model:
    """Parameters with gradients that depend on the rank and the step."""

    def __init__(self, rank: int, *, shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: str = "float32") -> None:
        self.rank = rank
        self._parameters = [Parameter(name, np.zeros(shape, dtype)) for name, shape in shapes.items()]
        self.fill()

    def fill(self, step: int = 0) -> None:
        rng = np.random.default_rng((self.rank, step))
        for parameter in self._parameters:
            shape = parameter.grad.shape
            drawn = rng.normal(size=min(parameter.grad.size, PERIOD))
            parameter.grad[...] = np.resize(drawn, shape)

    def parameters(self) -> Sequence[Parameter]:
        return self._parameters

    def gradients(self) -> dict[str, Array]:
        return {parameter.name: parameter.grad.copy() for parameter in self._parameters}


def make_synchronizer(
    node: Node,
    *,
    bucketing: GradientBucketingConfig = SMALL_BUCKETS,
    compression: GradientCompressionConfig | None = None,
    strategy: CommunicationStrategy = CommunicationStrategy.ALL_REDUCE,
    name: str = "gradients",
) -> GradientSynchronizer:
    config = ThreeDParallelismConfig(dp_size=node.size, comm_strategy=strategy)
    return GradientSynchronizer(
        config,
        RankMapping(config, node.rank),
        communicator=node.world,
        bucketing=bucketing,
        compression=compression,
        name=name,
    )


async def on_all(nodes: Sequence[Node], main: Callable[[Node], Awaitable[T]]) -> list[T]:
    """Run ``main`` on every rank at once and return the results in the order of ranks."""
    return list(await asyncio.gather(*(main(node) for node in nodes)))


async def on_all_failing(nodes: Sequence[Node], main: Callable[[Node], Awaitable[T]]) -> list[BaseException | T]:
    """As ``on_all``, with exceptions among the results."""
    return list(await asyncio.gather(*(main(node) for node in nodes), return_exceptions=True))


def mean_of_models(size: int, *, step: int = 0, dtype: str = "float32") -> dict[str, Array]:
    """Return what one process gets from the gradients of all ranks, in float64."""
    models = [Model(rank, dtype=dtype) for rank in range(size)]
    for model in models:
        model.fill(step)
    every = [model.gradients() for model in models]
    return {name: np.mean([gradients[name].astype(np.float64) for gradients in every], axis=0) for name in SHAPES}


async def report_and_fail(synchronizer: GradientSynchronizer, model: Model, names: Sequence[str] | None) -> None:
    """Synchronize; unless ``names`` is None, report these and raise ``ZeroDivisionError`` in the block."""
    async with synchronizer.step(model.parameters()) as step:
        if names is not None:
            for name in names:
                step.ready(name)
            raise ZeroDivisionError


async def synchronize_or_hang(synchronizer: GradientSynchronizer, model: Model, *, hangs: bool) -> None:
    """Synchronize, or never leave the block until a timeout."""
    async with asyncio.timeout(0.01 if hangs else None), synchronizer.step(model.parameters()):
        if hangs:
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(("transport", "size", "dtype"), sampled(TRANSPORTS, [1, 2, 3, 4], ["float32", "float64"]))
async def test_gradients_become_the_mean_over_ranks(transport: str, size: int, dtype: str) -> None:
    async def main(node: Node) -> dict[str, Array]:
        model = Model(node.rank, dtype=dtype)
        await make_synchronizer(node).synchronize_gradients(model)
        return model.gradients()

    async with local_world(size, transport=transport) as nodes:
        results = await on_all(nodes, main)
    expected = mean_of_models(size, dtype=dtype)
    for name in SHAPES:
        tolerance = 1e-6 if dtype == "float32" else 1e-14
        np.testing.assert_allclose(results[0][name], expected[name], rtol=tolerance, atol=tolerance)
        for other in results:
            np.testing.assert_array_equal(other[name], results[0][name])


@pytest.mark.parametrize("compression", [None, INT8], ids=["none", "int8"])
async def test_the_mean_is_taken_exactly_once(compression: GradientCompressionConfig | None) -> None:
    async def main(node: Node) -> list[float]:
        model = Model(node.rank)
        for parameter in model.parameters():
            parameter.grad.fill(127.0)
        synchronizer = make_synchronizer(node, compression=compression)
        for _ in range(3):
            await synchronizer.synchronize_gradients(model)
        return [float(value) for parameter in model.parameters() for value in parameter.grad.flat]

    async with local_world(4) as nodes:
        for values in await on_all(nodes, main):
            assert set(values) == {127.0}


@pytest.mark.parametrize("compression", [None, INT8], ids=["none", "int8"])
async def test_no_gradient_is_left_out(compression: GradientCompressionConfig | None) -> None:
    async def main(node: Node) -> dict[str, float]:
        model = Model(node.rank)
        for index, parameter in enumerate(model.parameters()):
            parameter.grad.fill(float((index + 1) * node.rank))
        await make_synchronizer(node, compression=compression).synchronize_gradients(model)
        return {parameter.name: float(parameter.grad.flat[0]) for parameter in model.parameters()}

    async with local_world(3) as nodes:
        for values in await on_all(nodes, main):
            assert values == pytest.approx({name: index + 1.0 for index, name in enumerate(SHAPES)}, rel=0.02)


@pytest.mark.parametrize("strategy", list(CommunicationStrategy))
async def test_every_strategy_gives_the_mean(strategy: CommunicationStrategy) -> None:
    async def main(node: Node) -> dict[str, Array]:
        model = Model(node.rank)
        await make_synchronizer(node, strategy=strategy).synchronize_gradients(model)
        return model.gradients()

    async with local_world(3, hosts=["a", "a", "b"]) as nodes:
        results = await on_all(nodes, main)
    for name, expected in mean_of_models(3).items():
        np.testing.assert_allclose(results[2][name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("max_buckets", [1, 2, 16])
async def test_max_buckets_is_honoured_and_changes_no_result(max_buckets: int) -> None:
    async def main(node: Node) -> tuple[dict[str, Array], int]:
        model = Model(node.rank)
        bucketing = GradientBucketingConfig(bucket_size_mb=0.0001, max_buckets=max_buckets)
        synchronizer = make_synchronizer(node, bucketing=bucketing)
        await synchronizer.synchronize_gradients(model)
        return model.gradients(), synchronizer.get_sync_stats().total_buckets_synced

    async with local_world(2) as nodes:
        results = await on_all(nodes, main)
    for gradients, buckets in results:
        assert buckets == min(max_buckets, len(SHAPES))
        for name, expected in mean_of_models(2).items():
            np.testing.assert_allclose(gradients[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("transport", "compression", "overlap"), sampled(TRANSPORTS, [None, INT8], [True, False]))
async def test_ranks_may_finish_gradients_in_different_orders(
    transport: str, compression: GradientCompressionConfig | None, overlap: bool
) -> None:
    bucketing = GradientBucketingConfig(bucket_size_mb=0.0001, overlap_communication=overlap)

    async def main(node: Node) -> dict[str, Array]:
        model = Model(node.rank)
        synchronizer = make_synchronizer(node, bucketing=bucketing, compression=compression)
        names = list(SHAPES)
        order = names[node.rank :] + names[: node.rank]
        with ThreadPoolExecutor(1) as worker:
            for step in range(3):
                model.fill(step)
                async with synchronizer.step(model.parameters()) as synchronization:
                    for name in order:
                        await asyncio.get_running_loop().run_in_executor(worker, synchronization.ready, name)
        return model.gradients()

    async with local_world(4, transport=transport) as nodes:
        results = await on_all(nodes, main)
    for name, expected in mean_of_models(4, step=2).items():
        np.testing.assert_allclose(results[0][name], expected, atol=1e-6 if compression is None else 0.1)
        for other in results:
            np.testing.assert_array_equal(other[name], results[0][name])


async def test_int8_is_near_the_mean_and_right_over_time() -> None:
    steps = chosen(20, soak=30)

    async def main(node: Node) -> dict[str, Array]:
        model = Model(node.rank)
        synchronizer = make_synchronizer(node, compression=INT8)
        total: dict[str, Array] = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for _ in range(steps):
            model.fill()
            await synchronizer.synchronize_gradients(model)
            for name, gradient in model.gradients().items():
                total[name] += gradient
        return total

    async with local_world(3) as nodes:
        results = await on_all(nodes, main)
    for name, expected in mean_of_models(3).items():
        np.testing.assert_allclose(results[0][name] / steps, expected, atol=0.003)


async def test_int8_without_feedback_keeps_no_residual() -> None:
    without = GradientCompressionConfig(codec="int8", error_feedback=False)

    async def main(node: Node) -> tuple[int, float]:
        synchronizer = make_synchronizer(node, compression=without)
        await synchronizer.synchronize_gradients(Model(node.rank))
        return len(synchronizer.residuals()), synchronizer.get_sync_stats().residual_norm

    async with local_world(2) as nodes:
        assert await on_all(nodes, main) == [(0, 0.0), (0, 0.0)]


async def test_residuals_belong_to_names_and_survive_new_buckets() -> None:
    more = {"new_first": (3, 3), **SHAPES, "new_last": (2000,)}

    async def main(node: Node) -> None:
        synchronizer = make_synchronizer(node, compression=INT8)
        await synchronizer.synchronize_gradients(Model(node.rank))
        before = synchronizer.residuals()
        assert list(before) == list(reversed(SHAPES))
        restored = make_synchronizer(node, bucketing=GradientBucketingConfig(), compression=INT8, name="restored")
        restored.restore_residuals(before)
        sums = []
        for other in (synchronizer, restored):
            model = Model(node.rank, shapes=more)
            for parameter in model.parameters():
                parameter.grad.fill(0.0)
            await other.synchronize_gradients(model)
            sums.append(other.residuals())
        for residuals in sums:
            assert set(residuals) == set(more)
            assert any(np.abs(residual).max() > 0 for residual in residuals.values())

    async with local_world(2) as nodes:
        await on_all(nodes, main)


async def test_a_carried_residual_is_sent_in_the_next_step() -> None:
    async def main(node: Node) -> dict[str, Array]:
        synchronizer = make_synchronizer(node, compression=INT8)
        residuals = {name: np.full(int(np.prod(shape)), 12.7, np.float32) for name, shape in SHAPES.items()}
        synchronizer.restore_residuals(residuals)
        model = Model(node.rank)
        for parameter in model.parameters():
            parameter.grad.fill(0.0)
        await synchronizer.synchronize_gradients(model)
        return model.gradients()

    async with local_world(2) as nodes:
        for gradients in await on_all(nodes, main):
            for gradient in gradients.values():
                np.testing.assert_allclose(gradient, 12.7, rtol=1e-6)


async def test_switching_compression_keeps_residuals_or_drops_them() -> None:
    async def main(node: Node) -> tuple[int, int, int]:
        synchronizer, model = make_synchronizer(node, compression=INT8), Model(node.rank)
        await synchronizer.synchronize_gradients(model)
        synchronizer.update_compression_config(INT8)
        kept = len(synchronizer.residuals())
        synchronizer.update_compression_config(GradientCompressionConfig())
        await synchronizer.synchronize_gradients(model)
        dropped = len(synchronizer.residuals())
        synchronizer.update_compression_config(INT8)
        await synchronizer.synchronize_gradients(model)
        synchronizer.clear_buffers()
        return kept, dropped, len(synchronizer.residuals())

    async with local_world(2) as nodes:
        assert await on_all(nodes, main) == [(len(SHAPES), 0, 0)] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_another_order_of_parameters_names_rank_and_parameter(transport: str) -> None:
    async def main(node: Node) -> None:
        names = list(SHAPES) if node.rank != 1 else [*list(SHAPES)[1:], next(iter(SHAPES))]
        model = Model(node.rank, shapes={name: SHAPES[name] for name in names})
        await make_synchronizer(node).synchronize_gradients(model)

    async with local_world(3, transport=transport) as nodes:
        for error in await on_all_failing(nodes, main):
            assert isinstance(error, UsageError)
            assert "rank 0 has layer_0_weight float32[40, 30], rank 1 has layer_0_bias float32[30]" in str(error)


async def test_other_settings_on_one_rank_are_an_error_on_all() -> None:
    async def main(node: Node) -> None:
        compression = INT8 if node.rank == 2 else None
        await make_synchronizer(node, compression=compression).synchronize_gradients(Model(node.rank))

    async with local_world(3) as nodes:
        for error in await on_all_failing(nodes, main):
            assert isinstance(error, UsageError)
            assert "rank 0 has codec none, error feedback on, none in force, rank 2 has codec int8" in str(error)


async def test_a_rank_without_parameters_is_an_error_on_all() -> None:
    async def main(node: Node) -> None:
        await make_synchronizer(node).synchronize_gradients(Model(node.rank, shapes=SHAPES if node.rank else {}))

    async with local_world(2) as nodes:
        for error in await on_all_failing(nodes, main):
            assert isinstance(error, UsageError)
            assert "rank 0 has nothing more, rank 1 has layer_0_weight" in str(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_rank_whose_parameters_change_later_is_noticed(transport: str) -> None:
    async def main(node: Node) -> None:
        synchronizer = make_synchronizer(node)
        await synchronizer.synchronize_gradients(Model(node.rank))
        changed = {**SHAPES, "layer_1_bias": (2,)} if node.rank == 2 else SHAPES
        expected = "layer_1_bias: expected a gradient as in earlier steps, layer_1_bias float32.., got .*float32.2."
        with pytest.raises(UsageError, match=expected) as caught:
            await synchronizer.synchronize_gradients(Model(node.rank, shapes=changed))
        assert ("rank 2 has" in str(caught.value)) == (node.rank != 2)
        model = Model(node.rank)
        await synchronizer.synchronize_gradients(model)
        np.testing.assert_allclose(model.gradients()["layer_1_bias"], mean_of_models(3)["layer_1_bias"], atol=1e-6)

    async with local_world(3, transport=transport) as nodes:
        await on_all(nodes, main)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_after_a_disagreement_a_right_step_works(transport: str) -> None:
    async def main(node: Node) -> dict[str, Array]:
        synchronizer = make_synchronizer(node)
        wrong = Model(node.rank, shapes=SHAPES if node.rank else {"other": (3,)})
        with pytest.raises(UsageError, match="expected the same names"):
            await synchronizer.synchronize_gradients(wrong)
        model = Model(node.rank)
        await synchronizer.synchronize_gradients(model)
        return model.gradients()

    async with local_world(2, transport=transport) as nodes:
        results = await on_all(nodes, main)
    for name, expected in mean_of_models(2).items():
        np.testing.assert_allclose(results[0][name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("compression", [None, INT8], ids=["none", "int8"])
async def test_a_gradient_that_is_not_finite_fails_everywhere_and_changes_nothing(
    transport: str,
    compression: GradientCompressionConfig | None,
) -> None:
    async def main(node: Node) -> None:
        synchronizer, model = make_synchronizer(node, compression=compression), Model(node.rank)
        if node.rank == 1:
            model.parameters()[0].grad[3, 3] = np.nan
        before, residuals = model.gradients(), synchronizer.residuals()
        with pytest.raises(NonFiniteValue):
            await synchronizer.synchronize_gradients(model)
        for name, gradient in model.gradients().items():
            np.testing.assert_array_equal(gradient, before[name])
        assert sum(float(np.abs(residual).sum()) for residual in residuals.values()) == 0.0
        assert synchronizer.get_sync_stats().total_sync_operations == 0
        model.fill()
        await synchronizer.synchronize_gradients(model)
        np.testing.assert_allclose(
            model.gradients()["layer_1_weight"],
            mean_of_models(3)["layer_1_weight"],
            atol=1e-6 if not compression else 0.1,
        )

    async with local_world(3, transport=transport) as nodes:
        await on_all(nodes, main)


@pytest.mark.parametrize(("transport", "compression", "reported"), sampled(TRANSPORTS, [None, INT8], [0, 2, 5]))
async def test_a_rank_whose_block_raises_fails_the_step_everywhere(
    transport: str, compression: GradientCompressionConfig | None, reported: int
) -> None:
    bucketing = GradientBucketingConfig(bucket_size_mb=0.0001)

    async def main(node: Node) -> None:
        synchronizer = make_synchronizer(node, bucketing=bucketing, compression=compression)
        model = Model(node.rank)
        await synchronizer.synchronize_gradients(model)
        model.fill(1)
        before, residuals = model.gradients(), synchronizer.residuals()
        expected = ZeroDivisionError if node.rank == 0 else (PeerCancelled, NonFiniteValue)
        failing = list(reversed(SHAPES))[:reported] if node.rank == 0 else None
        with pytest.raises(expected):
            await report_and_fail(synchronizer, model, failing)
        for name, gradient in model.gradients().items():
            np.testing.assert_array_equal(gradient, before[name])
        for name, residual in synchronizer.residuals().items():
            np.testing.assert_array_equal(residual, residuals[name])
        model.fill(2)
        await synchronizer.synchronize_gradients(model)
        for name, mean in mean_of_models(3, step=2).items():
            np.testing.assert_allclose(model.gradients()[name], mean, atol=1e-6 if not compression else 0.15)

    async with local_world(3, transport=transport) as nodes:
        await on_all(nodes, main)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_cancelled_rank_fails_the_step_everywhere_and_the_next_one_works(transport: str) -> None:
    async def main(node: Node) -> None:
        synchronizer, model = make_synchronizer(node), Model(node.rank)
        before = model.gradients()
        expected = TimeoutError if node.rank == 1 else (PeerCancelled, NonFiniteValue)
        with pytest.raises(expected):
            await synchronize_or_hang(synchronizer, model, hangs=node.rank == 1)
        for name, gradient in model.gradients().items():
            np.testing.assert_array_equal(gradient, before[name])
        await synchronizer.synchronize_gradients(model)
        np.testing.assert_allclose(model.gradients()["layer_1_bias"], mean_of_models(2)["layer_1_bias"], atol=1e-6)

    async with local_world(2, transport=transport) as nodes:
        await on_all(nodes, main)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("compression", [None, INT8], ids=["none", "int8"])
async def test_a_lost_rank_is_named_and_gradients_stay(
    transport: str, compression: GradientCompressionConfig | None
) -> None:
    async def main(node: Node) -> None:
        synchronizer, model = make_synchronizer(node, compression=compression), Model(node.rank)
        await synchronizer.synchronize_gradients(model)
        if node.rank == 2:
            await node.stop()
            return
        model.fill(1)
        before = model.gradients()
        with pytest.raises(PeerLost) as caught:
            await synchronizer.synchronize_gradients(model)
        assert caught.value.rank == 2
        for name, gradient in model.gradients().items():
            np.testing.assert_array_equal(gradient, before[name])

    async with local_world(3, transport=transport) as nodes:
        await on_all(nodes, main)
