"""In the layout in which it was saved, training goes on to the same bits, whatever compresses its gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.hybrid import HybridConfig, ThreeDParallelismCoordinator
from asyncpar.zero.config import ZeROConfig, ZeROStage
from tests.hybrid.ranks import Ranks, outcomes_of, running
from tests.hybrid.worlds import TINY, make_config

MODEL = replace(TINY, tied_embeddings=True, dtype="float32")
LAYOUTS = ((3, 1, 1), (2, 2, 1), (2, 1, 2))
CODECS = ("none", "bf16", "int8", "topk:0.1", "topk:0.25+int8", "randomk:0.25", "powersgd:2", "sign")
SMALL_BUCKETS = GradientBucketingConfig(bucket_size_mb=0.002, max_buckets=64)


def replicated(layout: tuple[int, int, int], codec: str) -> HybridConfig:
    compression = GradientCompressionConfig(codec=codec)
    return make_config(*layout, micro_batches=2, compression=compression, bucketing=SMALL_BUCKETS)


def sharded(layout: tuple[int, int, int], stage: ZeROStage) -> HybridConfig:
    return make_config(*layout, micro_batches=2, zero=ZeROConfig(stage=stage, gradient_compression=True))


CASES = [
    *((f"{layout}-{codec}", replicated(layout, codec)) for layout in LAYOUTS for codec in CODECS),
    *((f"{layout}-{stage}", sharded(layout, stage)) for layout in LAYOUTS for stage in list(ZeROStage)[1:]),
]


async def every(ranks: Ranks, main: Callable[[ThreeDParallelismCoordinator], Coroutine[Any, Any, Any]]) -> list[Any]:
    outcomes = await outcomes_of(ranks.start(main))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


@pytest.mark.parametrize("config", [config for _, config in CASES], ids=[name for name, _ in CASES])
async def test_a_run_that_was_resumed_is_the_uninterrupted_one(config: HybridConfig, tmp_path: Path) -> None:
    async with running(MODEL, config) as ranks:
        for _ in range(3):
            await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
        expected = [await ranks.take_step() for _ in range(2)]
        values = ranks.values()
    async with running(MODEL, config) as ranks:
        await every(ranks, lambda one: one.load(tmp_path))
        assert [await ranks.take_step() for _ in range(2)] == expected
        for key, value in ranks.values().items():
            np.testing.assert_array_equal(value, values[key], err_msg=str(key))


async def test_a_run_that_goes_back_is_the_one_it_was(tmp_path: Path) -> None:
    async with running(MODEL, replicated((3, 1, 1), "topk:0.1")) as ranks:
        for _ in range(2):
            await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
        expected = [await ranks.take_step() for _ in range(2)]
        await every(ranks, lambda one: one.load(tmp_path))
        assert [await ranks.take_step() for _ in range(2)] == expected


@pytest.mark.parametrize("other", [replicated((2, 1, 1), "int8"), sharded((3, 1, 1), ZeROStage.STAGE2)])
async def test_another_layout_drops_residuals_and_says_so(
    other: HybridConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(MODEL, replicated((3, 1, 1), "int8")) as ranks:
        await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
    with caplog.at_level(logging.WARNING, "asyncpar.checkpoint"):
        async with running(MODEL, other) as ranks:
            await every(ranks, lambda one: one.load(tmp_path))
            assert {one.steps for one in ranks.all} == {1}
            await ranks.take_step()
    (text,) = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert "dp 3" in text
    assert "residuals" in text
    assert "residual/embedding/tokens" in text or "residual/block" in text or "residual/norm" in text
    assert text.endswith(" more")
