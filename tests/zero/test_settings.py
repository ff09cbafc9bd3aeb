"""Settings, formulas, and the order of calls: everything that needs no other rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.zero import MemoryExceeded, ZeROConfig, ZeROStage, memory_reduction
from asyncpar.zero.config import MIB
from asyncpar.zero.partition import Spec, make_budget, make_partition
from asyncpar.zero.step_state import EnginePhase, StepState


def test_defaults_are_those_of_the_contract() -> None:
    config = ZeROConfig()
    assert config.stage is ZeROStage.STAGE1
    assert (config.bucket_size_mb, config.overlap_comm, config.reduce_bucket_size) == (25, True, 500_000_000)
    assert (config.prefetch_depth, config.max_memory_usage_mb) == (2, 1024)
    assert (config.gradient_compression, config.pin_memory) == (False, True)


def test_each_stage_shards_more() -> None:
    sharded = [(stage.shards_states, stage.shards_gradients, stage.shards_parameters) for stage in ZeROStage]
    assert sharded == [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    assert [ZeROStage.of(number) for number in range(4)] == list(ZeROStage)
    assert [stage.number for stage in ZeROStage] == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [-1, 4, True])
def test_there_is_no_other_stage(number: int) -> None:
    with pytest.raises(UsageError, match="stage: expected 0 to 3"):
        ZeROStage.of(number)


@pytest.mark.parametrize(
    "setting",
    [
        {"stage": 2},
        {"bucket_size_mb": 0},
        {"bucket_size_mb": float("inf")},
        {"reduce_bucket_size": 0},
        {"reduce_bucket_size": 1.5},
        {"prefetch_depth": -1},
        {"max_memory_usage_mb": -1},
        {"algorithm": "ring", "gradient_compression": True},
    ],
)
def test_wrong_settings_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(setting))}: expected"):
        ZeROConfig(**setting)


@pytest.mark.parametrize(("number", "expected"), [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)])
def test_equal_parts_over_four_ranks_are_reduced_by_a_quarter_a_stage(number: int, expected: float) -> None:
    assert memory_reduction(ZeROStage.of(number), 4) == pytest.approx(expected)


def test_adam_in_single_precision_is_reduced_as_the_formulas_say() -> None:
    for number, bytes_per_value in enumerate([16, 4 + 4 + 8 / 4, 4 + 12 / 4, 16 / 4]):
        reduction = memory_reduction(ZeROStage.of(number), 4, parameters=4, gradients=4, states=8)
        assert 16 * (1 - reduction) == pytest.approx(bytes_per_value)


@pytest.mark.parametrize("bad", [{"size": 0}, {"size": 2, "states": -1}])
def test_a_reduction_of_nothing_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        memory_reduction(ZeROStage.STAGE1, **bad)


def make_specs(*lengths: int) -> list[Spec]:
    return [Spec(name=f"p{length}", shape=(length,), dtype=np.dtype(np.float32)) for length in lengths]


def no_extra(rows: int, width: int, dtype: np.dtype[Any]) -> int:
    return 0


def test_fewer_buckets_are_under_way_where_memory_is_short() -> None:
    partition = make_partition(make_specs(MIB // 4, MIB // 4), 2, bucket_bytes=MIB)
    windows = [make_budget(partition, ZeROConfig(max_memory_usage_mb=most), no_extra).window for most in (1.5, 3, 100)]
    assert windows == [1, 2, 4]
    with pytest.raises(MemoryExceeded, match=r"expected room for 1.5 MiB, the largest bucket, got 1.4"):
        make_budget(partition, ZeROConfig(max_memory_usage_mb=1.4), no_extra)


def test_what_sums_take_counts_against_the_limit() -> None:
    partition = make_partition(make_specs(MIB // 4), 2, bucket_bytes=MIB)
    with pytest.raises(MemoryExceeded, match=r"expected room for 2 MiB, the largest bucket, got 1.9"):
        make_budget(partition, ZeROConfig(max_memory_usage_mb=1.9), lambda *_: MIB // 2)


def test_most_memory_of_stage_3_is_for_parameters() -> None:
    partition = make_partition(make_specs(MIB // 4), 2)
    budget = make_budget(partition, ZeROConfig(stage=ZeROStage.STAGE3, max_memory_usage_mb=12), no_extra)
    assert budget.window == 2
    assert budget.rest == 9 * MIB


def test_nothing_comes_before_prepare() -> None:
    state = StepState(accumulates=False)
    for check in (state.check_giving, state.check_reduced, state.check_sound, state.check_prepared):
        with pytest.raises(UsageError, match=r"step: await prepare\(\) on all ranks first"):
            check("step")
    state.phase = EnginePhase.OPEN
    with pytest.raises(UsageError, match=r"shard: this must come before prepare"):
        state.check_new("shard")


def test_gradients_are_not_averaged_twice() -> None:
    state = StepState(accumulates=False)
    state.phase = EnginePhase.REDUCED
    with pytest.raises(UsageError, match="must not be averaged twice"):
        state.check_giving("reduce")
    accumulating = StepState(accumulates=True)
    accumulating.phase = EnginePhase.REDUCED
    accumulating.check_giving("reduce")


def test_after_a_failure_replicas_must_meet_first() -> None:
    state = StepState(accumulates=True)
    state.phase = EnginePhase.OPEN
    state.break_off("rank 1 left")
    state.break_off("and then more")
    with pytest.raises(UsageError, match=r"step: an earlier step failed \(rank 1 left\); await resume\(\)"):
        state.check_reduced("step")
