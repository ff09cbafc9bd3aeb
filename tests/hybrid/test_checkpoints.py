"""Training goes on from a checkpoint at any other layout as it would have gone on where it was saved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.errors import CheckpointError, UsageError
from asyncpar.hybrid import HybridConfig, ThreeDParallelismCoordinator
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.ranks import Ranks, alone_after, assert_has_taken, outcomes_of, running
from tests.hybrid.worlds import TINY, Array, make_config
from tests.products import in_turn
from tests.soak import chosen

MODEL = replace(TINY, layers=4, vocabulary=11, mlp_hidden=29, tied_embeddings=True)
SHALLOW = replace(MODEL, layers=2)
BEFORE = chosen(1, soak=2)
"""Steps before the checkpoint."""


def make(
    layout: tuple[int, int, int],
    stage: ZeROStage,
    schedule: PipelineScheduleType = PipelineScheduleType.GPIPE,
    *,
    layers: int = 4,
    **more: Any,
) -> HybridConfig:
    return make_config(
        *layout,
        layers=layers,
        micro_batches=2,
        zero=ZeROConfig(stage=stage),
        clip_norm=0.3,
        pipeline_schedule=schedule,
        **more,
    )


async def every(ranks: Ranks, main: Callable[[ThreeDParallelismCoordinator], Coroutine[Any, Any, Any]]) -> list[Any]:
    outcomes = await outcomes_of(ranks.start(main))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


LAYOUTS = [
    make((1, 1, 1), ZeROStage.NONE),
    make((chosen(2, soak=4), 1, 1), ZeROStage.STAGE3),
    make((1, chosen(2, soak=4), 1), ZeROStage.NONE, order="tp-dp-pp"),
    make((1, 1, 4), ZeROStage.STAGE1),
    make((2, 2, 1), ZeROStage.STAGE2),
    make((1, 1, 2), ZeROStage.NONE, PipelineScheduleType.ZBV),
    make((3, 1, 1), ZeROStage.STAGE1),
    make((1, 1, 2), ZeROStage.STAGE3, PipelineScheduleType.INTERLEAVED_ONE_F1B, num_model_chunks=2),
    make((1, 1, 3), ZeROStage.NONE, layers_per_stage=(2, 1, 1)),
    make((2, 2, 2), ZeROStage.STAGE3),
]


def describe(config: HybridConfig) -> str:
    parallelism = config.parallelism
    return f"{parallelism.dp_size}x{parallelism.tp_size}x{parallelism.pp_size}-{config.zero.stage}"


@pytest.mark.parametrize(
    ("saver", "loaders"),
    [
        (LAYOUTS[4], chosen([*LAYOUTS[:3:2], *LAYOUTS[6:9:2]], soak=LAYOUTS)),
        (LAYOUTS[7], chosen(LAYOUTS[1:7:2], soak=LAYOUTS)),
    ],
    ids=map(describe, (LAYOUTS[4], LAYOUTS[7])),
)
async def test_any_layout_goes_on_from_any_other(
    saver: HybridConfig, loaders: list[HybridConfig], tmp_path: Path
) -> None:
    """All others but the largest load what one of the two has saved; with ``--soak`` all load what each has."""
    async with running(MODEL, saver) as ranks:
        for _ in range(BEFORE):
            await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path, extra={"seen": 16}))
        expected = (await ranks.take_step())[0]
    for config in loaders:
        async with running(MODEL, config) as ranks:
            assert await every(ranks, lambda one: one.load(tmp_path)) == [{"seen": 16}] * len(ranks.all)
            assert {one.steps for one in ranks.all} == {BEFORE}
            assert_has_taken(ranks, BEFORE)
            np.testing.assert_allclose((await ranks.take_step())[0], expected, rtol=1e-12)
            assert_has_taken(ranks, BEFORE + 1)


async def test_the_same_layout_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    async with running(replace(SHALLOW, dropout=0.2), make((2, 1, 2), ZeROStage.STAGE2, layers=2)) as ranks:
        await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
        expected = await ranks.take_step()
        values = ranks.values()
        await every(ranks, lambda one: one.load(tmp_path))
        assert await ranks.take_step() == expected
        for key, value in ranks.values().items():
            np.testing.assert_array_equal(value, values[key])


def spread(stage: ZeROStage) -> tuple[int, int, int]:
    """Return stages of a pipeline, and replicas where these share something."""
    return chosen((1, 1, 2) if stage is ZeROStage.NONE else (2, 1, 2), soak=(2, 1, 2))


async def assert_nothing_changed(ranks: Ranks, before: dict[tuple[str, str], Array], steps: int) -> None:
    assert {one.steps for one in ranks.all} == {steps}
    for key, value in ranks.values().items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize(
    ("stage", "change"),
    in_turn([ZeROStage.NONE, ZeROStage.STAGE3], [{"seed": 3}, {"vocabulary": 12}, {"tied_embeddings": False}]),
)
async def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(
    change: dict[str, Any], stage: ZeROStage, tmp_path: Path
) -> None:
    async with running(replace(SHALLOW, **change), make((1, 1, 1), ZeROStage.NONE, layers=2)) as ranks:
        await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
    async with running(SHALLOW, make(spread(stage), stage, layers=2)) as ranks:
        for _ in range(2):
            await ranks.take_step()
        before = ranks.values()
        for outcome in await outcomes_of(ranks.start(lambda one: one.load(tmp_path))):
            assert isinstance(outcome, (CheckpointError, UsageError)), repr(outcome)
        await assert_nothing_changed(ranks, before, 2)
        await ranks.take_step()
        assert_has_taken(ranks, 3)


@pytest.mark.parametrize(
    ("stage", "damage"), in_turn([ZeROStage.NONE, ZeROStage.STAGE3], ["torn", "edited", "missing"])
)
async def test_a_damaged_checkpoint_is_refused_on_all_ranks(damage: str, stage: ZeROStage, tmp_path: Path) -> None:
    async with running(SHALLOW, make(spread(stage), stage, layers=2)) as ranks:
        await ranks.take_step()
        (path, *_) = await every(ranks, lambda one: one.save(tmp_path))
        shard = max(path.glob("*.safetensors"), key=lambda one: one.stat().st_size)
        content = bytearray(shard.read_bytes())
        match damage:
            case "torn":
                shard.write_bytes(content[: len(content) // 2])
            case "edited":
                content[-3] ^= 16
                shard.write_bytes(content)
            case _:
                shard.unlink()
        await ranks.take_step()
        before = ranks.values()
        for outcome in await outcomes_of(ranks.start(lambda one: one.load(path))):
            assert isinstance(outcome, CheckpointError), repr(outcome)
            assert shard.name in str(outcome), str(outcome)
        await assert_nothing_changed(ranks, before, 2)
        await ranks.take_step()
        assert_has_taken(ranks, 3)


@pytest.mark.parametrize(
    ("stage", "moments"),
    chosen([(ZeROStage.NONE, (40,)), (ZeROStage.STAGE3, (3,))], soak=[(stage, (3, 17, 40)) for stage in ZeROStage]),
)
async def test_one_may_save_and_load_after_a_failure(stage: ZeROStage, moments: Sequence[int], tmp_path: Path) -> None:
    async with running(SHALLOW, make((2, 1, 2), stage, layers=2)) as ranks:
        await ranks.take_step()
        for turns in moments:
            folder = tmp_path / str(turns)
            for what in ("save", "load"):
                tasks = ranks.start()
                for _ in range(turns):
                    await asyncio.sleep(0)
                tasks[turns % 4].cancel()
                await outcomes_of(tasks)
                if what == "save":
                    await every(ranks, partial(ThreeDParallelismCoordinator.save, folder=folder))
                    saved = ranks.all[0].steps
                else:
                    await every(ranks, partial(ThreeDParallelismCoordinator.load, folder=folder))
                    assert {one.steps for one in ranks.all} == {saved}
                assert_has_taken(ranks, ranks.all[0].steps)


async def test_ranks_that_were_torn_apart_while_loading_say_so_until_they_load_again(tmp_path: Path) -> None:
    async with running(SHALLOW, make((2, 1, 2), ZeROStage.STAGE1, layers=2)) as ranks:
        await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
        for turns in chosen((1, 30, 200), soak=(1, 8, 30, 80, 200)):
            await ranks.take_step()
            tasks = ranks.start(lambda one: one.load(tmp_path))
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[3].cancel()
            await outcomes_of(tasks)
            outcomes = await outcomes_of(ranks.start())
            if not any(isinstance(outcome, BaseException) for outcome in outcomes):
                assert_has_taken(ranks, ranks.all[0].steps)
            await every(ranks, lambda one: one.load(tmp_path))
            assert_has_taken(ranks, 1)


def test_what_one_process_has_does_not_depend_on_the_layout() -> None:
    one, other = (alone_after(MODEL, config, 2) for config in LAYOUTS[:2])
    for key, value in one.items():
        np.testing.assert_array_equal(value, other[key])
