"""A rank that is stopped (SIGSTOP) is named by all others, in shared memory and on every lane."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.soak import chosen
from tests.world.processes import process_world

RANKS = Path(__file__).with_name("silent_ranks.py")
SIZE = chosen(3, soak=4)
CASES = chosen(
    [(None, "small", 0), (None, "keyed", 2), ("tcp", "mixed", 0)],
    soak=list(product((None, "shm", "tcp", "grpc"), ("small", "large", "keyed", "mixed"), range(4))),
)


@pytest.mark.process
@pytest.mark.parametrize("worlds", chosen([CASES], soak=[[case] for case in CASES]))
async def test_every_survivor_names_the_stopped_rank(tmp_path: Path, worlds: Sequence[tuple[Any, str, int]]) -> None:
    """Several worlds at once: the time is spent on waiting for the rank that is stopped."""
    async with asyncio.TaskGroup() as tasks:
        for transport, what, silent in worlds:
            tasks.create_task(stop_one(tmp_path, transport, what, silent))


async def stop_one(tmp_path: Path, transport: str | None, what: str, silent: int) -> None:
    async with process_world(SIZE, RANKS, tmp_path, what, "6.0", transport=transport) as ranks:
        assert [await rank.next() for rank in ranks] == [{"ready": True}] * SIZE
        ranks[silent].process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(40.0):
            ends = [await rank.next() for rank in ranks if rank.rank != silent]
        ranks[silent].process.kill()  # so that the others need not say goodbye to it
    assert [end["blamed"] for end in ends] == [silent] * (SIZE - 1), ends
