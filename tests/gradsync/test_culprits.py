"""If a rank fails in a step, all others name it with the reason."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.errors import PeerCancelled
from tests.gradsync.worlds import Rank, parallel_world

SECONDS = 5.0


class Broken(Exception):
    """What goes wrong in the block of a step."""


@pytest.mark.parametrize("turns", [0, 1, 5, 20], ids=lambda turns: f"after {turns} turns")
@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)])
async def test_others_name_the_rank_and_the_cause(dp: int, tp: int, pp: int, turns: int) -> None:
    culprit = dp * tp * pp - 1

    async def main(rank: Rank) -> None:
        async with rank.synchronizer.step(rank.model.parameters()) as step:
            for parameter in rank.model.parameters():
                step.ready(parameter.name)
            for _ in range(turns):
                await asyncio.sleep(0)
            if rank.node.rank == culprit:
                raise Broken("no gradient of the third layer")

    async with parallel_world(dp, tp, pp, patience=SECONDS) as ranks:
        errors = await asyncio.gather(*map(main, ranks), return_exceptions=True)
    assert isinstance(errors.pop(), Broken)
    for rank, error in enumerate(errors):
        assert isinstance(error, PeerCancelled), f"rank {rank}: {error!r}"
        assert error.rank == culprit, f"rank {rank}: {error}"
        assert f"rank {culprit}" in str(error)
        assert "no gradient of the third layer" in str(error), f"rank {rank}: {error}"
