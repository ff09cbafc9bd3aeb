"""Training over ranks comes to what one process comes to: losses, norms, values and states of the optimizer.

A few combinations of ``cases.py`` hold every choice.  ``--soak`` tries those in which every two choices come together,
and more at even distances in the whole product, which would take days.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import islice, product
from typing import Any

import pytest

from asyncpar.core.config.parallel import MemoryOptimizationStrategy, PipelineScheduleType
from asyncpar.hybrid import HybridConfig
from asyncpar.nn import TransformerConfig
from asyncpar.nn.optimizers import SGD, Adam
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.cases import Case, covering_sample, small_sample, whole_product
from tests.hybrid.worlds import TINY, Outcome, assert_same, make_config, train_alone, train_together
from tests.products import in_turn
from tests.soak import chosen, first, is_soak

DISTANCE = 997
"""A prime, so that the choices of all fields take turns."""

CASES = [*covering_sample(), *islice(whole_product(), 0, None, DISTANCE)] if is_soak() else small_sample()
EXACT = 1e-12
STEPS = chosen(2, soak=3)


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_any_layout_trains_as_one_process_does(case: Case) -> None:
    together = await train_together(
        case.model, case.config, rows=case.rows, sequence_parallel=case.is_sequence_parallel
    )
    assert_same(together, alone(case.model, case.clip_norm, case.rows), tolerance=EXACT)


@lru_cache(maxsize=64)
def alone(model: TransformerConfig, clip_norm: float | None, rows: int) -> Outcome:
    return train_alone(model, HybridConfig(parallelism=make_config().parallelism, clip_norm=clip_norm), rows=rows)


SEVEN = replace(TINY, layers=7, tied_embeddings=True)


@pytest.mark.parametrize(
    ("stage", "dp"), chosen([(ZeROStage.NONE, 1), (ZeROStage.STAGE3, 2)], soak=[*product(ZeROStage, [1, 2])])
)
async def test_seven_layers_on_three_stages(dp: int, stage: ZeROStage) -> None:
    config = make_config(
        dp, 1, 3, layers=7, layers_per_stage=(3, 2, 2), micro_batches=4, zero=ZeROConfig(stage=stage), clip_norm=0.3
    )
    together = await train_together(SEVEN, config, rows=11)
    assert_same(together, train_alone(SEVEN, config, rows=11), tolerance=EXACT)


@pytest.mark.parametrize(
    ("schedule", "chunks", "given"),
    [
        (PipelineScheduleType.INTERLEAVED_ONE_F1B, 2, (2, 1, 1, 3)),
        (PipelineScheduleType.ZERO_BUBBLE, 3, (1, 1, 2, 1, 1, 1)),
        (PipelineScheduleType.GPIPE, 2, (1, 3, 2, 1)),
        (PipelineScheduleType.ZBV, 2, (3, 1, 1, 2)),
        (PipelineScheduleType.DUALPIPE_V, 2, (1, 2, 3, 1)),
    ],
)
async def test_every_virtual_stage_may_have_its_own_number_of_layers(
    schedule: PipelineScheduleType, chunks: int, given: tuple[int, ...]
) -> None:
    config = make_config(
        1, 1, 2, layers=7, layers_per_stage=given, pipeline_schedule=schedule, num_model_chunks=chunks, micro_batches=4
    )
    steps = chosen(1, soak=2)  # with all gradients in the states that are compared
    together = await train_together(SEVEN, config, rows=9, steps=steps)
    assert_same(together, train_alone(SEVEN, config, rows=9, steps=steps), tolerance=EXACT)


@pytest.mark.parametrize(("stage", "rule"), in_turn(ZeROStage, [Adam(), SGD(momentum=0.9, weight_decay=0.01)]))
async def test_other_rules_train_as_in_one_process(rule: Any, stage: ZeROStage) -> None:
    config = make_config(
        *chosen((2, 1, 1), soak=(2, 2, 1)), rule=rule, micro_batches=2, zero=ZeROConfig(stage=stage), clip_norm=0.3
    )
    together = await train_together(TINY, config, rows=10)
    assert_same(together, train_alone(TINY, config, rows=10), tolerance=EXACT)


@pytest.mark.parametrize(
    ("layout", "stage"),
    first(
        1,
        [
            ((2, 1, 2), ZeROStage.STAGE3),
            ((1, 4, 1), ZeROStage.NONE),
            ((4, 1, 1), ZeROStage.STAGE1),
            ((2, 2, 2), ZeROStage.NONE),
            ((2, 2, 2), ZeROStage.STAGE3),
            ((2, 1, 4), ZeROStage.STAGE2),
        ],
    ),
)
async def test_losses_of_float32_stay_within_a_millionth(layout: tuple[int, int, int], stage: ZeROStage) -> None:
    model = replace(TINY, layers=4, dtype="float32", heads=8, features=16, tied_embeddings=True)
    config = make_config(*layout, layers=4, micro_batches=4, zero=ZeROConfig(stage=stage), clip_norm=0.3)
    together = await train_together(model, config, rows=18, steps=STEPS)
    alone = train_alone(model, config, rows=18, steps=STEPS)
    for one, other in zip(together.losses, alone.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


RECOMPUTED = [one for one in MemoryOptimizationStrategy if one is not MemoryOptimizationStrategy.BASIC]


@pytest.mark.parametrize(
    ("stage", "strategies"),
    [
        (ZeROStage.STAGE3, chosen(RECOMPUTED[::2], soak=RECOMPUTED)),
        (ZeROStage.NONE, chosen(RECOMPUTED[1::2], soak=RECOMPUTED)),
    ],
)
async def test_what_is_recomputed_drops_the_same_again(
    stage: ZeROStage, strategies: list[MemoryOptimizationStrategy]
) -> None:
    """Dropout depends on the replica, so there is no one process to compare with: what keeps everything is the rule."""
    model = replace(TINY, layers=4, dropout=0.3)
    settings: dict[str, Any] = {"layers": 4, "micro_batches": 2, "zero": ZeROConfig(stage=stage)}
    steps = chosen(1, soak=2)
    kept = make_config(2, 1, 2, memory_strategy=MemoryOptimizationStrategy.BASIC, **settings)
    expected = await train_together(model, kept, rows=8, steps=steps)
    for strategy in strategies:
        recomputed = make_config(2, 1, 2, memory_strategy=strategy, **settings)
        assert_same(await train_together(model, recomputed, rows=8, steps=steps), expected, tolerance=0.0)
    without = train_alone(replace(model, dropout=0.0), kept, rows=8, steps=steps)
    assert abs(expected.losses[-1] - without.losses[-1]) > 1e-4
