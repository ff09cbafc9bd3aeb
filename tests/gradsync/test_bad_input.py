"""Ranks that bring something else than the others: a typed error on all, nothing changed, and the next step works."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.call import WatchedCall
from asyncpar.core.config.placement import UNPLACED, Placement
from asyncpar.errors import AsyncparError, PeerCancelled, ProtocolError, UsageError
from asyncpar.gradsync import GradientBucketingConfig
from asyncpar.nn import Array
from asyncpar.testing.loop import run_virtual
from tests.gradsync.worlds import (
    Rank,
    assert_copies_equal,
    assert_right,
    compressed,
    draw_and_synchronize,
    on_all,
    on_all_failing,
    parallel_world,
)
from tests.products import in_turn
from tests.soak import chosen

Tensors = Sequence["Tensor"]


@dataclass(frozen=True)
class Tensor:
    name: str
    grad: Array
    placement: Placement = UNPLACED


@dataclass(frozen=True)
class Held:
    tensors: Tensors

    def parameters(self) -> Iterator[Tensor]:
        return iter(self.tensors)


def tensors_of(rank: Rank) -> list[Tensor]:
    return [Tensor(p.name, p.grad, p.placement) for p in rank.model.parameters()]


def with_another_shape(held: list[Tensor]) -> None:
    held[1] = Tensor(held[1].name, np.ones((3, 5), np.float32), held[1].placement)


def with_another_dtype(held: list[Tensor]) -> None:
    held[1] = Tensor(held[1].name, held[1].grad.astype(np.float64), held[1].placement)


def with_integers(held: list[Tensor]) -> None:
    held[1] = Tensor(held[1].name, held[1].grad.astype(np.int32), held[1].placement)


def with_one_missing(held: list[Tensor]) -> None:
    del held[1]


def with_one_more(held: list[Tensor]) -> None:
    held.insert(2, Tensor("more", np.ones(3, np.float32)))


def in_another_order(held: list[Tensor]) -> None:
    held[1], held[2] = held[2], held[1]


def with_another_name(held: list[Tensor]) -> None:
    held[1] = Tensor("other", held[1].grad, held[1].placement)


def with_one_twice(held: list[Tensor]) -> None:
    held.append(held[1])


def with_another_placement(held: list[Tensor]) -> None:
    held[1] = Tensor(held[1].name, held[1].grad, Placement(tied="embedding"))


def with_nothing(held: list[Tensor]) -> None:
    held.clear()


CHANGES = (
    with_another_shape,
    with_another_dtype,
    with_integers,
    with_one_missing,
    with_one_more,
    in_another_order,
    with_another_name,
    with_one_twice,
    with_another_placement,
    with_nothing,
)


async def assert_refused(ranks: Sequence[Rank], culprit: int, change: Callable[[list[Tensor]], None]) -> None:
    """Assert that all ranks refuse a step with what ``culprit`` has, name it, and can go on."""
    held = {rank.node.rank: tensors_of(rank) for rank in ranks}
    expected = held[culprit][1].name
    change(held[culprit])
    before = [rank.model.gradients() for rank in ranks]
    errors = await on_all_failing(
        ranks, lambda rank: rank.synchronizer.synchronize_gradients(Held(held[rank.node.rank]))
    )
    for rank, error in zip(ranks, errors, strict=True):
        assert isinstance(error, AsyncparError), repr(error)
        if (
            rank.mapping.pp_rank == ranks[culprit].mapping.pp_rank
            and rank.mapping.tp_rank == ranks[culprit].mapping.tp_rank
        ):
            assert isinstance(error, UsageError), repr(error)
            assert any(name in str(error) for name in (expected, "more", "other", "nothing")), str(error)
            assert rank.node.rank == culprit or f"rank {culprit}" in str(error), str(error)
    for rank, gradients in zip(ranks, before, strict=True):
        for name, gradient in rank.model.gradients().items():
            np.testing.assert_array_equal(gradient, gradients[name])


@pytest.mark.parametrize(("change", "culprit"), in_turn(CHANGES, [0, 2]))
async def test_one_replica_that_differs_from_the_beginning(
    change: Callable[[list[Tensor]], None], culprit: int
) -> None:
    async with parallel_world(3) as ranks:
        await assert_refused(ranks, culprit, change)
        await assert_next_steps_work(ranks)


MANY = chosen([((2, 2, 1), 2), ((2, 1, 2), 1)], soak=[((2, 2, 2), 4), ((2, 2, 2), 1)])
"""Replicas, tensor-parallel ranks and stages, and who differs."""


@pytest.mark.parametrize(("change", "many"), in_turn(CHANGES, MANY))
async def test_one_rank_of_many_that_differs_later(
    change: Callable[[list[Tensor]], None], many: tuple[tuple[int, int, int], int]
) -> None:
    sizes, culprit = many
    async with parallel_world(*sizes) as ranks:
        await draw_and_synchronize(ranks, 5)
        await assert_refused(ranks, culprit, change)
        await assert_next_steps_work(ranks)


@pytest.mark.parametrize("change", [with_another_shape, with_one_twice, with_integers])
async def test_ranks_that_fail_again_and_again_stay_usable(change: Callable[[list[Tensor]], None]) -> None:
    async with parallel_world(1, 2, 3) as ranks:
        for culprit in (0, 5, 3, 3):
            await assert_refused(ranks, culprit, change)
        await assert_next_steps_work(ranks)


async def assert_next_steps_work(ranks: Sequence[Rank]) -> None:
    for step in (1, 2):
        await draw_and_synchronize(ranks, step)
        for rank in ranks:
            assert_right(rank, step=step)


async def test_all_ranks_may_change_a_shape_after_clear_buffers() -> None:
    async with parallel_world(2, compression=compressed("int8")) as ranks:

        async def main(rank: Rank) -> None:
            first, second = (Held([Tensor("p", np.full(shape, 2.0, np.float32))]) for shape in ((3, 4), (5,)))
            await rank.synchronizer.synchronize_gradients(first)
            with pytest.raises(UsageError, match=r"parameter p: expected a gradient as in earlier steps, .*\[3, 4\]"):
                await rank.synchronizer.synchronize_gradients(second)
            assert (second.tensors[0].grad == 2.0).all()
            rank.synchronizer.clear_buffers()
            await rank.synchronizer.synchronize_gradients(second)
            np.testing.assert_allclose(second.tensors[0].grad, 2.0)

        await on_all(ranks, main)


AGREEMENT = 16
"""Bytes of a row of an agreement: an epoch and a hash."""


class Corrupting:
    """A communicator whose ``operation`` brings one rank's row as something else, once, on this rank."""

    def __init__(self, communicator: Any, operation: str, row: int) -> None:
        self._communicator = communicator
        self._operation = operation
        self._row = row

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._communicator, name)
        if name != self._operation:
            return attribute

        def corrupt(x: Array, *arguments: Any, **options: Any) -> Coroutine[Any, Any, Any]:
            call = attribute(x, *arguments, **options)
            return WatchedCall(self._corrupt(call), call.close)

        return corrupt

    async def _corrupt(self, call: Coroutine[Any, Any, Any]) -> Any:
        result = await call
        if self._row >= 0 and result.dtype == np.uint8 and result.ndim == 2 and result.shape[1] != AGREEMENT:
            result[self._row, 4:] = 0xFF
            self._row = -1
        return result


