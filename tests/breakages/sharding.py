"""Mistakes in training whose parameters, gradients and states are sharded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest

from asyncpar.nn.optimizers import SGD, Adam, Optimizer, distinct
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.zero import ZeROStage, engine, partition, stepping
from asyncpar.zero.buckets import BucketReduction
from asyncpar.zero.row_sum import PlainSum
from asyncpar.zero.share import ParameterShare
from tests.breakages.breakage import Breakage, Mistake, impatient, on_virtual_time
from tests.zero.replicas import (
    EVEN_SHAPES,
    draw_parameters,
    engines,
    give_gradients,
    on_all,
    take_step,
    whole_values,
)

SIZE, RATE = 3, 0.05
RULE = SGD(momentum=0.5)

# -- checks -----------------------------------------------------------------------------------------------------------


@cache
def replicas_train_as_one_process(stage: ZeROStage) -> Callable[[], None]:
    """Return the check that a step of sharded replicas moves parameters as it does in one process."""

    async def main() -> None:
        expected = _train_alone()
        async with engines(SIZE, stage, rule=RULE, dtype="float64", is_prepared=False) as made:
            for one in made:
                impatient(one.communicator)
            await on_all(made, lambda one: one.prepare())
            await on_all(made, lambda one: take_step(one, 0, learning_rate=RATE))
            for rank, values in enumerate(await on_all(made, whole_values)):
                for name, value in expected.items():
                    np.testing.assert_allclose(values[name], value, rtol=1e-12, err_msg=f"rank {rank} {name}")

    return on_virtual_time(main)


def _train_alone() -> dict[str, Array]:
    parameters = draw_parameters(dtype="float64")
    for rank in range(SIZE):
        give_gradients(parameters, rank=rank, step=0)
    optimizer = Optimizer(parameters, RULE)
    optimizer.scale(1 / SIZE)
    optimizer.step(RATE)
    return {parameter.name: parameter.value for parameter in parameters}


def bytes_are_those_of_the_formula(stage: ZeROStage, expected: Callable[[int], float]) -> Callable[[], None]:
    """Return the check of what is counted over the arrays that there are; ``expected`` is by number of ranks."""

    async def main() -> None:
        for size in (1, 2, 4):
            async with engines(size, stage, rule=Adam(), shapes=EVEN_SHAPES) as made:
                for one in made:
                    impatient(one.communicator)
                await on_all(made, lambda one: take_step(one, 0))
                for one in made:
                    assert one.memory_stats().bytes_per_value == expected(size), "bytes per value"

    return on_virtual_time(main)


def chunks_are_clamped() -> None:
    assert chunks(5, 4) == [(0, 2), (2, 4), (4, 5), (5, 5)], "chunks of 5 over 4"
    assert chunks(7, 3) == [(0, 3), (3, 6), (6, 7)], "chunks of 7 over 3"


def chunks(count: int, size: int) -> list[tuple[int, int]]:
    spec = partition.Spec(name="values", shape=(count,), dtype=np.dtype(np.float32))
    made = partition.make_partition([spec], size)
    return [made.bounds(0, rank) for rank in range(size)]


# -- mistakes ---------------------------------------------------------------------------------------------------------


def add_in_place_of_averaging(patch: pytest.MonkeyPatch) -> None:
    right = PlainSum.begin

    def wrong(self: PlainSum, key: str) -> Coroutine[Any, Any, Any]:
        self._op = "sum"
        return right(self, key)

    patch.setattr(PlainSum, "begin", wrong)


def divide_once_more(patch: pytest.MonkeyPatch) -> None:
    right = PlainSum.settle

    def wrong(self: PlainSum) -> None:
        right(self)
        self.row[...] /= SIZE

    patch.setattr(PlainSum, "settle", wrong)


def step_on_own_gradients(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: BucketReduction) -> None:
        """Leave what was reduced where it is."""

    patch.setattr(BucketReduction, "_unpack", wrong)


def keep_updated_values_to_oneself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stepping, "value_gathers", lambda means, what, buckets: [])


def register_in_the_order_of_a_hash(patch: pytest.MonkeyPatch) -> None:
    processes = itertools.count()

    def wrong(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
        process = next(processes)
        return tuple(sorted(distinct(parameters), key=lambda parameter: parameter.name, reverse=process % 2 == 1))

    patch.setattr(engine, "distinct", wrong)


def forget_to_clamp_chunks(patch: pytest.MonkeyPatch) -> None:
    def wrong(count: int, parts: int, part: int) -> tuple[int, int]:
        step = -(-count // parts)
        return part * step, min((part + 1) * step, count)

    patch.setattr(partition, "ceil_chunk", wrong)


def keep_released_values(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: ParameterShare) -> None:
        """Say that the value is released, and keep it."""

    patch.setattr(ParameterShare, "part_with_value", wrong)


def keep_whole_gradients(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: ParameterShare) -> Array | None:
        return self.parameter.grad.reshape(-1).copy() if self.parameter.has_grad else None

    patch.setattr(ParameterShare, "take_gradient", wrong)


# -- cases ------------------------------------------------------------------------------------------------------------


def _training(
    mistake: Mistake,
    switch_on: Callable[[pytest.MonkeyPatch], None],
    *,
    stage: ZeROStage = ZeROStage.STAGE1,
    shows: str = r"rank \d \w+",
) -> Breakage:
    check = replicas_train_as_one_process(stage)
    return Breakage(mistake=mistake, where=f"zero_{stage}", switch_on=switch_on, check=check, shows=shows)


CASES = (
    _training(Mistake.MEAN_FORGOTTEN, add_in_place_of_averaging),
    _training(Mistake.MEAN_TWICE, divide_once_more, stage=ZeROStage.STAGE2),
    _training(Mistake.UNSYNCHRONIZED_APPLIED, step_on_own_gradients),
    _training(Mistake.DROPPED_RESULT, keep_updated_values_to_oneself),
    _training(Mistake.HASH_ORDER, register_in_the_order_of_a_hash, stage=ZeROStage.STAGE2, shows="rank 0 has"),
    Breakage(
        mistake=Mistake.START_PAST_END,
        where="zero",
        switch_on=forget_to_clamp_chunks,
        check=chunks_are_clamped,
        shows="chunks of 5 over 4",
    ),
    Breakage(
        mistake=Mistake.UNMEASURED_MEMORY,
        where="zero_values",
        switch_on=keep_released_values,
        check=bytes_are_those_of_the_formula(ZeROStage.STAGE3, lambda size: 16 / size),
        shows="bytes per value",
    ),
    Breakage(
        mistake=Mistake.UNMEASURED_MEMORY,
        where="zero_gradients",
        switch_on=keep_whole_gradients,
        check=bytes_are_those_of_the_formula(ZeROStage.STAGE2, lambda size: 4 + 12 / size),
        shows="bytes per value",
    ),
)
