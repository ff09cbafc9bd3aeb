"""Replicas on devices learn as those on the host: equal at the start, gradients averaged behind their streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.names import CodecChoice
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.node import Node
from asyncpar.parallel import DDPConfig, DistributedDataParallel, OnGradient, SynchronizationMode
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.parallel.replicas import on_all, on_all_failing, open_replica
from tests.products import sampled

SIZE = 2
FEATURES = 5
NAMES = ("first", "second", "third")


def read(array: Any) -> Any:
    """Return the memory of a device array, for work in a stream."""
    return array.cluster.memory(array.address, array.nbytes).view(array.dtype).reshape(array.shape)


@dataclass
class There:
    """A parameter or a buffer on a device."""

    name: str
    value: Any
    grad: Any = None


@dataclass
class Branches:
    """``y = x * (sum of the chosen weights)``, element by element; work takes its time in a stream of the model."""

    cluster: FakeCluster
    seed: int = 0
    names: tuple[str, ...] = NAMES
    chosen: tuple[str, ...] = NAMES
    after_each: Callable[[str], None] = lambda _: None
    weights: dict[str, There] = field(default_factory=dict)
    running: Any = None
    is_current: bool = False

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.stream = self.cluster.create_stream(0)
        for name in self.names:
            self.weights[name] = There(name, self._array(random.normal(size=FEATURES)), self._array(np.zeros(FEATURES)))
        self.running = There("running", self._array(np.full((), self.seed, np.int64)))

    def _array(self, values: Any) -> FakeDeviceArray:
        array = FakeDeviceArray.of(self.cluster, np.asarray(values))
        array.stream = self.stream
        return array

    def run(self, work: Callable[[], None]) -> None:
        self.cluster.run(work, self.stream)

    def forward(self, x: Any) -> tuple[Any, Any]:
        y = self._array(np.zeros(FEATURES))
        weights = [self.weights[name].value for name in self.chosen]
        self.run(lambda: read(y).__setitem__(..., read(x) * sum(read(weight) for weight in weights)))
        return y, (x, self.chosen)

    def backward(self, saved: Any, dy: Any, on_gradient: OnGradient | None = None) -> Any:
        x, chosen = saved
        for name in chosen:
            grad = self.weights[name].grad
            self.run(lambda grad=grad: read(grad).__setitem__(..., read(grad) + read(x) * read(dy)))  # type: ignore[misc]
            if on_gradient is not None:
                on_gradient(name)
            self.after_each(name)

    def parameters(self) -> Sequence[Any]:
        return list(self.weights.values())

    def buffers(self) -> Sequence[Any]:
        return [self.running]

    @contextmanager
    def current(self) -> Iterator[None]:
        self.is_current = True
        try:
            yield
        finally:
            self.is_current = False

    def zero_grad(self) -> None:
        for weight in self.weights.values():
            grad = weight.grad
            self.run(lambda grad=grad: read(grad).fill(0.0))  # type: ignore[misc]

    def descend(self) -> None:
        """Take a step of gradient descent, in the stream of the model."""
        assert self.is_current, "the optimizer runs where the model computes"
        for weight in self.weights.values():
            value, grad = weight.value, weight.grad
            self.run(lambda value=value, grad=grad: read(value).__isub__(0.1 * read(grad)))  # type: ignore[misc]

    def seen(self, what: str) -> list[list[float]]:
        """Return all values or gradients, behind the work in the model's stream."""
        assert self.cluster.synchronize(self.stream)
        return [getattr(weight, what).get().tolist() for weight in self.weights.values()]

    def close(self) -> None:
        assert self.cluster.synchronize(self.stream)
        self.cluster.destroy_stream(self.stream)


@asynccontextmanager
async def replicas(seed: int = 0, **changes: Any) -> AsyncIterator[tuple[Sequence[Node], list[Branches]]]:
    cluster = FakeCluster(seed=seed, longest_delay=25)
    async with device_world(SIZE, cluster=cluster) as nodes:
        models = [Branches(cluster, seed=rank, **changes) for rank in range(SIZE)]
        yield nodes, models
        for model in models:
            model.close()
    assert cluster.faults == []


def inputs(model: Branches, rank: int) -> tuple[Any, Any]:
    """Return ``x`` and the gradient of the output; the product is ``rank + 1``, so the mean of ranks is 1.5."""
    return model._array(np.full(FEATURES, rank + 1.0)), model._array(np.ones(FEATURES))  # noqa: SLF001  # the module's own


async def step(ddp: DistributedDataParallel, model: Branches, rank: int) -> None:
    x, dy = inputs(model, rank)
    _, saved = await ddp.forward(x)
    await ddp.backward(saved, dy)


CONFIGS = {
    "default": DDPConfig(),
    "overlapping": DDPConfig(delay_all_reduce=False),
    "find unused": DDPConfig(find_unused_parameters=True, delay_all_reduce=False),
    "static": DDPConfig(static_graph=True),
}


@pytest.mark.parametrize(("config", "codec", "seed"), sampled(list(CONFIGS), [None, "int8"], [0, 1, 2]))
async def test_replicas_take_equal_steps_from_equal_values(config: str, codec: CodecChoice | None, seed: int) -> None:
    async with replicas(seed) as (nodes, models):
        begun = models[0].seen("value")

        async def main(node: Node) -> Any:
            model = models[node.rank]
            compression = GradientCompressionConfig(codec=codec) if codec else None
            async with open_replica(node, model, config=CONFIGS[config], compression=compression) as ddp:
                started = model.seen("value"), model.running.value.get().item()
                for _ in range(3):
                    ddp.zero_grad()
                    await step(ddp, model, node.rank)
                    await ddp.update(model.descend)
                return started, model.seen("value")

        for started, ended in await on_all(nodes, main):
            assert started == (begun, 0), "parameters and buffers are those of rank 0"
            np.testing.assert_allclose(ended, np.array(begun) - 3 * 0.1 * 1.5, rtol=1e-12 if codec is None else 1e-2)
        assert models[0].seen("value") == models[1].seen("value")


