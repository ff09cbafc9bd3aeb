"""The memory that ranks hold between steps, and reserve for a step, is that of the estimate, to the byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from asyncpar.core.config.names import CodecChoice
from asyncpar.errors import UsageError
from asyncpar.estimate import ModelShape, RankMemory
from asyncpar.estimate.job import Precision
from asyncpar.estimate.memory import rank_memories
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.hybrid import HybridConfig
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.ranks import running
from tests.hybrid.worlds import TINY, make_config
from tests.products import in_turn
from tests.soak import first, is_soak

MODEL = replace(TINY, layers=2, heads=4, features=64, vocabulary=128, length=8, dtype="float32")
SHAPE = ModelShape(layers=2, hidden=64, heads=4, vocabulary=128, sequence=8, is_tied=False, has_query_bias=False)
GIGABYTE = 1_000_000_000

SIZES = first(5, [(2, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2)])
"""Replicas, tensor-parallel ranks and stages."""

ZERO = [
    ZeROConfig(stage=stage, gradient_compression=compresses)
    for stage in list(ZeROStage)[1:]
    for compresses in (False, True)
]


WITHOUT_ZERO = ZeROConfig(stage=ZeROStage.NONE)


def layouts() -> list[tuple[tuple[int, int, int], ZeROConfig, int]]:
    """Return all with ``--soak``, otherwise each stage on the fewest ranks, and each size with one stage."""
    stages = [WITHOUT_ZERO, *ZERO]
    if is_soak():
        return list(product(SIZES, stages, [1, 2]))
    fewest = [(SIZES[0], zero, 1 + number % 2) for number, zero in enumerate(stages)]
    return fewest + [(sizes, stages[-number], 1 + number % 2) for number, sizes in enumerate(SIZES[1:], 1)]


def config_of(sizes: tuple[int, int, int], **settings: Any) -> HybridConfig:
    wanted = {"pipeline_schedule": "one_forward_one_backward", "memory_strategy": "basic", **settings}
    return make_config(*sizes, layers=2, **wanted)


def estimate(config: HybridConfig) -> tuple[RankMemory, ...]:
    return rank_memories(
        SHAPE,
        config.parallelism,
        [0.0] * config.parallelism.pp_size,
        stage=config.zero,
        precision=Precision.FP32,
        compression=config.compression,
    )


async def measure(config: HybridConfig, *, steps: int = 2) -> list[tuple[float, float, float, RankMemory]]:
    """Return, for each rank, what it reserves, what it holds after steps, the most that it held, and the estimate."""
    async with running(MODEL, config) as ranks:
        flows = [one._session.assembly.flow for one in ranks.all]  # noqa: SLF001  # what the gradient flow holds is not public
        needed = [flow.nbytes_needed for flow in flows]
        for _ in range(steps):
            await ranks.take_step()
        stages = [one.groups.mapping.pp_rank for one in ranks.all]
        return [
            (wanted, flow.memory().total, flow.nbytes, estimate(config)[stage])
            for wanted, flow, stage in zip(needed, flows, stages, strict=True)
        ]


@pytest.mark.parametrize(("sizes", "zero", "micro_batches"), layouts())
async def test_ranks_hold_what_is_estimated(sizes: tuple[int, int, int], zero: ZeROConfig, micro_batches: int) -> None:
    shared = 1.0 if sizes[1:] == (1, 1) else 1.01  # parameters that several slices or stages have take a bucket more
    for needed, held, most, expected in await measure(config_of(sizes, zero=zero, micro_batches=micro_batches)):
        assert expected.held <= held <= shared * expected.held
        assert expected.flow <= needed <= shared * expected.flow
        assert most <= shared * expected.flow


@pytest.mark.parametrize(
    ("sizes", "codec"), in_turn([(2, 1, 1), (4, 1, 1), (2, 1, 2)], ["powersgd:2", "topk:0.1", "int8", "bf16"])
)
async def test_codecs_count(sizes: tuple[int, int, int], codec: CodecChoice) -> None:
    config = config_of(sizes, compression=GradientCompressionConfig(codec=codec))
    for needed, held, _, expected in await measure(config):
        assert held == pytest.approx(expected.held, rel=0.01)
        assert needed == pytest.approx(expected.flow, rel=0.01)


@pytest.mark.parametrize("zero", [ZeROConfig(stage=stage) for stage in ZeROStage], ids=lambda zero: str(zero.stage))
async def test_what_is_estimated_is_enough_and_less_is_not(zero: ZeROConfig) -> None:
    (expected,) = estimate(config_of((2, 1, 1), zero=zero))
    enough = config_of((2, 1, 1), zero=zero, max_memory_per_device=1.02 * expected.flow / GIGABYTE)
    assert await measure(enough)
    with pytest.raises(UsageError, match="max_memory_per_device"):
        await measure(config_of((2, 1, 1), zero=zero, max_memory_per_device=0.98 * expected.flow / GIGABYTE))
