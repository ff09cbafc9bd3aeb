"""Communication is hidden behind compute: exact times of whole steps, on virtual time over two real ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from asyncpar.collectives.call import WatchedCall
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import (
    GradientBucketingConfig,
    GradientCompressionConfig,
    GradientSynchronizer,
    SyncStatistics,
)
from asyncpar.nn import Array, Parameter
from asyncpar.node import Node
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world

COUNT = 250_000
"""Values of a gradient: a second on the wire in float32."""

BYTES_PER_SECOND = 1_000_000.0
FREE_BYTES = 1_000
"""Messages about messages take no time, so that the times of steps are round."""


class SlowWire:
    """A communicator whose arrays go over one wire, one after the other, at ``BYTES_PER_SECOND``."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._wire = asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def all_reduce(self, x: Array, *arguments: Any, **options: Any) -> Coroutine[Any, Any, Array]:
        return self._after_the_wire(x, self._communicator.all_reduce(x, *arguments, **options))

    def all_to_all(self, x: Array, *arguments: Any, **options: Any) -> Coroutine[Any, Any, Array]:
        return self._after_the_wire(x, self._communicator.all_to_all(x, *arguments, **options))

    def all_gather(self, x: Array, *arguments: Any, **options: Any) -> Coroutine[Any, Any, Array]:
        return self._after_the_wire(x, self._communicator.all_gather(x, *arguments, **options))

    def _after_the_wire(self, x: Array, call: Coroutine[Any, Any, Array]) -> Coroutine[Any, Any, Array]:
        """Return ``call``, delayed; ended before it begins, it is aborted on all ranks like any call."""

        async def delayed() -> Array:
            await self._carry(x.nbytes)
            return await call

        return WatchedCall(delayed(), call.close)

    async def _carry(self, count: int) -> None:
        if count > FREE_BYTES:
            async with self._wire:
                await asyncio.sleep(count / BYTES_PER_SECOND)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one rank saw of a step."""

    seconds: float
    statistics: SyncStatistics
    means: tuple[float, ...]


def synchronizer_of(node: Node, *, overlap: bool, int8: bool, bucket_size_mb: float = 0.5) -> GradientSynchronizer:
    config = ThreeDParallelismConfig(dp_size=node.size)
    return GradientSynchronizer(
        config,
        RankMapping(config, node.rank),
        communicator=cast(Communicator, SlowWire(node.world)),
        bucketing=GradientBucketingConfig(bucket_size_mb=bucket_size_mb, overlap_communication=overlap),
        compression=GradientCompressionConfig(codec="int8" if int8 else None),
    )


async def train(node: Node, compute: Sequence[float], *, overlap: bool, int8: bool) -> Run:
    """Spend ``compute`` seconds on each gradient, the last registered first; each has a bucket of its own."""
    loop = asyncio.get_running_loop()
    parameters = [Parameter(f"p{index}", np.zeros(COUNT, np.float32)) for index in range(len(compute))]
    for index, parameter in enumerate(parameters):
        parameter.grad.fill(float(127 * (index + 2 * node.rank)))
    synchronizer = synchronizer_of(node, overlap=overlap, int8=int8)
    start = loop.time()
    async with synchronizer.step(parameters) as step:
        for seconds, parameter in zip(compute, reversed(parameters), strict=True):
            await asyncio.sleep(seconds)
            step.ready(parameter.name)
    means = tuple(float(parameter.grad.mean()) for parameter in parameters)
    return Run(seconds=loop.time() - start, statistics=synchronizer.get_sync_stats(), means=means)


def run(compute: Sequence[Sequence[float]], *, overlap: bool = True, int8: bool = False) -> list[Run]:
    """Run a step on two ranks; ``compute`` has the seconds of each."""

    async def main() -> list[Run]:
        async with local_world(len(compute)) as nodes:
            steps = (train(node, each, overlap=overlap, int8=int8) for node, each in zip(nodes, compute, strict=True))
            return list(await asyncio.gather(*steps))

    runs = run_virtual(main())
    for one in runs:
        assert one.means == pytest.approx([127.0 * (index + 1) for index in range(len(compute[0]))])
    return runs


@pytest.mark.parametrize(
    ("each", "makespan"),
    [
        (1.0, 11.0),  # as long as communication: all but the last bucket is hidden
        (1.5, 16.0),
        (0.25, 10.25),  # the wire is the bottleneck: it waits for the first gradient only
        (0.0, 10.0),
    ],
)
def test_with_overlap_a_step_takes_the_longer_of_both_and_one_bucket(each: float, makespan: float) -> None:
    for one in run([[each] * 10] * 2):
        assert one.seconds == pytest.approx(makespan)


@pytest.mark.parametrize("each", [1.0, 1.5, 0.25])
def test_without_overlap_a_step_takes_the_sum_of_both(each: float) -> None:
    for one in run([[each] * 10] * 2, overlap=False):
        assert one.seconds == pytest.approx(10 * each + 10.0)
        assert one.statistics.overlap_fraction == pytest.approx(0.0)


def test_nine_tenths_are_hidden_behind_compute_of_the_same_length() -> None:
    communication, compute = 10.0, 10.0
    for one in run([[1.0] * 10] * 2):
        hidden = 1.0 - (one.seconds - compute) / communication
        assert hidden == pytest.approx(0.9)
        assert one.statistics.overlap_fraction == pytest.approx(hidden)
        assert one.statistics.total_exposed_time == pytest.approx(1.0)


def test_buckets_that_wait_for_the_wire_are_hidden_behind_a_slow_last_layer() -> None:
    for one in run([[0.5] * 9 + [10.0]] * 2):
        assert one.seconds == pytest.approx(15.5)
        assert one.statistics.total_exposed_time == pytest.approx(1.0)


def test_the_slowest_rank_sets_the_pace_and_the_fast_one_sees_its_wait() -> None:
    fast, slow = run([[0.5] * 4, [2.0] * 4])
    assert fast.seconds == slow.seconds == pytest.approx(9.0)
    assert slow.statistics.total_exposed_time == pytest.approx(1.0)
    assert fast.statistics.total_exposed_time == pytest.approx(7.0)


def test_compressed_buckets_overlap_as_well() -> None:
    plain = run([[1.0] * 10] * 2)[0]
    for one in run([[1.0] * 10] * 2, int8=True):
        last_bucket = one.seconds - 10.0
        assert 0.0 < last_bucket < plain.seconds - 10.0
        assert one.statistics.total_exposed_time == pytest.approx(last_bucket)
        assert one.statistics.overlap_fraction == pytest.approx(0.9)


def test_buckets_rebuilt_in_the_observed_order_hide_more_from_the_second_step_on() -> None:
    """Gradients that become final in turns complete the buckets that were planned late, and those rebuilt early."""
    turns = ["p7", "p5", "p3", "p1", "p6", "p4", "p2", "p0"]

    async def take_steps(node: Node) -> list[float]:
        loop = asyncio.get_running_loop()
        parameters = [Parameter(f"p{index}", np.ones(COUNT, np.float32)) for index in range(8)]
        synchronizer = synchronizer_of(node, overlap=True, int8=False, bucket_size_mb=2.0)
        seconds = []
        for _ in range(3):
            start = loop.time()
            async with synchronizer.step(parameters) as step:
                for name in turns:
                    await asyncio.sleep(1.0)
                    step.ready(name)
            seconds.append(loop.time() - start)
        return seconds

    async def main() -> list[list[float]]:
        async with local_world(2) as nodes:
            return list(await asyncio.gather(*(take_steps(node) for node in nodes)))

    for seconds in run_virtual(main()):
        assert seconds == pytest.approx([12.0, 10.0, 10.0])
