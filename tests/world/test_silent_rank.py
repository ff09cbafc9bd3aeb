"""A rank that is stopped (SIGSTOP) is named by all others, in shared memory and on every lane."""

from __future__ import annotations

import asyncio
import signal
from itertools import product
from pathlib import Path

import pytest

from tests.soak import chosen
from tests.world.processes import process_world

RANKS = Path(__file__).with_name("silent_ranks.py")
KINDS = ("small", "large", "keyed", "mixed")
CASES = chosen(
    [(None, "all", 0), ("tcp", "all", 2)],
    soak=list(product((None, "shm", "tcp", "grpc"), (*KINDS, "all"), range(3))),
)
"""In a world of ``all`` the operations of each kind go on at once, each in a group of its own."""


@pytest.mark.process
@pytest.mark.parametrize(("transport", "what", "silent"), CASES)
async def test_every_survivor_names_the_stopped_rank(
    tmp_path: Path, transport: str | None, what: str, silent: int
) -> None:
    kinds = KINDS if what == "all" else (what,)
    async with process_world(3, RANKS, tmp_path, "6.0", *kinds, transport=transport) as ranks:
        assert [await rank.next() for rank in ranks] == [{"ready": True}] * 3
        ranks[silent].process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(40.0):
            ends = [await rank.next() for rank in ranks if rank.rank != silent]
        ranks[silent].process.kill()  # so that the others need not say goodbye to it
    for end in ends:
        assert end == {"blamed": dict.fromkeys(kinds, silent)}, ends
