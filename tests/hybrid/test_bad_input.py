"""Bad settings are refused on every rank, with a typed error that names the remedy, before the first step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.errors import PeerCancelled, PeerError, UsageError
from asyncpar.hybrid import HybridConfig, StageLayers, StagePlace, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import TransformerConfig
from asyncpar.nn.tensor.group import TensorGroup
from asyncpar.pipeline.custom import parse_schedule
from asyncpar.pipeline.errors import InvalidSchedule
from asyncpar.pipeline.schedule import PipelineSchedule
from asyncpar.testing import local_world
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.ranks import PATIENCE, assert_has_taken, outcomes_of, running
from tests.hybrid.worlds import RATE, TINY, make_config, on_ranks
from tests.products import in_turn


async def create_on(
    size: int, config: HybridConfig | Callable[[int], HybridConfig], model: Callable[[int], TransformerConfig]
) -> list[Any]:
    """Make coordinators on all ranks of a world; return them, or the errors."""
    async with local_world(size) as nodes, asyncio.timeout(PATIENCE):
        made = [
            ThreeDParallelismCoordinator.create(
                config if isinstance(config, HybridConfig) else config(node.rank),
                TransformerModel(config=model(node.rank)),
                node.world,
            )
            for node in nodes
        ]
        outcomes = await asyncio.gather(*made, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, ThreeDParallelismCoordinator):
                await outcome.close()
        return outcomes


async def assert_refused(size: int, config: Any, text: str, model: Any = lambda rank: TINY) -> None:
    for outcome in await create_on(size, config, model):
        assert isinstance(outcome, UsageError), repr(outcome)
        assert text in str(outcome), str(outcome)


async def test_sizes_that_do_not_make_the_world() -> None:
    await assert_refused(4, make_config(2, 1, 1), "expected 2 devices (2*1*1), got 4")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (replace(TINY, heads=1), "heads = 1"),
        (replace(TINY, heads=2, layers=3), "num_layers: expected the model's 3 layers, got 2"),
        (replace(TINY, heads=2, vocabulary=1), "vocabulary = 1"),
        (replace(TINY, heads=2, mlp_hidden=1), "mlp_hidden = 1"),
    ],
)
async def test_models_that_cannot_be_cut_like_that(model: TransformerConfig, text: str) -> None:
    await assert_refused(2, make_config(1, 2, 1), text, lambda rank: model)


@pytest.mark.parametrize(
    ("schedule", "chunks", "layers"),
    [
        (PipelineScheduleType.INTERLEAVED_ONE_F1B, 4, 4),
        (PipelineScheduleType.ZBV, 1, 3),
        (PipelineScheduleType.GPIPE, 1, 3),
    ],
)
async def test_layers_that_do_not_fill_the_stages(schedule: PipelineScheduleType, chunks: int, layers: int) -> None:
    config = make_config(1, 1, 2, layers=layers, pipeline_schedule=schedule, num_model_chunks=chunks)
    await assert_refused(2, config, "num_layers: expected", lambda rank: replace(TINY, layers=layers))


def test_more_stages_than_layers() -> None:
    with pytest.raises(UsageError, match="pp_size: expected at most num_layers = 2, got 3"):
        make_config(1, 1, 3)


async def test_a_rank_with_too_little_memory() -> None:
    await assert_refused(2, make_config(1, 1, 2, max_memory_per_device=1e-6), "max_memory_per_device: parameters")


@pytest.mark.parametrize(
    "other",
    [
        make_config(2, 1, 1, micro_batches=2),
        make_config(2, 1, 1, clip_norm=1.0),
        make_config(2, 1, 1, zero=ZeROConfig(stage=ZeROStage.STAGE2)),
        make_config(1, 2, 1),
        make_config(1, 1, 2),
        make_config(2, 1, 1, precision="bfloat16"),
        make_config(2, 1, 1, order="tp-dp-pp"),
        make_config(2, 1, 1, memory_strategy="basic"),
    ],
)
async def test_ranks_with_different_settings(other: HybridConfig) -> None:
    own = make_config(2, 1, 1)
    for outcome in await create_on(2, lambda rank: other if rank else own, lambda rank: TINY):
        assert isinstance(outcome, UsageError), repr(outcome)
        assert "rank 1" in str(outcome)


@pytest.mark.parametrize("change", [{"seed": 1}, {"vocabulary": 14}, {"tied_embeddings": True}, {"dtype": "float32"}])
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
async def test_ranks_with_different_models(layout: tuple[int, int, int], change: dict[str, Any]) -> None:
    other = replace(TINY, **change)
    for outcome in await create_on(2, make_config(*layout), lambda rank: other if rank else TINY):
        assert isinstance(outcome, UsageError), repr(outcome)
        assert "rank 1" in str(outcome)


def test_a_schedule_with_a_missing_action_names_it() -> None:
    with pytest.raises(InvalidSchedule, match=r"rank 1.*missing action: 1B1 is never done"):
        parse_schedule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1")


@pytest.mark.parametrize(("stages", "micro_batches", "name"), [(3, 2, "num_stages"), (2, 3, "num_microbatches")])
def test_a_schedule_for_others(stages: int, micro_batches: int, name: str) -> None:
    schedule = PipelineSchedule(
        num_stages=stages, num_microbatches=micro_batches, schedule_type=PipelineScheduleType.GPIPE
    )
    with pytest.raises(UsageError, match=f"schedule: expected {name} = 2, got 3"):
        make_config(1, 1, 2, micro_batches=2, schedule=schedule)


SMALL = replace(TINY, layers=2, heads=2)


MISFITS: list[Callable[[Any, Any], tuple[Any, Any]]] = [
    lambda inputs, targets: (inputs[:1], targets),
    lambda inputs, targets: (inputs, targets[:1]),
    lambda inputs, targets: (None, targets),
    lambda inputs, targets: (inputs, None),
    lambda inputs, targets: ([tokens + 100 for tokens in inputs], targets),
    lambda inputs, targets: (inputs, [tokens - 100 for tokens in targets]),
    lambda inputs, targets: (inputs, [tokens[:, :-1] for tokens in targets]),
    lambda inputs, targets: (inputs, [object(), object()]),
    lambda inputs, targets: ([np.ones((1, 99), int)] * 2, targets),
]


@pytest.mark.parametrize(("spoil", "stage"), in_turn(MISFITS, [ZeROStage.NONE, ZeROStage.STAGE3]))
async def test_a_batch_that_does_not_fit_on_one_rank_is_refused_on_all(spoil: Any, stage: ZeROStage) -> None:
    """And the next batch, which does, is trained on."""
    config = make_config(2, 1, 2, layers=2, micro_batches=2, zero=ZeROConfig(stage=stage))
    async with running(SMALL, config) as ranks:
        steps = []
        for one in ranks.all:
            batch = ranks.batch_of(one)
            bad = one.groups.mapping.dp_rank == 1
            steps.append(asyncio.create_task(one.train_step(*(spoil(*batch) if bad else batch), learning_rate=RATE)))
        outcomes = await outcomes_of(steps)
        assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        assert all(isinstance(outcome, (UsageError, PeerError)) or outcome.__cause__ for outcome in outcomes), outcomes
        await ranks.take_step()
        assert_has_taken(ranks, 1)


async def test_an_optimizer_step_without_a_backward_pass() -> None:
    async with running(SMALL, make_config(2, 1, 1, layers=2)) as ranks:
        outcomes = await outcomes_of(ranks.start(lambda one: one.optimizer_step(RATE)))
        assert any(isinstance(outcome, UsageError) for outcome in outcomes)
        assert all(isinstance(outcome, (UsageError, PeerError)) for outcome in outcomes)
        await ranks.take_step()
        assert_has_taken(ranks, 1)


@pytest.mark.parametrize("settings", [{"micro_batches": 0}, {"clip_norm": 0.0}, {"clip_norm": -1.0}])
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        make_config(2, 1, 1, **settings)


async def test_micro_batches_of_another_size_are_refused_and_the_next_step_works() -> None:
    config = make_config(1, 1, 2, micro_batches=2, micro_batch_size=4)
    async with running(TINY, config) as ranks:
        await ranks.take_step()
        first, last = ranks.all
        inputs, targets = ranks.batch_of(first)
        results = await asyncio.gather(
            first.train_step([rows[:3] for rows in inputs], targets, learning_rate=0.1),
            last.train_step(None, targets, learning_rate=0.1),
            return_exceptions=True,
        )
        text = "inputs: expected micro-batches of micro_batch_size = 4 rows, got 3 in number 0"
        assert isinstance(results[0], UsageError)
        assert text in str(results[0])
        assert text in str(results[1])
        await ranks.take_step()


@pytest.mark.parametrize(
    "setting",
    [{"gradient_compression": True}, {"algorithm": "nonsense"}, {"bucket_size_mb": 1}, {"max_memory_usage_mb": 3}],
)
def test_settings_of_zero_that_would_have_no_effect(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(setting))} of ZeROConfig: expected .* in stage none, got"):
        make_config(2, zero=ZeROConfig(stage=ZeROStage.NONE, **setting))


class BuiltElsewhereOnly(TransformerModel):
    """Fails to build the second stage."""

    def build(self, place: StagePlace, group: TensorGroup) -> StageLayers:
        if not place.is_first:
            raise UsageError("this stage cannot be built")
        return super().build(place, group)


@pytest.mark.parametrize("stage", ZeROStage)
async def test_a_part_that_cannot_be_built_is_an_error_on_all_ranks_and_no_hang(stage: ZeROStage) -> None:
    config = make_config(2, 1, 2, layers=TINY.layers, micro_batches=2, zero=ZeROConfig(stage=stage))

    async def main(world: Communicator) -> BaseException:
        with pytest.raises((UsageError, PeerCancelled), match="this stage cannot be built") as caught:
            await ThreeDParallelismCoordinator.create(config, BuiltElsewhereOnly(config=TINY), world)
        return caught.value

    errors = await on_ranks(4, main, patience=10)
    assert sorted(type(error).__name__ for error in errors) == ["PeerCancelled"] * 2 + ["UsageError"] * 2
