"""Bytes that replicas hold, counted, against the formulas."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.nn.optimizers import SGD, Adam
from asyncpar.zero import ZeroEngine, ZeROMemoryStats, ZeROStage, memory_reduction
from asyncpar.zero.buffers import BufferPool
from asyncpar.zero.config import MIB, ZeROConfig
from asyncpar.zero.memory import TransientBytes
from asyncpar.zero.partition import Spec, make_budget, make_partition
from tests.products import sampled
from tests.zero.replicas import (
    EVEN_SHAPES,
    SHAPES,
    draw_parameters,
    engines,
    give_gradients,
    on_all,
    take_steps,
    whole_values,
)

STAGES = list(ZeROStage)


async def reduce_once(engine: ZeroEngine) -> ZeROMemoryStats:
    """Return what is held between the reduction and the step."""
    give_gradients(engine.parameters, rank=engine.communicator.rank, step=0)
    await engine.reduce()
    return engine.memory_stats()


def formula(stage: ZeROStage, size: int, *, parameters: int, gradients: int, states: int) -> float:
    """Return the bytes for each value."""
    return (
        parameters / (size if stage.shards_parameters else 1)
        + gradients / (size if stage.shards_gradients else 1)
        + states / (size if stage.shards_states else 1)
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
async def test_single_precision_takes_what_the_formulas_say(size: int, stage: ZeROStage) -> None:
    """16, 8 + 8/N, 4 + 12/N and 16/N bytes for each value."""
    async with engines(size, stage, rule=Adam(), shapes=EVEN_SHAPES) as made:
        expected = formula(stage, size, parameters=4, gradients=4, states=8)
        for stats in await on_all(made, reduce_once):
            assert stats.bytes_per_value == expected
            assert stats.whole == 16 * stats.values


@pytest.mark.parametrize(("size", "stage", "storage"), sampled([2, 4], STAGES, ["bfloat16", "float16"]))
async def test_mixed_precision_takes_what_the_formulas_say(size: int, stage: ZeROStage, storage: str) -> None:
    """16, 4 + 12/N, 2 + 14/N and 16/N bytes for each value."""
    async with engines(size, stage, rule=Adam(), shapes=EVEN_SHAPES, dtype=storage) as made:
        expected = formula(stage, size, parameters=2, gradients=2, states=12)
        for stats in await on_all(made, reduce_once):
            assert stats.bytes_per_value == expected
            assert stats.whole == 16 * stats.values


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [2, 3, 4])
async def test_what_does_not_divide_takes_less_than_a_value_per_parameter_more(size: int, stage: ZeROStage) -> None:
    async with engines(size, stage, rule=Adam(), shapes=SHAPES) as made:
        stats = await on_all(made, reduce_once)
        exact = formula(stage, size, parameters=4, gradients=4, states=8) * stats[0].values
        assert all(each.kept <= exact + 16 * len(SHAPES) for each in stats)
        assert sum(each.kept for each in stats) == pytest.approx(size * exact)


@pytest.mark.parametrize(("stage", "expected"), [(1, 0.25), (2, 0.5), (3, 0.75)])
async def test_equal_parts_over_four_ranks_are_reduced_by_a_quarter_a_stage(stage: int, expected: float) -> None:
    """Values, gradients and one state of four bytes each."""
    async with engines(4, ZeROStage.of(stage), rule=SGD(momentum=0.9), shapes=EVEN_SHAPES) as made:
        for stats in await on_all(made, reduce_once):
            assert stats.reduction == expected == memory_reduction(ZeROStage.of(stage), 4)


@pytest.mark.parametrize("stage", [ZeROStage.STAGE2, ZeROStage.STAGE3])
async def test_whole_gradients_are_gone_when_they_are_reduced(stage: ZeROStage) -> None:
    async with engines(2, stage) as made:
        await on_all(made, reduce_once)
        assert not any(parameter.has_grad for engine in made for parameter in engine.parameters)


async def test_gathered_parameters_count_while_they_are_there() -> None:
    async with engines(2, ZeROStage.STAGE3, shapes=EVEN_SHAPES) as made:
        before = made[0].memory_stats()
        await on_all(made, ZeroEngine.gather)
        during = made[0].memory_stats()
        assert during.gathered == 4 * during.values
        assert during.total == during.kept + during.gathered + during.buffers
        for engine in made:
            engine.release()
        after = made[0].memory_stats()
        assert before.gathered == after.gathered == 0
        assert after.transient_peak >= 4 * after.values
        assert after.parameters == before.parameters == 2 * after.values


async def test_buffers_are_kept_only_where_that_is_asked_for() -> None:
    for pinned in (True, False):
        async with engines(2, ZeROStage.STAGE2, pin_memory=pinned) as made:
            stats = (await on_all(made, reduce_once))[0]
            assert (stats.buffers > 0) is pinned
            assert stats.transient_peak > 0


def test_a_pool_lends_the_smallest_memory_that_fits_again() -> None:
    held = TransientBytes()
    pool = BufferPool(np.empty, reuses=True, bytes_held=held)
    single = np.dtype(np.float32)
    small, large = pool.take((2, 5), single), pool.take((100,), single)
    for lent in (large, small):
        pool.give_back(lent)
    again = pool.take((9,), single)
    assert again.memory is small.memory
    assert again.array.shape == (9,)
    assert held.buffers == 440
    pool.discard(again)
    assert held.buffers == 400
    pool.clear()
    assert held.buffers == 0
    assert held.peak == 440


def test_a_pool_keeps_few_buffers() -> None:
    held = TransientBytes()
    pool = BufferPool(np.empty, reuses=True, bytes_held=held)
    lent = [pool.take((count,), np.dtype(np.float64)) for count in range(1, 10)]
    for each in lent:
        pool.give_back(each)
    assert held.buffers == 8 * sum(range(1, 10))
    pool.trim(4)
    assert held.buffers == 8 * sum(range(2, 10))


def test_what_is_too_small_gives_way_to_what_fits() -> None:
    held = TransientBytes()
    pool = BufferPool(np.empty, reuses=True, bytes_held=held)
    for count in (3, 5, 4, 9):
        pool.give_back(pool.take((count,), np.dtype(np.float64)))
    assert held.buffers == 8 * 9


def test_buffers_of_narrow_buckets_serve_wider_ones() -> None:
    """Rows, and the row of this rank, have memory of their own: neither takes that of the other."""
    held = TransientBytes()
    single = np.dtype(np.float32)
    pool = BufferPool(np.empty, reuses=True, bytes_held=held, usual={single: range(3, 11)})
    for width in (3, 10, 7):
        rows, row = pool.take((4, width), single), pool.take((width,), single)
        assert (rows.array.shape, row.array.shape) == ((4, width), (width,))
        for lent in (row, rows):
            pool.give_back(lent)
        assert held.buffers == 4 * (40 + 10)
    wide = pool.take((4, 30), single)
    assert held.buffers == 4 * (40 + 10 + 120)
    several = [wide, *(pool.take((4, 10), single) for _ in range(3))]
    for lent in several:
        pool.give_back(lent)
    pool.trim(2)
    assert held.buffers == 4 * (2 * 40 + 10 + 120)


@pytest.mark.parametrize("stage", list(ZeROStage))
@pytest.mark.parametrize("mebibytes", [16, 64, 400, 4_000])
def test_what_waits_by_default_is_little_beside_what_sharding_saves(stage: ZeROStage, mebibytes: int) -> None:
    """A quarter of the parameters, of which values, gradients and states of Adam take four."""
    config = ZeROConfig(stage=stage)
    single = np.dtype(np.float32)
    specs = [Spec(name=f"p{layer}", shape=(mebibytes, 64, 64), dtype=single) for layer in range(64)]
    nbytes = mebibytes * MIB
    partition = make_partition(specs, 4, bucket_bytes=config.bucket_bytes_of(nbytes))
    budget = make_budget(partition, config, lambda *_: 0)
    assert budget.window >= 2, "one bucket is packed while another one travels"
    assert budget.buffers <= max(nbytes / 5, 8 * MIB)
    assert config.idle_bytes_of(nbytes) <= max(nbytes / 8, 32 * MIB)
    assert config.idle_bytes_of(nbytes) <= config.most_bytes


def test_who_sets_a_limit_allows_as_much_to_wait() -> None:
    assert ZeROConfig(max_memory_usage_mb=1024).idle_bytes_of(64 * MIB) == 1024 * MIB
    assert ZeROConfig().idle_bytes_of(64 * MIB) == 32 * MIB
    assert ZeROConfig(pin_memory=False).idle_bytes_of(64 * MIB) == 0


@pytest.mark.parametrize("stage", [ZeROStage.STAGE1, ZeROStage.STAGE2, ZeROStage.STAGE3])
async def test_buffers_come_to_what_is_known_before_the_first_step(stage: ZeROStage) -> None:
    shapes = {f"layer{number}/{name}": shape for number in range(6) for name, shape in _LAYER.items()}
    async with engines(4, stage, shapes=shapes) as made:
        for step in range(3):
            await take_steps(made, step)
            await on_all(made, whole_values) if stage.shards_parameters else None
        await take_steps(made, 3)
        for engine in made:
            stats, budget = engine.memory_stats(), engine._budget  # noqa: SLF001  # how much a rank reserves for buckets is no statistic
            assert stats.buffers <= budget.buffers + engine.config.idle_bytes_of(4 * stats.values)
            assert stats.buffers - engine._bytes_held.arrays.idle_bytes <= budget.buffers  # noqa: SLF001  # what waits is counted with buffers
            assert engine.memory_needed() >= stats.kept + stats.transient_peak


_LAYER: dict[str, tuple[int, ...]] = {"norm": (64,), "weight": (64, 256), "bias": (256,), "back": (256, 64)}


async def test_buckets_lie_where_other_ranks_of_the_host_read_them() -> None:
    async with engines(2, ZeROStage.STAGE1, transport="shm", shapes={"a": (64, 64)}) as made:
        asked: list[tuple[int, ...]] = []
        pool = made[0]._means.pool  # noqa: SLF001  # the pool is made by the engine and shown to nobody
        empty = pool._empty  # noqa: SLF001  # notes which memory is asked for: where arrays lie is no statistic

        def ask(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
            asked.append(shape)
            return empty(shape, dtype)

        pool._empty = ask  # noqa: SLF001  # notes which memory is asked for: where arrays lie is no statistic
        await on_all(made, reduce_once)
        assert asked == [(64 * 64,), (64 * 32,)]


LARGE: dict[str, tuple[int, ...]] = {"first": (256, 512), "second": (256, 512), "third": (256, 512)}
"""Parameters of 512 KiB each."""


@pytest.mark.parametrize("stage", [ZeROStage.STAGE2, ZeROStage.STAGE3])
async def test_memory_of_gradients_and_gathered_values_is_used_again(stage: ZeROStage) -> None:
    async with engines(2, stage, shapes=LARGE) as made:
        pools = [engine._means.arrays for engine in made]  # noqa: SLF001  # how often memory is taken from the system is no statistic
        await take_steps(made, 0, 1)
        await on_all(made, whole_values) if stage.shards_parameters else None
        before = [pool.blocks_made for pool in pools]
        assert min(before) > 0
        for step in range(2, 5):
            await take_steps(made, step)
            await on_all(made, whole_values) if stage.shards_parameters else None
        # a step that overlaps more than those before takes more once; steps without reuse would take as much each
        assert all(pool.blocks_made <= 2 * count for pool, count in zip(pools, before, strict=True))
        stats = made[0].memory_stats()
        assert stats.buffers >= pools[0].idle_bytes > 0
        assert stats.transient_peak >= stats.buffers


@pytest.mark.parametrize(("settings", "kept"), [({"pin_memory": False}, 0), ({"max_memory_usage_mb": 2.8}, 2.8 * MIB)])
async def test_memory_that_waits_keeps_within_the_limit(settings: dict[str, Any], kept: float) -> None:
    async with engines(2, ZeROStage.STAGE2, shapes=LARGE, bucket_size_mb=0.5, **settings) as made:
        await take_steps(made, 0, 1)
        assert all(engine.memory_stats().buffers <= kept for engine in made)


async def test_a_gradient_is_let_go_when_it_is_packed() -> None:
    """The memory of the last layer's serves the layers before it, in a backward pass that is slow enough."""
    async with engines(1, ZeROStage.STAGE2, shapes=LARGE, bucket_size_mb=0.5) as (engine,):
        for parameter in reversed(engine.parameters):
            parameter.accumulate(1.0)
            engine.ready(parameter.name)
            for _ in range(10):  # a bucket of one rank is packed in a few turns of the loop
                await asyncio.sleep(0)
        await engine.reduce()
        assert engine._means.arrays.blocks_made == 1  # noqa: SLF001  # how often memory is taken from the system is no statistic