@pytest.mark.parametrize(
    ("codec", "size", "operation", "row"),
    [
        (codec, *place)
        for codec, place in in_turn(
            ["int8", "int4", "sign", "topk:0.1", "topk:0.1+int8"],
            [(3, "all_to_all", 2), (3, "all_gather", 2), (2, "all_gather", 0)],
        )
    ],
)
async def test_a_corrupted_payload_is_an_error_on_every_rank_that_names_its_sender(
    codec: str, size: int, operation: str, row: int
) -> None:
    def wrap(communicator: Any) -> Any:
        return Corrupting(communicator, operation, row) if communicator.rank == 1 else communicator

    bucketing = GradientBucketingConfig()
    async with parallel_world(size, wrap=wrap, compression=compressed(codec), bucketing=bucketing) as ranks:
        before = [rank.model.gradients() for rank in ranks]
        errors = await on_all_failing(ranks, lambda rank: rank.synchronize())
        assert isinstance(errors[1], ProtocolError), repr(errors[1])
        assert f"rank {row}" in str(errors[1])
        assert "layer_" in str(errors[1])
        assert all(isinstance(error, (ProtocolError, PeerCancelled)) for error in errors), errors
        for rank, gradients in zip(ranks, before, strict=True):
            for name, gradient in rank.model.gradients().items():
                np.testing.assert_array_equal(gradient, gradients[name])
        for step in (1, 2):
            await draw_and_synchronize(ranks, step)
            assert_copies_equal(ranks)


class Flipping:
    """A communicator whose all-reduce gives NaN on this rank alone, once."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._is_due = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def all_reduce(self, x: Array, *arguments: Any, **options: Any) -> Coroutine[Any, Any, Array]:
        call = self._communicator.all_reduce(x, *arguments, **options)
        return WatchedCall(self._flip(call), call.close)

    async def _flip(self, call: Coroutine[Any, Any, Array]) -> Array:
        result = await call
        if self._is_due:
            self._is_due = False
            result[...] = np.nan
        return result


@pytest.mark.parametrize("codec", ["none", "bf16", "powersgd:2"])
def test_a_sum_that_differs_on_one_rank_ends_in_errors_and_not_in_waiting_for_ever(codec: str) -> None:
    """Ranks take their sums to be the same; where memory breaks that, time runs out at the worst."""

    def wrap(communicator: Any) -> Any:
        return Flipping(communicator) if communicator.rank == 1 else communicator

    async def main() -> list[BaseException]:
        async with parallel_world(3, wrap=wrap, compression=compressed(codec), patience=1e6) as ranks:
            before = [rank.model.gradients() for rank in ranks]
            errors = await on_all_failing(ranks, lambda rank: rank.synchronize())
            for rank, gradients in zip(ranks, before, strict=True):
                for name, gradient in rank.model.gradients().items():
                    np.testing.assert_array_equal(gradient, gradients[name])
            return errors

    assert all(isinstance(error, AsyncparError) for error in run_virtual(main()))
