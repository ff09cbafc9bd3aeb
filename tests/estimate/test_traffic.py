"""Bytes sent per step: formulas, and what real collectives send."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.estimate.layout import (
    RankTraffic,
    all_reduce_bytes,
    boundary_bytes,
    data_parallel_bytes,
    part_bytes,
    tensor_parallel_bytes,
)
from asyncpar.testing.world import local_world

P = 4_000_000.0
ELEMENTS = 1200


async def bytes_sent(ranks: int, operation: Callable[[Communicator], Awaitable[Any]]) -> Sequence[int]:
    """Return the payload that each rank sends in ``operation``."""
    async with local_world(ranks, pin="all_reduce:0-inf@ring;reduce_scatter:0-inf@ring;all_gather:0-inf@ring") as nodes:
        await asyncio.gather(*(operation(node.world) for node in nodes))
        return [sum(entry.payload_bytes for entry in node.world.traffic.operations) for node in nodes]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
async def test_real_all_reduces_send_what_the_formula_says(ranks: int) -> None:
    sent = await bytes_sent(ranks, lambda group: group.all_reduce(np.ones(ELEMENTS, np.float32)))
    assert sent == [all_reduce_bytes(ELEMENTS * 4, ranks)] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
async def test_real_halves_of_an_all_reduce_send_half(ranks: int) -> None:
    reduced = await bytes_sent(ranks, lambda group: group.reduce_scatter(np.ones(ELEMENTS, np.float32)))
    gathered = await bytes_sent(ranks, lambda group: group.all_gather(np.ones(ELEMENTS // group.size, np.float32)))
    assert reduced == gathered == [part_bytes(ELEMENTS * 4, ranks)] * ranks


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_first_stages_send_as_much_as_an_all_reduce(stage: int) -> None:
    assert data_parallel_bytes(P, P, 8, stage) == all_reduce_bytes(P, 8) == 2 * P * 7 / 8


def test_stage_3_sends_half_as_much_again() -> None:
    assert data_parallel_bytes(P, P, 8, 3) == 1.5 * all_reduce_bytes(P, 8)


def test_values_that_are_not_kept_are_sent_for_every_micro_batch() -> None:
    unit = part_bytes(P, 8)
    sent = [data_parallel_bytes(P, P, 8, stage, micro_batches=4) / unit for stage in range(4)]
    assert sent == [2, 2, 2, 8 + 1]


def test_one_replica_sends_nothing() -> None:
    assert [data_parallel_bytes(P, P, 1, stage) for stage in range(4)] == [0.0] * 4


def test_a_layer_takes_four_all_reduces_and_a_recomputed_one_six() -> None:
    assert tensor_parallel_bytes(P, 4, 3) == 12 * all_reduce_bytes(P, 4)
    assert tensor_parallel_bytes(P, 4, 3, recomputed=2) == 16 * all_reduce_bytes(P, 4)
    assert tensor_parallel_bytes(P, 4, 3, ends=2) == 14 * all_reduce_bytes(P, 4)
    assert tensor_parallel_bytes(P, 1, 3, ends=2) == 0.0


def test_a_boundary_is_crossed_both_ways() -> None:
    assert boundary_bytes(P) == 2 * P


def test_the_total_is_the_sum() -> None:
    assert RankTraffic(data=1.0, tensor=2.0, pipeline=3.0, embedding=4.0).total == 10.0


def test_groups_of_nobody_are_refused() -> None:
    with pytest.raises(UsageError, match="ranks: expected a positive number, got 0"):
        all_reduce_bytes(P, 0)
    with pytest.raises(UsageError, match="stage: expected 0 to 3, got 4"):
        data_parallel_bytes(P, P, 2, 4)
