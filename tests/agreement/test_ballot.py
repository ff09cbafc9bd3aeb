"""Votes, and ranks that do not vote."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncpar.agreement.exchanges import Ballot
from asyncpar.errors import PeerCancelled
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from tests.parallel.replicas import on_all


async def test_a_question_is_answered_yes_if_any_rank_says_yes() -> None:
    async def main(node: Node) -> list[bool]:
        answers = np.array([node.rank == 1, False, True])
        return [bool(answer) for answer in await Ballot(node.world, count=3, key="vote").cast(answers)]

    async with local_world(3) as nodes:
        assert await on_all(nodes, main) == [[True, False, True]] * 3


@pytest.mark.parametrize("is_last", [True, False])
async def test_a_rank_that_gives_up_is_named_on_all_others_and_the_key_goes_on(is_last: bool) -> None:
    """Also when it is the last one, so that its vote completes the collective."""

    async def main(node: Node) -> str:
        outcome = "voted"
        ballot = Ballot(node.world, count=1, key="vote")
        if (node.rank == 1) == is_last:
            for _ in range(20):
                await asyncio.sleep(0)
        try:
            if node.rank == 1:
                ballot.close()
                ballot.close()
                outcome = "gave up"
            else:
                await ballot.cast(np.array([True]))
        except PeerCancelled as error:
            outcome = f"cancelled by rank {error.rank}"
        assert not (await Ballot(node.world, count=1, key="vote").cast(np.array([False])))[0]
        return outcome

    async with local_world(2) as nodes:
        assert await on_all(nodes, main) == ["cancelled by rank 1", "gave up"]


async def test_giving_up_after_the_vote_does_nothing() -> None:
    async with local_world(1) as (node,):
        ballot = Ballot(node.world, count=1, key="vote")
        assert (await ballot.cast(np.array([True])))[0]
        ballot.close()