async def test_buckets_travel_while_the_backward_pass_goes_on() -> None:
    """The last gradient is not computed before a bucket has been reduced, on a stream of its own."""
    async with replicas(3) as (nodes, models):
        seen: list[int] = []

        async def main(node: Node) -> Any:
            model = models[node.rank]
            config = DDPConfig(delay_all_reduce=False)
            async with open_replica(node, model, config=config, bucket_size=FEATURES * 8) as ddp:
                layouts = ddp.synchronizer._layouts  # noqa: SLF001  # whose buckets have streams

                def after_each(name: str) -> None:
                    if name == NAMES[0] and layouts.layout is not None:
                        import time

                        for _ in range(400):  # of the thread that computes; the loop goes on
                            time.sleep(0.001)
                            records = [scheme.result for scheme in layouts.layout.schemes]
                            done = sum(_is_mean(record) for record in records)
                            if done:
                                break
                        seen.append(done)

                for turn in range(2):
                    ddp.zero_grad()
                    model.after_each = after_each if turn else lambda _: None
                    await step(ddp, model, node.rank)
                streams = {scheme.memory.stream for scheme in layouts.layout.schemes}  # type: ignore[union-attr]
                return streams, model.stream

        for streams, own in await on_all(nodes, main):
            assert len(streams) == len(NAMES), "a stream for each bucket"
            assert own not in streams
        assert seen == [1, 1], "the first bucket was reduced before the second gradient was reported"


def _is_mean(vector: Any) -> bool:
    return bool((vector.view == 1.5).all())


@pytest.mark.parametrize("seed", [0, 1])
async def test_micro_steps_weigh_equally(seed: int) -> None:
    async with replicas(seed) as (nodes, models):

        async def main(node: Node) -> Any:
            model = models[node.rank]
            async with open_replica(node, model) as ddp:
                ddp.zero_grad()
                with ddp.no_sync():
                    await step(ddp, model, node.rank)
                await step(ddp, model, node.rank + 2)
                return model.seen("grad")

        for found in await on_all(nodes, main):
            np.testing.assert_allclose(found, 2.5)  # of 1 and 3 on one rank, of 2 and 4 on the other


async def test_what_no_rank_reaches_keeps_its_gradient_and_what_some_reach_counts_as_zero_elsewhere() -> None:
    async with replicas(4) as (nodes, models):

        async def main(node: Node) -> Any:
            model = models[node.rank]
            config = DDPConfig(find_unused_parameters=True)
            async with open_replica(node, model, config=config) as ddp:
                grad = model.weights["third"].grad
                model.run(lambda: read(grad).fill(7.0 + node.rank))
                model.chosen = ("first", "second") if node.rank else ("first",)
                await step(ddp, model, node.rank)
                return model.seen("grad"), ddp.unused_parameters()

        for rank, (found, unused) in enumerate(await on_all(nodes, main)):
            assert unused == ("third",)
            np.testing.assert_allclose(found, [[1.5] * FEATURES, [1.0] * FEATURES, [7.0 + rank] * FEATURES])


@pytest.mark.parametrize("has_shadow", [False, True])
async def test_ranks_that_run_out_take_part_as_shadows(has_shadow: bool) -> None:
    async with replicas(5) as (nodes, models):

        async def main(node: Node) -> Any:
            model = models[node.rank]
            async with open_replica(node, model) as ddp:
                async with ddp.join(on_shadow=model.descend if has_shadow else None):
                    for _ in range(2 - node.rank):
                        ddp.zero_grad()
                        await step(ddp, model, node.rank)
                        await ddp.update(model.descend)
                return model.seen("value"), model.seen("grad")

        (values, grads), (others, _) = await on_all(nodes, main)
        np.testing.assert_allclose(grads, 1.0)  # the mean over the rank that still had inputs
        assert values == others


async def test_a_pass_that_fails_leaves_parameters_and_ends_on_all_ranks() -> None:
    async with replicas(6) as (nodes, models):

        async def main(node: Node) -> Any:
            model = models[node.rank]
            before = None
            try:
                async with open_replica(node, model) as ddp:
                    before = model.seen("value")
                    model.chosen = ("first",) if node.rank else NAMES
                    await step(ddp, model, node.rank)
            finally:
                assert model.seen("value") == before

        for error in await on_all_failing(nodes, main):
            assert isinstance(error, AsyncparError)
            assert "find_unused_parameters=True" in str(error)


async def test_other_modes_and_replicas_in_two_places_are_refused_on_all_ranks() -> None:
    async with replicas(7) as (nodes, models):

        async def asynchronous(node: Node) -> Any:
            async with open_replica(node, models[node.rank], mode=SynchronizationMode.ASYNCHRONOUS):
                pass

        for error in await on_all_failing(nodes, asynchronous):
            assert isinstance(error, UsageError)
            assert "mode: expected synchronous with parameters on devices, got asynchronous" in str(error)

        async def mixed(node: Node) -> Any:
            model = models[node.rank]
            if node.rank:
                weight = model.weights["first"]
                weight.value, weight.grad = np.zeros(FEATURES), np.zeros(FEATURES)
            async with open_replica(node, model):
                pass

        for error in await on_all_failing(nodes, mixed):
            assert isinstance(error, UsageError)
            assert "first cuda float64" in str(error)
