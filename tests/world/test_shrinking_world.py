"""ULFM's way through losses, with processes that are killed: revoke, shrink, agree, and go on, until one is left."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.soak import chosen, first
from tests.world.processes import process_world

RANKS = Path(__file__).with_name("shrinking_ranks.py")
SEEDS = chosen(range(1), soak=range(12))


@pytest.mark.parametrize("transport", first(1, [None, "tcp", "grpc"]))
@pytest.mark.parametrize("seed", SEEDS)
async def test_survivors_of_one_loss_after_the_other_have_the_same_group(
    tmp_path: Path, transport: str | None, seed: int
) -> None:
    """Some are killed while the others have not yet recovered from the last loss."""
    chance = random.Random(seed)
    async with process_world(5, RANKS, tmp_path, transport=transport) as ranks, asyncio.timeout(50):
        for rank in ranks:
            assert (await rank.next())["ranks"] == [0, 1, 2, 3, 4]
        left = set(range(5))
        for victim in chance.sample(range(5), 3):
            await asyncio.sleep(chance.choice([0.0, 0.02, 0.3]))
            ranks[victim].kill()
            left.discard(victim)
        last = {rank: await _last(ranks[rank], left) for rank in sorted(left)}
        one, other = last.values()
        assert one == other
        assert one["flag"] == ~(1 << 40)
        assert one["arena"] == (transport is None)


async def _last(rank: Any, left: set[int]) -> Any:
    """Return what ``rank`` says of the group of those that are ``left``."""
    while set((told := await rank.next())["ranks"]) != left or told["lost"]:
        assert set(told["ranks"]) >= left
    return told
