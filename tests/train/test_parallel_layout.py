"""Layouts of training runs, as a command line gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncpar.core.config.names import CodecChoice
from asyncpar.core.config.parallel import MemoryOptimizationStrategy, PipelineScheduleType
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.hybrid import HybridConfig
from asyncpar.nn import TransformerConfig, WarmupCosine
from asyncpar.nn.optimizers import AdamW
from asyncpar.train import Checkpoints, ParallelLayout, Recompute, TrainingConfig


def make_config(
    world_size: int, *, rows: int = 64, layers: int = 4, codec: CodecChoice | None = None, **layout: Any
) -> HybridConfig:
    training = TrainingConfig(
        model=TransformerConfig(layers=layers),
        rule=AdamW(beta1=0.8, beta2=0.95, weight_decay=0.1),
        clip_norm=2.0,
        schedule=WarmupCosine(peak=0.1, steps=5),
        steps=5,
        rows=rows,
    )
    return ParallelLayout(**layout).make_config(
        training,
        world_size=world_size,
        compression=GradientCompressionConfig(codec=codec),
        bucketing=GradientBucketingConfig(),
    )


def test_replicas_are_as_many_as_there_are_ranks_for() -> None:
    parallelism = make_config(8, tp=2, pp=2).parallelism
    assert (parallelism.dp_size, parallelism.tp_size, parallelism.pp_size) == (2, 2, 2)


def test_layers_that_do_not_divide_are_split_unevenly_larger_parts_first() -> None:
    assert make_config(3, pp=3, layers=7).parallelism.stage_layers() == (3, 2, 2)


def test_a_pipeline_has_four_micro_batches_unless_told_otherwise_and_nothing_else_has_more_than_one() -> None:
    assert make_config(2, pp=2).micro_batches == 4
    assert make_config(2, pp=2, micro_batches=2).micro_batches == 2
    assert make_config(2).micro_batches == 1


def test_the_optimizer_is_that_of_the_training() -> None:
    config = make_config(1)
    assert (config.rule.weight_decay, config.clip_norm) == (0.1, 2.0)
    assert "beta1=0.8" in str(config.rule)


def test_recomputing_all_is_checkpointing_and_the_rest_are_strategies() -> None:
    all_of_them = make_config(1, recompute=Recompute.ALL).parallelism
    assert all_of_them.enable_gradient_checkpointing
    extreme = make_config(1, recompute=Recompute.EXTREME).parallelism
    assert extreme.memory_strategy is MemoryOptimizationStrategy.EXTREME
    assert not extreme.enable_gradient_checkpointing


@pytest.mark.parametrize(
    ("layout", "described"),
    [
        ({}, "dp 8"),
        ({"tp": 2, "zero": 1}, "dp 4, tp 2, zero 1"),
        ({"pp": 2, "schedule": PipelineScheduleType.ZBV, "recompute": Recompute.ALL}, "dp 4, pp 2, zbv, recompute all"),
    ],
)
def test_a_layout_is_described_by_what_is_used_of_it(layout: dict[str, Any], described: str) -> None:
    assert ParallelLayout(**layout).describe(8) == described


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 3}, r"--dp, --tp, --pp: expected tp 1 \* pp 3 to divide the number of ranks, 4"),
        ({"dp": 2, "tp": 4}, r"--dp, --tp, --pp: expected dp 2 \* tp 4 \* pp 1 to be the number of ranks, 4"),
        ({"tp": 0}, "--dp, --tp, --pp: expected positive numbers, got None, 0, 1"),
        ({"dp": 0}, "--dp, --tp, --pp: expected positive numbers|expected dp 0"),
        ({"pp": 2, "layers": 1}, "--pp: expected at most one stage for each of 1 layers, got 2"),
        ({"micro_batches": 80}, "--micro-batches: expected 1 to 16 with a batch of 64 rows over 4 replicas, got 80"),
        ({"micro_batches": 0}, "--micro-batches: expected 1 to 16"),
        ({"pp": 2, "chunks": 2}, "num_model_chunks"),
        ({"zero": 1, "codec": "int8"}, "compression: expected none with stage1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_config(4, **options).make_schedule()


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}])
def test_checkpoints_must_come_now_and_then_and_stay(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="checkpoint: expected every and keep of at least 1"):
        Checkpoints(folder=Path("x"), **wrong)


def test_a_schedule_of_ones_own_comes_from_a_file_and_brings_its_micro_batches(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(UsageError, match="schedule: expected num_microbatches = 3, got 2"):
        make_config(2, pp=2, micro_batches=3, schedule=file)
    schedule = make_config(2, pp=2, micro_batches=2, schedule=file).make_schedule()
    assert schedule.num_virtual_stages == 2
    assert make_config(2, pp=2, micro_batches=2, schedule=file).parallelism.stage_layers() == (2, 2)
