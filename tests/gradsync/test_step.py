"""Buckets leave at the right virtual time, and figures follow from that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.core.observe.recorder import open_recorder
from asyncpar.core.observe.records import RankIdentity
from asyncpar.errors import UsageError
from asyncpar.gradsync import (
    GradientBucketingConfig,
    GradientCompressionConfig,
    GradientSynchronizer,
    SyncStatistics,
    SyncStep,
)
from asyncpar.nn import Array, Parameter
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world

SECONDS_PER_BUCKET = 1.0


@dataclass(frozen=True)
class NoTraffic:
    operations: tuple[()] = ()
    payload_bytes = 0


class SlowCommunicator:
    """Stands in for one of two ranks that hold the same gradients: a reduction takes one virtual second."""

    rank, size, ranks, traffic, bandwidth, hosts = 0, 2, (0, 1), NoTraffic(), 1.0, ((0, 1),)
    timeout = 300.0

    def __init__(self) -> None:
        self.started: list[float] = []
        world = SimpleNamespace(size=2, generation=0)
        links = SimpleNamespace(
            recorder=open_recorder(RankIdentity(rank=0, size=2)), world=world, refuse_fixed_ranks=None
        )
        table = SimpleNamespace(links=links, take_abort=lambda *_: False)
        group = SimpleNamespace(notices={})
        self._engine = SimpleNamespace(table=table, group=group, skip=lambda _: 1)

    async def all_reduce(self, x: Array, **_: Any) -> Array:
        if x.size > 1:  # gradients, and not the exchange that ends a step
            self.started.append(asyncio.get_running_loop().time())
            await asyncio.sleep(SECONDS_PER_BUCKET)
        return x

    async def all_gather(self, x: Array, **_: Any) -> Array:
        return np.stack([x, x])

    async def broadcast_object(self, value: object, **_: Any) -> object:
        return value

    async def all_gather_object(self, value: object, **_: Any) -> list[object]:
        return [value, value]

    def subgroup(self, ranks: Iterable[int], **_: Any) -> SlowCommunicator:
        assert tuple(ranks) == self.ranks
        return self

    def close(self) -> None:
        """The group is this one."""

    def claim(self, name: str, owner: object) -> None:
        """No other synchronizer is there."""

    def algorithms(self, _: str) -> tuple[str, ...]:
        return ()

    def is_pinned(self, _: str) -> bool:
        return False

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, dtype)


def make_synchronizer(communicator: object, **bucketing: Any) -> GradientSynchronizer:
    config = ThreeDParallelismConfig(dp_size=2)
    return GradientSynchronizer(
        config,
        RankMapping(config, 0),
        communicator=cast(Communicator, communicator),
        bucketing=GradientBucketingConfig(bucket_size_mb=0.0001, **bucketing),
    )


def make_parameters(count: int) -> Sequence[Parameter]:
    return [Parameter(f"p{i}", np.ones(100)) for i in range(count)]


def run_backward(*, overlap: bool) -> tuple[list[float], SyncStatistics]:
    """Spend one second on each of three gradients, each a bucket of its own; return when each bucket went."""

    async def main() -> tuple[list[float], SyncStatistics]:
        communicator = SlowCommunicator()
        synchronizer = make_synchronizer(communicator, overlap_communication=overlap)
        async with synchronizer.step(make_parameters(3)) as step:
            for name in ("p2", "p1", "p0"):
                await asyncio.sleep(1.0)
                step.ready(name)
        return communicator.started, synchronizer.get_sync_stats()

    return run_virtual(main())


def test_a_bucket_goes_as_soon_as_its_gradients_are_final() -> None:
    started, statistics = run_backward(overlap=True)
    assert started == pytest.approx([1.0, 2.0, 3.0])
    assert statistics.total_sync_time == pytest.approx(3.0)
    assert statistics.total_exposed_time == pytest.approx(1.0)
    assert statistics.overlap_fraction == pytest.approx(2 / 3)


def test_without_overlap_buckets_go_one_by_one_at_the_end() -> None:
    started, statistics = run_backward(overlap=False)
    assert started == pytest.approx([3.0, 4.0, 5.0])
    assert statistics.total_exposed_time == pytest.approx(3.0)
    assert statistics.overlap_fraction == pytest.approx(0.0)


def test_complete_buckets_travel_at_the_same_time() -> None:
    async def main() -> tuple[list[float], float]:
        communicator = SlowCommunicator()
        async with make_synchronizer(communicator).step(make_parameters(5)):
            pass
        return communicator.started, asyncio.get_running_loop().time()

    started, end = run_virtual(main())
    assert started == [0.0] * 5
    assert end == pytest.approx(SECONDS_PER_BUCKET)


def test_a_gradient_is_reported_once_and_by_a_known_name() -> None:
    async def main() -> None:
        async with make_synchronizer(SlowCommunicator()).step(make_parameters(2)) as step:
            with pytest.raises(UsageError, match="expected a parameter of this step, got 'p9'"):
                step.ready("p9")
            step.ready("p1")
            with pytest.raises(UsageError, match="the gradient of 'p1' was already reported"):
                step.ready("p1")

    run_virtual(main())


def test_a_report_after_the_block_is_a_mistake() -> None:
    async def main() -> None:
        async with make_synchronizer(SlowCommunicator()).step(make_parameters(2)) as step:
            pass
        with pytest.raises(UsageError, match="already reported, or the step's block was left"):
            step.ready("p1")

    run_virtual(main())


def test_a_report_after_a_failure_is_ignored() -> None:
    async def main() -> None:
        synchronizer = make_synchronizer(SlowCommunicator())
        held: list[SyncStep] = []

        async def fail() -> None:
            async with synchronizer.step(make_parameters(2)) as step:
                held.append(step)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        held[0].ready("p1")
        assert synchronizer.get_sync_stats().total_sync_operations == 0

    run_virtual(main())


def test_steps_of_one_synchronizer_do_not_nest() -> None:
    async def main() -> None:
        synchronizer = make_synchronizer(SlowCommunicator())
        async with synchronizer.step(make_parameters(2)):
            with pytest.raises(UsageError, match="previous step of this synchronizer is still under way"):
                async with synchronizer.step(make_parameters(2)):
                    pass
            with pytest.raises(UsageError, match=r"clear_buffers: .* still under way"):
                synchronizer.clear_buffers()

    run_virtual(main())


def test_a_world_of_another_size_is_refused() -> None:
    config = ThreeDParallelismConfig(dp_size=2, tp_size=2)
    with pytest.raises(UsageError, match=r"expected 4 ranks \(dp_size \* tp_size \* pp_size\), got 2"):
        GradientSynchronizer(config, RankMapping(config, 0), communicator=cast(Communicator, SlowCommunicator()))


@pytest.mark.parametrize(("dp_size", "rank", "message"), [(3, 0, "communicator: expected 3"), (2, 1, "rank_mapping: ")])
def test_a_communicator_of_another_group_is_refused(dp_size: int, rank: int, message: str) -> None:
    config = ThreeDParallelismConfig(dp_size=dp_size)
    with pytest.raises(UsageError, match=message):
        GradientSynchronizer(config, RankMapping(config, rank), communicator=cast(Communicator, SlowCommunicator()))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"quantization_bits": 0}, "quantization_bits: expected one of 1, 4, 8, 16, 32, got 0"),
        ({"compression_ratio": 1.5}, "compression_ratio: expected 0 < ratio <= 1, got 1.5"),
        ({"compression_ratio": 0.0}, "compression_ratio: expected 0 < ratio <= 1, got 0.0"),
        ({"codec": "int9"}, "int9"),
    ],
)
def test_compression_out_of_range_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GradientCompressionConfig(**setting)


@pytest.mark.parametrize(
    ("ratio", "bits", "name"),
    [(0.1, 8, "topk:0.1+int8"), (1.0, 8, "int8"), (0.01, 32, "topk:0.01"), (1.0, 1, "sign"), (1.0, 32, "none")],
)
def test_ratio_and_bits_together_are_a_codec(ratio: float, bits: int, name: str) -> None:
    compression = GradientCompressionConfig(enable_compression=True, compression_ratio=ratio, quantization_bits=bits)
    assert compression.codec_name == name
    assert compression.make_codec().name == name
    assert GradientCompressionConfig(compression_ratio=ratio, quantization_bits=bits).codec_name == "none"


@pytest.mark.parametrize("setting", [{"bucket_size_mb": 0.0}, {"max_buckets": 0}])
def test_bucketing_out_of_range_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(setting))}: expected"):
        GradientBucketingConfig(**setting)


@pytest.mark.parametrize("compression", [False, True])
async def test_bytes_on_the_wire_are_counted_exactly(compression: bool) -> None:
    count, size = 30_000, 3

    async def main(node: Any) -> SyncStatistics:
        config = ThreeDParallelismConfig(dp_size=size)
        synchronizer = GradientSynchronizer(
            config,
            RankMapping(config, node.rank),
            communicator=node.world,
            compression=GradientCompressionConfig(codec="int8" if compression else None),
        )
        parameter = Parameter("p", np.zeros(count, np.float32))
        parameter.grad[:] = np.random.default_rng(node.rank).normal(size=count)
        for _ in range(2):
            await synchronizer.synchronize_gradients(cast(Any, Model([parameter])))
        return synchronizer.get_sync_stats()

    async with local_world(size, pin="all_reduce:0-inf@ring;all_gather:0-inf@ring;all_to_all:0-inf@pairwise") as nodes:
        for statistics in await asyncio.gather(*(main(node) for node in nodes)):
            plain = 2 * 2 * (size - 1) * (count // size) * 4
            row = 4 + 10_000 + 4 * 10
            assert statistics.bytes_uncompressed == pytest.approx(plain, abs=600)
            assert statistics.bytes_on_wire == pytest.approx(
                2 * 2 * (size - 1) * row if compression else plain, abs=600
            )
            assert (statistics.compression_ratio_achieved > 3.8) == compression
            assert (statistics.residual_norm > 0.0) == compression
            assert statistics.total_sync_operations == 2
            assert statistics.average_sync_time_ms > 0.0
            assert statistics.communication_efficiency > 0.0


@dataclass(frozen=True)
class Model:
    held: Sequence[Parameter]

    def parameters(self) -> Sequence[Parameter]:
        return self.held
