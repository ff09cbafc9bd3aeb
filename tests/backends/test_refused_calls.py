"""Calls of ``collective_op`` that are refused on one rank take their places, wherever they would have gone."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.backends import CommunicationRuntime, CompressionAlgorithm
from asyncpar.errors import PeerCancelled, UsageError
from tests.backends.worlds import on_all, open_runtimes

FLOATS = np.ones(3, np.float32)

CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (operation, {"x": FLOATS}, bad, reason)
    for operation in ("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "broadcast")
    for bad, reason in (
        ({}, f"x: {operation} expects an array, got None"),
        ({"x": FLOATS, "peer": 1}, f"peer: {operation} has no use for it, got 1"),
        ({"x": [1.0]}, "x: expected a numpy array, got list"),
        ({"x": FLOATS, "reduction": "median"}, "'median' is not a valid ReductionOp"),
    )
] + [
    ("barrier", {}, {"root": 1}, "root: barrier has no use for it, got 1"),
    ("scatter", {"x": np.ones((2, 3)), "root": 0}, {"root": 0, "tag": 3}, "tag: scatter has no use for it, got 3"),
    ("all_to_all", {"x": np.ones((2, 3))}, {"x": np.ones((2, 3)), "root": 1}, "root: all_to_all has no use for it"),
    ("all_reduce", {"x": FLOATS}, {"x": FLOATS, "out": np.ones(4, np.float32)}, "out: expected float32"),
    ("all_reduce", {"x": np.ones(3, int)}, {"x": None}, "x: all_reduce expects an array"),
    ("all_reduce", {"x": FLOATS, "reduction": "max"}, {"reduction": "max"}, "x: all_reduce expects an array"),
]

COMPRESSIONS = {
    "none": CompressionAlgorithm.none(),
    "int8": CompressionAlgorithm.quantization(8),
    "top_k": CompressionAlgorithm.top_k(10),
}
"""With ``top_k`` longer arrays are compressed, and shorter ones travel as they are."""


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("key", [None, "k"])
async def test_the_call_ends_on_the_others_with_the_reason_and_the_next_ones_meet(
    compression: str, key: str | None
) -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        rank = runtime.get_group().rank
        for operation, good, bad, reason in CASES:
            if rank == 1:
                with pytest.raises(UsageError, match=reason):
                    await runtime.collective_op(operation, **copied(bad), key=key)
            else:
                with pytest.raises(PeerCancelled, match=f"refused on rank 1: .*{reason}"):
                    await runtime.collective_op(operation, **copied(good), key=key)
            for count in (3, 30):
                x = np.full(count, 1.0 + rank, np.float32)
                await runtime.collective_op("all_reduce", x, key=key)
                if compression != "top_k" or count == 3:
                    np.testing.assert_allclose(x, 3.0, rtol=0.02)
            x = np.full(2, rank)
            await runtime.collective_op("broadcast", x, root=1, key=key)
            assert x.tolist() == [1, 1]

    async with open_runtimes(2, compression=COMPRESSIONS[compression]) as runtimes, asyncio.timeout(60):
        await on_all(runtimes, work)


async def test_an_operation_that_there_is_not_takes_its_place_too() -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        if runtime.get_group().rank == 1:
            with pytest.raises(UsageError, match="'smoke' is not a valid CollectiveOp"):
                _ = runtime.collective_op("smoke")
        else:
            with pytest.raises(PeerCancelled, match="refused on rank 1: operation, reduction: 'smoke'"):
                await runtime.collective_op("barrier")
        await runtime.collective_op("barrier")

    async with open_runtimes(2) as runtimes, asyncio.timeout(20):
        await on_all(runtimes, work)


async def test_the_receive_of_a_refused_send_ends_and_the_next_gets_the_next() -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        if runtime.get_group().rank == 1:
            with pytest.raises(UsageError, match="root: send has no use for it"):
                _ = runtime.collective_op("send", np.ones(2), peer=0, root=1)
            await runtime.collective_op("send", np.full(2, 7.0), peer=0)
        else:
            with pytest.raises(PeerCancelled, match="refused on rank 1: root: send has no use for it"):
                await runtime.collective_op("recv", peer=1)
            received = (await runtime.collective_op("recv", peer=1)).value
            assert received is not None
            assert received.tolist() == [7.0, 7.0]

    async with open_runtimes(2) as runtimes, asyncio.timeout(20):
        await on_all(runtimes, work)


async def test_arrays_of_other_kinds_on_ranks_that_compress_are_an_error_on_both() -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        x = np.ones(30, np.float32 if runtime.get_group().rank else int)
        with pytest.raises(Exception, match=r"rank 0 calls .* where rank 1 calls "):
            await runtime.collective_op("all_reduce", x)
        x = np.ones(30, np.float32)
        await runtime.collective_op("all_reduce", x)
        np.testing.assert_allclose(x, 2.0, rtol=0.02)

    async with open_runtimes(2, compression=CompressionAlgorithm.quantization(8)) as runtimes, asyncio.timeout(20):
        await on_all(runtimes, work)
