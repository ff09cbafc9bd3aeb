"""Steps that are tuned: right with every choice, alike on all ranks, and refused on all where a pin cannot run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.errors import AsyncparError, NonFiniteValue, UsageError
from asyncpar.gradsync import GradientSynchronizer, TuningConfig
from tests.gradsync.worlds import (
    Rank,
    assert_copies_equal,
    assert_right,
    compressed,
    draw_and_synchronize,
    on_all_failing,
    parallel_world,
    synchronize_all,
)
from tests.products import in_turn
from tests.soak import chosen

STEPS = chosen(12, soak=24)
EAGER = TuningConfig(budget=0.5, bucket_sizes_mb=(0.0002, 1.0), segments=("4k", "64k"))


def tables_of(ranks: Sequence[Rank]) -> set[str]:
    return {rank.synchronizer.tuning_table() for rank in ranks}


@pytest.mark.parametrize(
    ("codec", "hosts"),
    in_turn(["none", "int8", "auto"], [["a", "a", "a"], ["a", "b", "c"], ["a", "a", "b"]]),
)
async def test_every_step_is_right_whatever_is_tried(codec: str, hosts: list[str]) -> None:
    async with parallel_world(3, hosts=hosts, tuning=EAGER, compression=compressed(codec)) as ranks:
        for step in range(STEPS):
            await draw_and_synchronize(ranks, step)
            assert len(tables_of(ranks)) == 1
            assert_copies_equal(ranks)
            if codec != "int8":
                for rank in ranks:
                    assert_right(rank, step=step)
        (table,) = tables_of(ranks)
        assert f"{STEPS} steps" in table


async def test_ranks_try_other_choices_and_send_nothing_more_to_agree() -> None:
    messages = []
    for tuning in (None, TuningConfig(pin="0.0005m@ring")):
        async with parallel_world(
            2, hosts=["a", "b"], tuning=tuning, parallelism={"comm_strategy": "ring_all_reduce"}
        ) as ranks:
            for step in range(5):
                await draw_and_synchronize(ranks, step)
            messages.append([rank.node.world.traffic.messages for rank in ranks])
    assert messages[0] == messages[1]
    async with parallel_world(2, hosts=["a", "b"], tuning=EAGER) as ranks:
        for step in range(1_000):  # what is tried next depends on times
            await draw_and_synchronize(ranks, step)
            (table,) = tables_of(ranks)
            if len(table.splitlines()) > 3:
                break
    assert len(table.splitlines()) > 3, table


@pytest.mark.parametrize(
    ("pin", "algorithm"),
    [("@ring/4k", "ring/4k"), ("0.0002m@tree", "tree"), ("@doubling", "doubling"), ("1m@halving/2m", "halving/2m")],
)
async def test_what_is_pinned_is_used(pin: str, algorithm: str) -> None:
    async with parallel_world(3, hosts=["a", "b", "c"], tuning=TuningConfig(pin=pin, budget=0.5)) as ranks:
        for step in range(8):
            await draw_and_synchronize(ranks, step)
            for rank in ranks:
                assert_right(rank, step=step)
        for rank in ranks:
            used = {entry.algorithm for entry in rank.node.world.traffic.operations if entry.operation == "all_reduce"}
            assert used == {algorithm}
        assert pin in tables_of(ranks).pop()


async def test_what_was_found_can_be_pinned() -> None:
    async with parallel_world(2, hosts=["a", "b"], tuning=EAGER) as ranks:
        assert ranks[0].synchronizer.tuning_outcome() is None
        for step in range(20):
            await draw_and_synchronize(ranks, step)
        outcome = ranks[0].synchronizer.tuning_outcome()
        assert outcome is not None
        assert outcome == ranks[1].synchronizer.tuning_outcome()
        assert outcome.steps == 20
        assert outcome.lost < outcome.seconds
        for rank in ranks:
            rank.synchronizer.update_tuning_config(TuningConfig(pin=outcome.best))
        await draw_and_synchronize(ranks)
        again = ranks[0].synchronizer.tuning_outcome()
        assert again is not None
        assert again.best == outcome.best
        for rank in ranks:
            assert_right(rank)


async def test_a_pin_that_cannot_run_is_refused_on_every_rank_and_nothing_changes() -> None:
    async with parallel_world(2, hosts=["a", "b"], tuning=TuningConfig(pin="@ring")) as ranks:
        await draw_and_synchronize(ranks)
        before = tables_of(ranks)
        for rank in ranks:
            with pytest.raises(UsageError, match="tuning: pin '@arena': arena cannot run here, expected one of ring"):
                rank.synchronizer.update_tuning_config(TuningConfig(pin="@arena"))
            with pytest.raises(UsageError, match="star cannot run here"):
                rank.synchronizer.update_tuning_config(TuningConfig(pin="4m@star"))
        assert tables_of(ranks) == before
        await draw_and_synchronize(ranks, 1)
        for rank in ranks:
            assert_right(rank, step=1)


async def test_a_pin_that_the_codec_forbids_is_refused_on_every_rank_in_the_step() -> None:
    tuning = TuningConfig(pin="@ring")
    async with parallel_world(2, hosts=["a", "b"], tuning=tuning, compression=compressed("int8")) as ranks:
        before = [rank.model.gradients() for rank in ranks]
        errors = await on_all_failing(ranks, lambda rank: rank.synchronize())
        assert all(isinstance(error, UsageError) for error in errors), errors
        assert all("pin a bucket size only" in str(error) for error in errors)
        for rank, kept in zip(ranks, before, strict=True):
            for name, gradient in rank.model.gradients().items():
                np.testing.assert_array_equal(gradient, kept[name])
        for rank in ranks:
            rank.synchronizer.update_tuning_config(TuningConfig(pin="1m"))
        await synchronize_all(ranks)
        assert_copies_equal(ranks)


async def test_ranks_with_other_pins_are_named() -> None:
    async with parallel_world(2, hosts=["a", "b"], tuning=TuningConfig(pin="@ring")) as ranks:
        ranks[1].synchronizer.update_tuning_config(TuningConfig(pin="@tree"))
        errors = await on_all_failing(ranks, lambda rank: rank.synchronize())
        assert all(isinstance(error, SettingsDiffer) for error in errors), errors
        assert all("@ring" in str(error) and "@tree" in str(error) for error in errors)
        ranks[1].synchronizer.update_tuning_config(TuningConfig(pin="@ring"))
        await draw_and_synchronize(ranks)
        for rank in ranks:
            assert_right(rank)


async def test_a_rank_without_tuning_is_an_error_on_every_rank() -> None:
    async with parallel_world(2, tuning=EAGER) as ranks:
        ranks[0].synchronizer.update_tuning_config(None)
        errors = await on_all_failing(ranks, lambda rank: rank.synchronize())
        assert all(isinstance(error, AsyncparError) for error in errors), errors
        ranks[0].synchronizer.update_tuning_config(EAGER)
        await draw_and_synchronize(ranks)
        assert len(tables_of(ranks)) == 1


async def test_a_step_that_fails_counts_nowhere() -> None:
    async with parallel_world(2, hosts=["a", "b"], tuning=EAGER) as ranks:
        for step in range(12):
            for rank in ranks:
                rank.draw(step)
            if step % 3 == 1:
                next(ranks[1].model.parameters()).grad[...] = np.nan
                errors = await on_all_failing(ranks, lambda rank: rank.synchronize())
                assert all(isinstance(error, NonFiniteValue) for error in errors)
            else:
                await synchronize_all(ranks)
        (table,) = tables_of(ranks)
        assert "in 8 steps" in table


async def test_a_new_configuration_begins_anew() -> None:
    async with parallel_world(2, hosts=["a", "b"], tuning=EAGER) as ranks:
        for step in range(6):
            await draw_and_synchronize(ranks, step)
        for rank in ranks:
            rank.synchronizer.update_compression_config(compressed("int8"))
        assert tables_of(ranks) == {""}
        await draw_and_synchronize(ranks)
        for rank in ranks:
            rank.synchronizer.update_tuning_config(None)
        await draw_and_synchronize(ranks)
        assert tables_of(ranks) == {""}


async def test_tuning_is_for_data_parallelism_alone() -> None:
    with pytest.raises(UsageError, match="tuning: is for data parallelism alone"):
        async with parallel_world(2, tp=2, tuning=EAGER):
            pass


async def test_one_rank_alone_has_nothing_to_tune() -> None:
    async with parallel_world(1) as ranks:
        synchronizer = GradientSynchronizer.data_parallel(ranks[0].node.world, tuning=EAGER, name="alone")
        assert synchronizer.tuning_table() == ""
        await synchronizer.synchronize_gradients({"w": np.ones(3, np.float32)})
        assert "0 steps" in synchronizer.tuning_table()


@pytest.mark.parametrize("is_measured", [False, True])
async def test_where_lanes_were_measured_steps_begin_with_what_is_cheapest(is_measured: bool) -> None:
    async with parallel_world(2, hosts=["a", "b"], tuning=TuningConfig()) as ranks:
        if is_measured:
            await asyncio.gather(*(rank.node.world.calibrate() for rank in ranks))
        await draw_and_synchronize(ranks, 0)
        outcome = ranks[0].synchronizer.tuning_outcome()
        assert outcome is not None
        assert outcome.best.endswith("@doubling" if is_measured else "@halving"), "gradients are small"
