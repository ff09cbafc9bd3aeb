"""A rank that fails, is cancelled or dies ends the step on all of them, soon; and the next step is right."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from asyncpar.errors import AsyncparError, PeerError, PeerLost
from asyncpar.hybrid import HybridConfig, StageLayers, StagePlace, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn.stage import Stage
from asyncpar.nn.tensor.group import TensorGroup
from asyncpar.zero.config import ZeROConfig, ZeROStage
from asyncpar.zero.errors import StepTorn
from tests.hybrid.ranks import Ranks, assert_has_taken, assert_names, outcomes_of, running
from tests.hybrid.worlds import RATE, TINY, make_config

MODEL = replace(TINY, layers=2, heads=2, tied_embeddings=True)
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1)]


def make(layout: tuple[int, int, int], stage: ZeROStage, **settings: Any) -> HybridConfig:
    return make_config(
        *layout,
        layers=2,
        micro_batches=2,
        zero=ZeROConfig(stage=stage, bucket_size_mb=0.002),
        clip_norm=0.3,
        **settings,
    )


async def cancel_after(ranks: Ranks, culprit: int, turns: int) -> list[Any]:
    """Take a step, and cancel that of one rank after some turns of the loop."""
    tasks = ranks.start()
    for _ in range(turns):
        await asyncio.sleep(0)
    tasks[culprit].cancel()
    return await outcomes_of(tasks)


@pytest.mark.parametrize("stage", ZeROStage)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_rank_may_be_cancelled_at_any_moment(layout: tuple[int, int, int], stage: ZeROStage) -> None:
    async with running(MODEL, make(layout, stage)) as ranks:
        await ranks.take_step()
        for number, turns in enumerate((*range(1, 200, 7), *range(200, 1000, 51))):
            culprit = number % len(ranks.all)
            for rank, outcome in enumerate(await cancel_after(ranks, culprit, turns)):
                if isinstance(outcome, BaseException):
                    if rank == culprit:
                        assert isinstance(outcome, asyncio.CancelledError)
                    else:
                        assert_names(outcome, culprit)
            await settle(ranks)
            assert_has_taken(ranks, ranks.all[0].steps)


async def settle(ranks: Ranks) -> None:
    """Take a step."""
    await ranks.take_step()