@pytest.mark.parametrize("transport", ["inproc", "shm"])
async def test_a_parameter_that_fills_a_bucket_is_not_copied_into_it(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    for name in ("pack_rows", "pack_own", "unpack_rows"):
        monkeypatch.setattr(f"asyncpar.zero.buckets.{name}", lambda *_, name=name, **__: copied.append(name))
    async with engines(2, ZeROStage.STAGE3, shapes=LARGE, bucket_size_mb=0.5, transport=transport) as made:
        await take_steps(made, 0)
        values = await on_all(made, whole_values)
    assert not copied
    expected = draw_parameters(LARGE)
    for whole in values:
        assert not any((whole[one.name] == one.value).all() for one in expected), "they have moved"
        assert all(np.allclose(whole[one.name], one.value, atol=0.1) for one in expected), "each to its place"


@pytest.mark.parametrize("bucket_size_mb", [0.5, 25.0])
@pytest.mark.parametrize("stage", [ZeROStage.STAGE2, ZeROStage.STAGE3])
async def test_who_holds_a_gradient_or_value_keeps_it(stage: ZeROStage, bucket_size_mb: float) -> None:
    """References, views and memoryviews of earlier steps show what they showed, while memory is used again."""
    async with engines(2, stage, shapes=LARGE, bucket_size_mb=bucket_size_mb) as made:
        held: list[tuple[Any, bytes]] = []
        for step in range(4):
            for engine in made:
                engine.zero_grad()
                give_gradients(engine.parameters, rank=engine.communicator.rank, step=step)
                gradients = [parameter.grad for parameter in engine.parameters]
                held += [(one, bytes(one)) for one in (gradients[0][3:5], gradients[1].data.cast("B")[64:128])]
            await on_all(made, ZeroEngine.reduce)
            await on_all(made, lambda engine: engine.step(0.1))
            if stage.shards_parameters:
                await on_all(made, ZeroEngine.gather)
                for engine in made:
                    values = [parameter.value for parameter in engine.parameters]
                    held += [(one, bytes(one)) for one in (values[0].T[1], values[2].data.cast("B")[:256])]
                    engine.release()
        assert all(bytes(one) == shown for one, shown in held)
