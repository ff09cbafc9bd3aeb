"""Compression in ``collective_op``: which codec stands for which setting, and what comes out."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.backends import CommunicationRuntime, CompressionAlgorithm, CompressionKind
from asyncpar.codecs import Int8
from asyncpar.core.config.names import Name
from asyncpar.errors import NonFiniteValue, PeerCancelled, UsageError
from tests.backends.worlds import on_all, open_runtimes

SETTINGS = [
    (CompressionAlgorithm.quantization(16), "bf16", 0.01),
    (CompressionAlgorithm.quantization(8), "int8", 0.03),
    (CompressionAlgorithm.quantization(4), "int4", 0.5),
    (CompressionAlgorithm.quantization(1), "sign", 4.0),
    (CompressionAlgorithm.custom(Int8()), "int8", 0.03),
    (CompressionAlgorithm.custom("int8"), "int8", 0.03),
]


def vector(rank: int, count: int = 5000) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize(("compression", "codec", "bound"), SETTINGS)
async def test_a_compressed_average_is_close_and_the_same_on_all_ranks(
    compression: CompressionAlgorithm, codec: str, bound: float
) -> None:
    async def work(runtime: CommunicationRuntime) -> bytes:
        x = vector(runtime.get_group().rank)
        result = await runtime.collective_op("all_reduce", x, reduction="average")
        assert result.value is x
        assert result.codec.startswith(codec)
        expected = np.mean([vector(rank) for rank in range(3)], axis=0)
        assert np.abs(x - expected).max() < bound
        return x.tobytes()

    async with open_runtimes(3, compression=compression) as runtimes:
        assert len(set(await on_all(runtimes, work))) == 1


async def test_top_k_sends_the_largest_values_and_few_bytes() -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        x = np.zeros(10_000, np.float32)
        x[[7, 5007]] = 100.0, -50.0
        x += vector(0, 10_000) * 1e-3
        await runtime.collective_op("all_reduce", x)
        assert np.flatnonzero(np.abs(x) > 10).tolist() == [7, 5007]
        assert np.count_nonzero(x) < 100
        assert x[7] == pytest.approx(200, rel=1e-3)
        entry = runtime.get_metrics().of("all_reduce")
        assert entry.count == 1
        assert 0 < entry.bytes < 2000

    async with open_runtimes(2, compression=CompressionAlgorithm.top_k(20)) as runtimes:
        await on_all(runtimes, work)


async def test_random_picks_other_places_each_time_but_the_same_on_all_ranks() -> None:
    async def work(runtime: CommunicationRuntime) -> list[bytes]:
        results = []
        for key in (None, None, "named", "named"):
            x = np.ones(1000, np.float32)
            await runtime.collective_op("all_reduce", x, key=key)
            assert 0 < np.count_nonzero(x) < 300
            results.append(x.tobytes())
        return results

    async with open_runtimes(2, compression=CompressionAlgorithm.random(0.1)) as runtimes:
        one, other = await on_all(runtimes, work)
    assert one == other
    assert len(set(one)) == 4


async def test_values_that_are_left_out_are_exactly_the_ones_not_asked_for() -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        rank = runtime.get_group().rank
        for reduction in ("min", "max", "product"):
            result = await runtime.collective_op("all_reduce", vector(rank), reduction=reduction)
            assert result.codec == ""
        integers = np.full(100, 1001 + rank)
        await runtime.collective_op("all_reduce", integers)
        assert integers[0] == 2003
        result = await runtime.collective_op("broadcast", vector(rank))
        assert result.codec == ""

    async with open_runtimes(2, compression=CompressionAlgorithm.quantization(8)) as runtimes:
        await on_all(runtimes, work)


async def test_any_shape_layout_and_real_dtype_goes_through_and_out_takes_the_result() -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        for shape in ((), (0, 3), (4, 5), (300_000,)):
            out = np.empty(shape)
            result = await runtime.collective_op("all_reduce", np.full(shape, 0.5), out=out)
            assert result.value is out
            np.testing.assert_allclose(out, 1.0, rtol=0.02)
        turned = np.full((6, 8), 0.5, np.float16).T
        await runtime.collective_op("all_reduce", turned)
        np.testing.assert_allclose(turned, 1.0, rtol=0.02)

    async with open_runtimes(2, compression=CompressionAlgorithm.quantization(8)) as runtimes:
        await on_all(runtimes, work)


async def test_several_compressed_operations_are_in_flight_in_any_order() -> None:
    async def work(runtime: CommunicationRuntime) -> list[float]:
        arrays = [np.full(100, float(i), np.float32) for i in range(4)]
        calls = [runtime.collective_op("all_reduce", array, key=f"k{i}") for i, array in enumerate(arrays)]
        if runtime.get_group().rank:
            calls.reverse()
        await asyncio.gather(*calls)
        return [round(float(array[0]), 1) for array in arrays]

    async with open_runtimes(2, compression=CompressionAlgorithm.quantization(8)) as runtimes:
        assert await on_all(runtimes, work) == [[0.0, 2.0, 4.0, 6.0]] * 2


async def test_random_places_come_to_the_sum_over_operations() -> None:
    async def work(runtime: CommunicationRuntime) -> float:
        x, total = vector(0), np.zeros(5000)
        for _ in range(100):
            result = await runtime.collective_op("all_reduce", x.copy())
            assert result.value is not None
            total += result.value / 100
        return float(np.vdot(total, 2 * x) / np.vdot(2 * x, 2 * x))

    async with open_runtimes(2, compression=CompressionAlgorithm.random(0.25)) as runtimes:
        for share in await on_all(runtimes, work):
            assert 0.95 < share < 1.05


@pytest.mark.parametrize("count", [10, 300_000])
async def test_a_value_that_is_not_finite_is_an_error_on_every_rank_and_nothing_is_written(count: int) -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        rank = runtime.get_group().rank
        x = np.ones(count, np.float32)
        if rank == 1:
            x[3] = np.nan
        with pytest.raises(NonFiniteValue if rank == 1 else PeerCancelled):
            await runtime.collective_op("all_reduce", x)
        assert x[0] == 1
        assert runtime.get_metrics().of("all_reduce").errors == 1
        await runtime.collective_op("all_reduce", np.ones(5, np.float32))

    async with open_runtimes(3, compression=CompressionAlgorithm.quantization(8)) as runtimes:
        await on_all(runtimes, work)


async def test_a_call_that_is_never_awaited_ends_on_the_other_ranks() -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        call = runtime.collective_op("all_reduce", np.ones(10, np.float32))
        if runtime.get_group().rank == 0:
            call.close()
            return
        with pytest.raises(PeerCancelled):
            await call

    async with open_runtimes(2, compression=CompressionAlgorithm.quantization(8)) as runtimes:
        await on_all(runtimes, work)


def test_what_means_no_compression_sends_values_as_they_are() -> None:
    for none in (
        CompressionAlgorithm(),
        CompressionAlgorithm.none(),
        CompressionAlgorithm.quantization(32),
        CompressionAlgorithm.random(1.0),
        CompressionAlgorithm.top_k(100),
    ):
        assert none.codec_for(100) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CompressionAlgorithm.top_k(0), "k: expected a number of values, at least 1, got 0"),
        (lambda: CompressionAlgorithm.random(0.0), "ratio: expected a fraction above 0 and up to 1, got 0.0"),
        (lambda: CompressionAlgorithm.random(1.5), "ratio: expected a fraction above 0 and up to 1, got 1.5"),
        (lambda: CompressionAlgorithm.quantization(0), "bits: expected one of 1, 4, 8, 16, 32, got 0"),
        (lambda: CompressionAlgorithm.custom("powersgd:2"), "works in rounds"),
        (lambda: CompressionAlgorithm.custom(Name("zip")), "codec: expected one of"),
        (lambda: CompressionAlgorithm.custom(3), "codec: expected a Codec"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=message):
        make()


def test_algorithms_have_the_names_of_the_contract() -> None:
    assert CompressionAlgorithm() == CompressionAlgorithm.NONE
    assert CompressionAlgorithm.TOP_K(5) == CompressionAlgorithm.top_k(5)
    assert CompressionAlgorithm.RANDOM(0.5) == CompressionAlgorithm.random(0.5)
    assert CompressionAlgorithm.QUANTIZATION(8) == CompressionAlgorithm.quantization(8)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("none", {"k": 3}),
        ("top_k", {"k": 3, "bits": 8}),
        ("quantization", {"bits": 8, "ratio": 0.5}),
        ("random", {"k": 1}),
    ],
)
def test_numbers_that_a_kind_does_not_have_are_refused(kind: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{kind} has no use for it"):
        CompressionAlgorithm(kind=CompressionKind(kind), **settings)
