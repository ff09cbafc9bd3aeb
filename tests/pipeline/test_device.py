"""Stages on devices hand arrays to each other in every schedule; nobody waits for a device before the run is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.core.config.parallel import MemoryOptimizationStrategy
from asyncpar.core.config.parallel import PipelineScheduleType as Kind
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.nn import Parameter, Stage
from asyncpar.nn.parameter import OnGradient
from asyncpar.nn.stage import Deferred
from asyncpar.node import Node
from asyncpar.pipeline import PipelineSchedule
from asyncpar.pipeline.device import ArrayHeader
from asyncpar.pipeline.errors import ActionFailed
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.pipeline.offload.manager import MemoryManager
from asyncpar.pipeline.recompute import Recomputed
from asyncpar.pipeline.result import PipelineResult
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.pipeline.real_stages import InlineCompute, make_worker
from tests.products import in_turn

MICRO_BATCHES = 4
SHAPES = ((2, 3), (1, 3), (4, 3), (2, 3))
"""Of the micro-batches: a stage learns what comes from the message ahead of it."""


class Scale(Stage[Any]):
    """``y = weight * x + 1`` on the device, in a stream of its rank."""

    def __init__(
        self, cluster: FakeCluster, place: int, *, stream: int | None = None, is_strided: bool = False
    ) -> None:
        self._cluster = cluster
        self.stream = cluster.create_stream(0) if stream is None else stream
        self.weight = place + 2.0
        self.gradient = self.empty((), "float64")
        self.gradient.set(np.zeros(()))
        self._is_strided = is_strided
        self.made: list[tuple[tuple[int, ...], str]] = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> FakeDeviceArray:
        array = FakeDeviceArray(self._cluster, shape, np.dtype(dtype))
        array.stream = self.stream
        return array

    def forward(self, x: Any) -> tuple[Any, Any]:
        y = self.empty(x.shape, "float64")
        self._launch(lambda: write(y, self.weight * read(x) + 1.0))
        if self._is_strided:
            y.strides = (8, 8)
        return y, x

    def backward(
        self, saved: Any, dy: Any, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Any:
        dx = self.empty(dy.shape, "float64")
        self._launch(lambda: write(dx, self.weight * read(dy)))

        def weights(_: OnGradient | None) -> None:
            self._launch(lambda: write(self.gradient, read(self.gradient) + (read(saved) * read(dy)).sum()))

        if deferred is None:
            weights(None)
        else:
            deferred.append(weights)
        return dx

    def parameters(self) -> tuple[Parameter, ...]:
        return ()

    def _launch(self, work: Callable[[], None]) -> None:
        self._cluster.run(work, self.stream)


def read(array: Any) -> Any:
    return array.cluster.memory(array.address, array.nbytes).view(array.dtype).reshape(array.shape)


def write(array: Any, values: Any) -> None:
    read(array)[...] = values


def square_loss(y: Any, target: Any) -> tuple[Any, Any]:
    """Half the sum of squared differences, and its gradient, on the device and in the stream of ``y``."""
    loss, dy = FakeDeviceArray(y.cluster, (), np.dtype(float)), FakeDeviceArray(y.cluster, y.shape, y.dtype)
    loss.stream = dy.stream = y.stream

    def work() -> None:
        difference = read(y) - read(target)
        write(dy, difference)
        write(loss, 0.5 * (difference**2).sum())

    y.cluster.run(work, y.stream)
    return loss, dy


def samples() -> tuple[list[Any], list[Any]]:
    random = np.random.default_rng(5)
    return [random.normal(size=shape) for shape in SHAPES], [random.normal(size=shape) for shape in SHAPES]


def alone(count: int) -> tuple[list[float], list[float]]:
    """Return losses and gradients of one process, in numpy."""
    losses, gradients = [], [0.0] * count
    for x, target in zip(*samples(), strict=True):
        inputs = [x]
        for place in range(count):
            inputs.append((place + 2.0) * inputs[-1] + 1.0)
        dy = inputs.pop() - target
        losses.append(0.5 * float((dy**2).sum()))
        for place in reversed(range(count)):
            gradients[place] += float((inputs[place] * dy).sum())
            dy = (place + 2.0) * dy
    return losses, gradients


def make_executors(
    nodes: Sequence[Node],
    cluster: FakeCluster,
    schedule: PipelineSchedule,
    *,
    change: Callable[[Stage[Any]], Stage[Any]] = lambda stage: stage,
    compute: Callable[[], Any] = InlineCompute,
    **options: Any,
) -> tuple[list[PipelineExecutor], list[Scale]]:
    streams = [cluster.create_stream(0) for _ in nodes]
    stages = [
        Scale(cluster, place, stream=streams[schedule.rank_of(place)]) for place in range(schedule.num_virtual_stages)
    ]
    executors = [
        PipelineExecutor(
            schedule,
            [change(stages[virtual]) for virtual in schedule.virtual_stages_of(node.rank)],
            communicator=node.world,
            compute=compute(),
            loss=square_loss,
            **options,
        )
        for node in nodes
    ]
    return executors, stages


async def run_all(executors: Sequence[PipelineExecutor], cluster: FakeCluster) -> list[PipelineResult]:
    inputs, targets = ([FakeDeviceArray.of(cluster, one) for one in values] for values in samples())
    return await asyncio.gather(
        *(
            executor.run(inputs if executor.has_first_stage else None, targets if executor.has_last_stage else None)
            for executor in executors
        )
    )


def schedule_of(kind: Kind, ranks: int, chunks: int = 1) -> PipelineSchedule:
    return PipelineSchedule(
        num_stages=ranks, num_microbatches=MICRO_BATCHES, schedule_type=kind, num_model_chunks=chunks
    )


def check(results: Sequence[PipelineResult], stages: Sequence[Scale], cluster: FakeCluster, runs: int = 1) -> None:
    losses, gradients = alone(len(stages))
    [found] = [result.losses for result in results if result.losses]
    np.testing.assert_allclose(found, losses)
    for stage, gradient in zip(stages, gradients, strict=True):
        assert cluster.synchronize(stage.stream)
        np.testing.assert_allclose(stage.gradient.get(), runs * gradient)


@pytest.mark.parametrize(("kind", "ranks"), in_turn(Kind, [2, 3, 1]))
async def test_losses_and_gradients_are_those_of_one_process(
    kind: Kind, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(seed=ranks, longest_delay=20)
    async with device_world(ranks, cluster=cluster) as nodes:
        executors, stages = make_executors(nodes, cluster, schedule_of(kind, ranks))
        with monkeypatch.context() as context:
            context.setattr(FakeDeviceArray, "get", None)  # a copy to the host
            waits: list[int] = []
            synchronize = cluster.synchronize

            def counted(stream: int) -> bool:
                waits.append(stream)
                return synchronize(stream)

            context.setattr(cluster, "synchronize", counted)
            context.setattr(FakeDeviceArray, "__float__", _as_float)
            results = await run_all(executors, cluster)
        assert len(waits) <= MICRO_BATCHES, "the losses, when the run is over"
        check(results, stages, cluster)
        boundaries = sum(result.bytes_sent for result in results)
        assert boundaries == sum(result.bytes_received for result in results)
        assert (boundaries > 0) == (ranks > 1)
        _release(stages, cluster)


def _as_float(array: FakeDeviceArray) -> float:
    assert array.cluster.synchronize(array.stream)
    return float(read(array))


def _release(stages: Sequence[Scale], cluster: FakeCluster) -> None:
    for stream in {stage.stream for stage in stages}:
        assert cluster.synchronize(stream)
        cluster.destroy_stream(stream)


@pytest.mark.parametrize("chunks", [1, 2])
async def test_stages_compute_in_threads_and_run_again(chunks: int) -> None:
    cluster = FakeCluster(seed=7, longest_delay=10)
    workers: list[Any] = []

    def make() -> Any:
        workers.append(make_worker())
        return workers[-1]

    async with device_world(2, cluster=cluster) as nodes:
        executors, stages = make_executors(
            nodes, cluster, schedule_of(Kind.INTERLEAVED_ONE_F1B, 2, chunks), compute=make
        )
        for runs in (1, 2):
            check(await run_all(executors, cluster), stages, cluster, runs)
        _release(stages, cluster)
    for worker in workers:
        worker.close()


async def test_recomputed_stages_are_on_devices_too() -> None:
    cluster = FakeCluster(seed=2, longest_delay=10)
    async with device_world(2, cluster=cluster) as nodes:
        executors, stages = make_executors(nodes, cluster, schedule_of(Kind.GPIPE, 2), change=Recomputed)
        check(await run_all(executors, cluster), stages, cluster)
        _release(stages, cluster)


async def test_inference_returns_arrays_of_the_device() -> None:
    cluster = FakeCluster(seed=3, longest_delay=10)
    async with device_world(2, cluster=cluster) as nodes:
        executors, stages = make_executors(nodes, cluster, schedule_of(Kind.GPIPE, 2))
        inputs = [FakeDeviceArray.of(cluster, one) for one in samples()[0]]
        _, outputs = await asyncio.gather(*(executor.run_forward(inputs) for executor in executors))
        assert cluster.synchronize(stages[1].stream)
        found: list[Any] = list(outputs)
        for output, x in zip(found, samples()[0], strict=True):
            np.testing.assert_allclose(output.get(), 3.0 * (2.0 * x + 1.0) + 1.0)
        _release(stages, cluster)


class OnHost(Stage[Any]):
    """A stage of the host that passes on what it gets, or arrays of devices where it should not."""

    def __init__(self, output: Any = None) -> None:
        self._output = output

    def forward(self, x: Any) -> tuple[Any, Any]:
        return (np.ones(3) if self._output is None else self._output), None

    def backward(
        self, saved: Any, dy: Any, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Any:
        return np.ones(3)

    def parameters(self) -> tuple[Parameter, ...]:
        return ()


async def test_stages_on_the_host_of_some_ranks_are_refused_on_all() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        schedule = schedule_of(Kind.GPIPE, 2)
        stages: list[Any] = [Scale(cluster, 0), OnHost()]
        executors = [
            PipelineExecutor(schedule, [stage], communicator=node.world, compute=InlineCompute(), loss=square_loss)
            for node, stage in zip(nodes, stages, strict=True)
        ]
        inputs = [FakeDeviceArray.of(cluster, np.ones(3))] * MICRO_BATCHES
        async with asyncio.timeout(30):
            found = await asyncio.gather(*(one.run(inputs, inputs) for one in executors), return_exceptions=True)
        for error in found:
            assert isinstance(error, SettingsDiffer)
            assert "those of ranks 0 are, and those of ranks 1 are on the host" in str(error)
        _release(stages[:1], cluster)


async def test_device_arrays_of_a_stage_of_the_host_and_strided_ones_end_the_run_on_all_ranks() -> None:
    cluster = FakeCluster()
    array = FakeDeviceArray.of(cluster, np.ones(3))
    for text in ("its stage needs a stream and empty", "pass a contiguous copy"):
        first: Any = OnHost(array) if "stage" in text else Scale(cluster, 0, is_strided=True)
        async with device_world(2, cluster=cluster) as nodes:
            schedule = schedule_of(Kind.GPIPE, 2)
            last: Any = OnHost() if isinstance(first, OnHost) else Scale(cluster, 1)
            executors = [
                PipelineExecutor(schedule, [stage], communicator=node.world, compute=InlineCompute(), loss=square_loss)
                for node, stage in zip(nodes, (first, last), strict=True)
            ]
            inputs = [FakeDeviceArray.of(cluster, np.ones((2, 3)))] * MICRO_BATCHES
            async with asyncio.timeout(30):
                mine, other = await asyncio.gather(
                    *(one.run(inputs, inputs) for one in executors), return_exceptions=True
                )
            assert isinstance(mine, ActionFailed | UsageError), mine
            assert text in str(mine)
            assert isinstance(other, BaseException)
            _release([stage for stage in (first, last) if isinstance(stage, Scale)], cluster)


async def test_what_cannot_be_is_refused_when_the_executor_is_made() -> None:
    cluster = FakeCluster()
    async with device_world(1, cluster=cluster) as nodes:
        schedule = schedule_of(Kind.GPIPE, 1, 2)
        there = Scale(cluster, 0)
        with pytest.raises(UsageError, match="all stages of a rank on devices, or none, but of 2 only chunks 0 have"):
            PipelineExecutor(schedule, [there, OnHost()], communicator=nodes[0].world, compute=InlineCompute())
        others = [there, Scale(cluster, 1)]
        with pytest.raises(UsageError, match="expected all stages of a rank in one stream"):
            PipelineExecutor(schedule, others, communicator=nodes[0].world, compute=InlineCompute())
        for memory in (MemoryManager(limit=1000), MemoryManager(strategy=MemoryOptimizationStrategy.EXTREME)):
            with pytest.raises(UsageError, match="activations are neither counted nor moved; recompute instead"):
                PipelineExecutor(
                    schedule, [there, there], communicator=nodes[0].world, compute=InlineCompute(), memory=memory
                )
        _release(others, cluster)


@pytest.mark.parametrize(("shape", "dtype"), [([2, -1], "float32"), ([2], "object"), ([2], "no dtype")])
def test_headers_that_no_array_has_are_refused(shape: list[int], dtype: str) -> None:
    with pytest.raises(ProtocolError, match="header of an array"):
        ArrayHeader(shape=shape, dtype=dtype).check()
