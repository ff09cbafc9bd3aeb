"""Ranks that call different operations are told so, and who calls what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import AllReduceAlgorithm, ReduceOp
from asyncpar.errors import OperationMismatch
from asyncpar.testing import run_virtual
from tests.collectives.conftest import OpenRanks

Call = Callable[[Communicator], Awaitable[Any]]


async def outcomes(communicators: tuple[Communicator, ...], *calls: Call) -> list[Any]:
    running = (call(communicator) for call, communicator in zip(calls, communicators, strict=True))
    return await asyncio.gather(*running, return_exceptions=True)


def reduces(count: int, dtype: str = "f4", op: ReduceOp = "sum", algorithm: AllReduceAlgorithm | None = None) -> Call:
    return lambda c: c.all_reduce(np.zeros(count, dtype), op, algorithm=algorithm)


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (reduces(8), reduces(9), ("all_reduce(float32[8], sum)", "all_reduce(float32[9], sum)")),
        (reduces(8), reduces(8, "f8"), ("all_reduce(float32[8], sum)", "all_reduce(float64[8], sum)")),
        (reduces(8), reduces(8, op="max"), ("all_reduce(float32[8], sum)", "all_reduce(float32[8], max)")),
        (
            reduces(8, algorithm="ring"),
            reduces(8, algorithm="tree"),
            ("all_reduce(float32[8], sum) by ring", "all_reduce(float32[8], sum) by tree"),
        ),
        (
            lambda c: c.broadcast(np.zeros(3), root=0),
            lambda c: c.broadcast(np.zeros(3), root=1),
            ("broadcast(float64[3], root=0)", "broadcast(float64[3], root=1)"),
        ),
        (
            lambda c: c.all_gather_v(np.zeros((2, 3))),
            lambda c: c.all_gather_v(np.zeros((2, 4))),
            ("all_gather_v(float64[?,3])", "all_gather_v(float64[?,4])"),
        ),
        (lambda c: c.barrier(), lambda c: c.all_gather_object(1), ("barrier()", "all_gather_object()")),
    ],
)
async def test_both_ranks_name_both_operations_and_the_place(
    open_ranks: OpenRanks, one: Call, other: Call, texts: tuple[str, str]
) -> None:
    async with open_ranks(2) as ranks:
        await outcomes(ranks.communicators, lambda c: c.barrier(), lambda c: c.barrier())
        for error in await outcomes(ranks.communicators, one, other):
            if isinstance(error, OperationMismatch):
                assert str(error) == (
                    f"rank 0 calls {texts[0]} where rank 1 calls {texts[1]} (group world, operation #2)"
                )
        later = await outcomes(ranks.communicators, reduces(4), reduces(4))
        assert [array.shape for array in later] == [(4,), (4,)]


async def test_large_payloads_that_differ_are_found_by_their_grants(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        errors = await outcomes(ranks.communicators, reduces(1_000_000), reduces(1_000_001))
        assert [type(error) for error in errors] == [OperationMismatch] * 2
        assert str(errors[0]) == str(errors[1])


async def test_every_other_rank_of_the_group_gets_it_too(open_ranks: OpenRanks) -> None:
    async with open_ranks(5) as ranks:
        errors = await outcomes(ranks.communicators, *(reduces(8) for _ in range(4)), reduces(9))
        assert [type(error) for error in errors] == [OperationMismatch] * 5
        assert all("float32[8]" in str(error) and "float32[9]" in str(error) for error in errors)


def test_operations_that_never_exchange_a_frame_are_found_by_asking(open_ranks: OpenRanks) -> None:
    async def main() -> list[Any]:
        async with open_ranks(3) as ranks:
            return await outcomes(
                ranks.communicators,
                lambda c: c.reduce(np.zeros(4), root=2, algorithm="linear"),
                lambda c: c.gather(np.zeros(4), root=0, algorithm="linear"),
                lambda c: c.broadcast(np.zeros(4), root=1, algorithm="linear"),
            )

    errors = run_virtual(main())
    assert any(isinstance(error, OperationMismatch) for error in errors)
    assert all(not isinstance(error, TimeoutError) for error in errors)


def test_a_root_that_sends_only_learns_of_another_operation(open_ranks: OpenRanks) -> None:
    async def main() -> list[Any]:
        async with open_ranks(2) as ranks:
            return await outcomes(
                ranks.communicators, lambda c: c.broadcast(np.zeros(2)), lambda c: c.all_reduce(np.zeros(2))
            )

    for error in run_virtual(main()):
        assert isinstance(error, OperationMismatch)
        assert str(error).startswith("rank 0 calls broadcast(float64[2], root=0) where rank 1 calls all_reduce(")


async def test_parts_of_unequal_length_are_no_mismatch(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        results = await outcomes(
            ranks.communicators, lambda c: c.all_gather_v(np.zeros(2)), lambda c: c.all_gather_v(np.zeros(5))
        )
        assert [result.shape for result in results] == [(7,), (7,)]


async def test_a_message_that_does_not_fit_is_an_error_on_both_ranks(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        errors = await outcomes(
            ranks.communicators,
            lambda c: c.send(np.zeros(100_000, np.float32), 1),
            lambda c: c.recv(0, out=np.zeros(100_000)),
        )
        for error in errors:
            assert isinstance(error, OperationMismatch)
            assert "rank 0 sends float32[100000] where rank 1 receives float64[100000]" in str(error)


async def test_a_key_used_for_different_operations_is_a_mismatch(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        errors = await outcomes(
            ranks.communicators,
            lambda c: c.all_reduce(np.zeros(2), key="bucket/7"),
            lambda c: c.all_reduce(np.zeros(3), key="bucket/7"),
        )
        for error in errors:
            assert isinstance(error, OperationMismatch)
            assert 'operation #1 "bucket/7"' in str(error)
