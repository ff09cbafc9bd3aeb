"""In the layout in which it was saved, training goes on to the same bits, whatever compresses its gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.names import Name
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.hybrid import HybridConfig, ThreeDParallelismCoordinator
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.ranks import Ranks, outcomes_of, running
from tests.hybrid.worlds import TINY, make_config
from tests.products import in_turn
from tests.soak import chosen, first

MODEL = replace(TINY, layers=2, tied_embeddings=True, dtype="float32")
LAYOUTS = ((3, 1, 1), (2, 2, 1), (2, 1, 2))
CODECS = first(3, ["int8", "topk:0.25+int8", "randomk:0.25", "powersgd:2", "none", "bf16", "topk:0.1", "sign"])
BEFORE = chosen(1, soak=2)
"""Steps before the checkpoint: after one there is something of everything that is kept."""

MORE = chosen(1, soak=3)
"""Steps after the checkpoint: values and states after one show what was not restored."""

SMALL_BUCKETS = GradientBucketingConfig(bucket_size_mb=0.002, max_buckets=64)


def replicated(layout: tuple[int, int, int], codec: str) -> HybridConfig:
    compression = GradientCompressionConfig(codec=Name(codec))
    return make_config(*layout, layers=2, micro_batches=2, compression=compression, bucketing=SMALL_BUCKETS)


def sharded(layout: tuple[int, int, int], stage: ZeROStage) -> HybridConfig:
    return make_config(*layout, layers=2, micro_batches=2, zero=ZeROConfig(stage=stage, gradient_compression=True))


CASES = [
    *((f"{layout}-{codec}", replicated(layout, codec)) for layout, codec in in_turn(LAYOUTS, CODECS)),
    *(
        (f"{layout}-{stage}", sharded(layout, stage))
        for layout, stage in in_turn(chosen(LAYOUTS[::2], soak=LAYOUTS), list(ZeROStage)[1:])
    ),
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
        for _ in range(BEFORE):
            await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
        expected = [await ranks.take_step() for _ in range(MORE)]
        values = ranks.values()
    async with running(MODEL, config) as ranks:
        await every(ranks, lambda one: one.load(tmp_path))
        assert [await ranks.take_step() for _ in range(MORE)] == expected
        for key, value in ranks.values().items():
            np.testing.assert_array_equal(value, values[key], err_msg=str(key))


async def test_a_run_that_goes_back_is_the_one_it_was(tmp_path: Path) -> None:
    async with running(MODEL, replicated((3, 1, 1), "topk:0.1")) as ranks:
        for _ in range(BEFORE):
            await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
        expected = [await ranks.take_step() for _ in range(MORE)]
        await every(ranks, lambda one: one.load(tmp_path))
        assert [await ranks.take_step() for _ in range(MORE)] == expected


def lacking_in(ranks: Ranks) -> dict[str, Any]:
    """Return what the means of whole tensors lack, by name: of what several ranks of a replica have, one is counted."""
    found: dict[str, dict[tuple[int, TensorSlice], Any]] = {}
    for one in ranks.all:
        flow = one._session.assembly.flow  # noqa: SLF001
        state, parameters = flow.reduction_state(), {each.name: each for each in flow.parameters}
        for key, (name, weight) in state.parts.items():
            place = flow.replica, parameters[name].slice
            found.setdefault(name, {}).setdefault(place, state.arrays[key].astype(np.float64) * weight)
    total = {}
    for name, parts in found.items():
        total[name] = np.zeros(next(iter(parts))[1].global_shape)
        for (_, part), values in parts.items():
            here = np.zeros(part.global_shape)
            part.put(values.reshape(part.local_shape), here)
            total[name] += here
    return total


def assert_same_lacking(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    assert any(values.any() for values in expected.values())
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-6 * np.abs(values).max(), err_msg=name)


MOVES = {
    "fewer replicas": (replicated((3, 1, 1), "int8"), replicated((2, 1, 1), "int8")),
    "sharded": (replicated((3, 1, 1), "int8"), sharded((3, 1, 1), ZeROStage.STAGE2)),
    "sharded slices": (sharded((2, 2, 1), ZeROStage.STAGE3), replicated((2, 1, 2), "int8")),
    "whole again": (replicated((2, 2, 1), "powersgd:2"), replicated((2, 1, 1), "topk:0.1")),
    "slices": (replicated((2, 1, 1), "topk:0.1"), replicated((2, 2, 1), "int8")),
    "stages": (replicated((2, 2, 1), "bf16"), replicated((2, 1, 2), "sign")),
}


@pytest.mark.parametrize("move", first(3, MOVES))
async def test_another_layout_makes_up_for_what_gradients_lack(move: str, tmp_path: Path) -> None:
    saved, loaded = MOVES[move]
    async with running(MODEL, saved) as ranks:
        for _ in range(BEFORE):
            await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
        expected = lacking_in(ranks)
    async with running(MODEL, loaded) as ranks:
        await every(ranks, lambda one: one.load(tmp_path))
        assert {one.steps for one in ranks.all} == {BEFORE}
        assert_same_lacking(lacking_in(ranks), expected)
        await ranks.take_step()


async def test_what_another_layout_has_no_use_for_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(MODEL, replicated((3, 1, 1), "powersgd:2")) as ranks:
        await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
    with caplog.at_level(logging.WARNING, "asyncpar"):
        async with running(MODEL, replicated((2, 1, 1), "none")) as ranks:
            await every(ranks, lambda one: one.load(tmp_path))
            await ranks.take_step()
    learned, owed = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert "dp 3" in learned
    assert "codec/block" in learned
    assert "residual/" not in learned
    assert "what compression still owes" in owed
    assert "embedding/tokens" in owed


UPDATES: dict[str, tuple[HybridConfig, dict[str, Any]]] = {
    "buckets": (
        replicated(chosen((2, 1, 1), soak=(2, 2, 1)), "topk:0.1"),
        {"bucketing": GradientBucketingConfig(bucket_size_mb=1.0)},
    ),
    "codec": (replicated((2, 1, 2), "int8"), {"compression": GradientCompressionConfig(codec="topk:0.1")}),
    "summed": (replicated((2, 2, 1), "bf16"), {"compression": GradientCompressionConfig(codec="powersgd:2")}),
    "sharded": (
        sharded((3, 1, 1), ZeROStage.STAGE2),
        {"zero": ZeROConfig(stage=ZeROStage.STAGE2, gradient_compression=True, bucket_size_mb=0.001)},
    ),
}


@pytest.mark.parametrize("update", UPDATES)
async def test_another_configuration_makes_up_for_what_gradients_lack(update: str) -> None:
    first, change = UPDATES[update]
    async with running(MODEL, first) as ranks:
        for _ in range(BEFORE):
            await ranks.take_step()
        expected = lacking_in(ranks)
        await every(ranks, lambda one: one.update_config(replace(first, **change)))
        assert_same_lacking(lacking_in(ranks), expected)
        await ranks.take_step()


async def test_what_another_configuration_has_no_use_for_is_named(caplog: pytest.LogCaptureFixture) -> None:
    first = replicated((2, 1, 1), "powersgd:2")
    async with running(MODEL, first) as ranks:
        await ranks.take_step()
        with caplog.at_level(logging.WARNING, "asyncpar"):
            await every(ranks, lambda one: one.update_config(replace(first, compression=GradientCompressionConfig())))
        await ranks.take_step()
    (text,) = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert "block1/mlp/narrow/weight" in text
    assert text.endswith(" more")
