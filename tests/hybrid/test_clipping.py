"""The global norm counts everything once, and stages of ZeRO come to the same bits as plain data parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.worlds import TINY, make_config, train_alone, train_together
from tests.products import in_turn
from tests.soak import chosen

SHARDED = [ZeROStage.STAGE1, ZeROStage.STAGE2, ZeROStage.STAGE3]
CLIP = 0.25
STEPS = chosen(2, soak=3)


@pytest.mark.parametrize(("dtype", "stage", "dp"), in_turn(["float32", "float64"], SHARDED, [2, 4]))
async def test_sharded_replicas_have_the_bits_of_plain_ones(dp: int, stage: ZeROStage, dtype: str) -> None:
    """Two replicas have but one order of adding; four halve, in both."""
    model = replace(TINY, layers=2, dtype=dtype, vocabulary=11, mlp_hidden=27, tied_embeddings=True)
    settings: dict[str, Any] = {"layers": 2, "micro_batches": 2, "clip_norm": CLIP}
    zero = ZeROConfig(stage=stage, bucket_size_mb=0.003, algorithm=None if dp == 2 else "halving")
    plain = await train_together(model, make_config(dp, **settings), rows=4 * dp, steps=STEPS)
    sharded = await train_together(model, make_config(dp, zero=zero, **settings), rows=4 * dp, steps=STEPS)
    assert max(plain.norms) > CLIP
    assert sharded.losses == plain.losses
    assert sharded.norms == plain.norms
    for key, values in plain.tensors.items():
        np.testing.assert_array_equal(sharded.tensors[key], values, err_msg=str(key))


@pytest.mark.parametrize(
    ("layout", "is_sequence_parallel", "stage"),
    [
        (*spread, stage)
        for spread, stage in in_turn(
            [
                ((2, 1, 1), False),
                ((1, 2, 1), False),
                ((1, 1, 2), False),
                ((2, 2, 2), False),
                ((1, chosen(2, soak=4), 2), True),
            ],
            [ZeROStage.STAGE2, ZeROStage.NONE],
        )
    ],
)
async def test_the_norm_is_that_of_one_process(
    layout: tuple[int, int, int], stage: ZeROStage, is_sequence_parallel: bool
) -> None:
    """Replicated norms and biases, tied tables, and all slices count once, however they are spread."""
    model = replace(TINY, layers=2, tied_embeddings=True, vocabulary=11)
    config = make_config(*layout, layers=2, micro_batches=2, zero=ZeROConfig(stage=stage), clip_norm=CLIP)
    together = await train_together(model, config, rows=6, steps=2, sequence_parallel=is_sequence_parallel)
    alone = train_alone(model, config, rows=6, steps=2)
    np.testing.assert_allclose(together.norms, alone.norms, rtol=1e-13)
    assert min(alone.norms) > CLIP


async def test_clipping_makes_a_difference() -> None:
    clipped = await train_together(TINY, make_config(2, 1, 1, clip_norm=1e-6), rows=4)
    not_clipped = await train_together(TINY, make_config(2, 1, 1), rows=4)
    assert clipped.norms[0] == not_clipped.norms[0]
    assert not np.array_equal(clipped.tensors["head/weight", "first"], not_clipped.tensors["head/weight", "first"])
