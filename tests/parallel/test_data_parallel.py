"""Replicas in one process get what one model gets from the whole batch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.backends import CommunicationRuntime
from asyncpar.errors import UsageError
from asyncpar.nn import Array
from asyncpar.nn.optimizers import AdamW, Optimizer
from asyncpar.parallel import DataParallel, create_data_parallel
from asyncpar.parallel.data_parallel import chunk_rows, count_rows
from tests.parallel.replicas import (
    Branches,
    assert_equal_bits,
    assert_same,
    gradients_alone,
    gradients_of,
    loss_gradient,
    make_batch,
    make_model,
    values_of,
)


def devices(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


async def train_step(parallel: DataParallel, x: Array, target: Array) -> Array | None:
    parallel.zero_grad()
    y, saved = await parallel.forward(x)
    dx = await parallel.backward(saved, loss_gradient(y, target))
    await parallel.sync_gradients()
    return dx


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
async def test_training_is_that_of_the_model_alone(count: int, rows: int) -> None:
    model, alone = make_model(), make_model()
    optimizers = [Optimizer(each.parameters(), AdamW()) for each in (model, alone)]
    async with create_data_parallel(model, devices(count)) as parallel:
        for step in range(3):
            x, target = make_batch(rows, seed=step)
            y, _ = await parallel.forward(x)
            np.testing.assert_allclose(y, alone.forward(x)[0], rtol=1e-12)
            dx = await train_step(parallel, x, target)
            assert_same(gradients_of(model), gradients_alone(alone, x, target))
            y, kept = alone.forward(x)
            np.testing.assert_allclose(dx, alone.backward(kept, loss_gradient(y, target)), rtol=1e-11, atol=1e-14)  # type: ignore[arg-type]
            assert_equal_bits([gradients_of(replica) for replica in parallel.replicas])
            gradients_alone(alone, x, target)
            for optimizer in optimizers:
                optimizer.step(0.01)
        assert_same(values_of(model), values_of(alone))


async def test_replicas_are_real_and_take_the_parameters_of_the_first() -> None:
    model = make_model()
    async with DataParallel(model, devices(3)) as parallel:
        assert parallel.replicas[0] is model
        arrays = {id(parameter.value) for replica in parallel.replicas for parameter in replica.parameters()}
        assert len(arrays) == 3 * len(model.parameters())
        for parameter in parallel.parameters():
            parameter.value[...] += 1.0
        await parallel.forward(make_batch(3)[0])
        assert_equal_bits([values_of(replica) for replica in parallel.replicas])


async def test_outputs_of_separate_inputs_keep_their_order_and_replicas_run_at_once() -> None:
    meeting = threading.Barrier(3, timeout=10.0)

    class Meeting(Branches):
        def __deepcopy__(self, memo: dict[int, Any]) -> Meeting:
            return Meeting("a")

        def forward(self, x: Array) -> tuple[Array, Any]:
            meeting.wait()
            return super().forward(x)

    async with DataParallel(Meeting("a"), devices(3)) as parallel:
        inputs = [make_batch(rows, seed=rows)[0] for rows in (3, 1, 2)]
        outputs, _ = await parallel.forward_parallel(inputs)
    for x, y in zip(inputs, outputs, strict=True):
        np.testing.assert_array_equal(y, Branches("a").forward(x)[0])


async def test_gradients_of_separate_losses_are_weighted_by_rows() -> None:
    model, rows = make_model(), (5, 1, 2)
    x, target = make_batch(sum(rows))
    chunks = [slice(0, 5), slice(5, 6), slice(6, 8)]
    async with DataParallel(model, devices(3)) as parallel:
        outputs, saved = await parallel.forward_parallel([x[chunk] for chunk in chunks])
        own = [loss_gradient(y, target[chunk]) for y, chunk in zip(outputs, chunks, strict=True)]
        await parallel.backward_parallel(saved, own)
        await parallel.sync_gradients()
        found = gradients_of(model)
        await parallel.sync_gradients()  # the mean is not taken twice
        assert_equal_bits([found, gradients_of(model)])
    assert_same(found, gradients_alone(make_model(), x, target))


async def test_nothing_is_synchronized_in_evaluation() -> None:
    async with DataParallel(make_model(), devices(2)) as parallel:
        x, target = make_batch(4)
        y, saved = await parallel.forward(x)
        await parallel.backward(saved, loss_gradient(y, target))
        before = [gradients_of(replica) for replica in parallel.replicas]
        parallel.set_training(False)
        await parallel.sync_gradients()
        for replica, gradients in zip(parallel.replicas, before, strict=True):
            assert_equal_bits([gradients, gradients_of(replica)])
        y, saved = await parallel.forward(x)
        with pytest.raises(UsageError, match="set to evaluation"):
            await parallel.backward(saved, y)
        parallel.set_training(True)
        with pytest.raises(UsageError, match="forward pass in evaluation"):
            await parallel.backward(saved, y)


async def test_models_are_told_whether_they_are_trained() -> None:
    class Switched(Branches):
        training = True

        def set_training(self, training: bool) -> None:
            self.training = training

    async with DataParallel(Switched("a"), devices(2)) as parallel:
        parallel.set_training(False)
        assert [replica.training for replica in parallel.replicas] == [False, False]  # type: ignore[attr-defined]


async def test_a_failure_of_one_replica_is_raised_and_spoils_the_step() -> None:
    class Breaking(Branches):
        def backward(self, saved: Any, dy: Array, on_gradient: Any = None) -> Array | None:
            if np.isnan(dy).any():
                raise ZeroDivisionError
            return super().backward(saved, dy, on_gradient)

    async with DataParallel(Breaking("a"), devices(2)) as parallel:
        y, saved = await parallel.forward(make_batch(4)[0])
        y[3] = np.nan
        with pytest.raises(ZeroDivisionError):
            await parallel.backward(saved, y)
        with pytest.raises(UsageError, match="a replica failed in its backward pass"):
            await parallel.sync_gradients()
        await train_step(parallel, *make_batch(4))
        with pytest.raises(ValueError, match="matmul"):
            await parallel.forward(np.ones((4, 17)))


async def test_wrong_numbers_are_refused() -> None:
    async with DataParallel(make_model(), devices(2)) as parallel:
        x, _ = make_batch(4)
        with pytest.raises(UsageError, match="inputs: expected 2 arrays, one for each device, got 3"):
            await parallel.forward_parallel([x, x, x])
        with pytest.raises(UsageError, match="input: expected an array of at least one row"):
            await parallel.forward(x[:0])
        y, saved = await parallel.forward(x)
        with pytest.raises(UsageError, match="dy: expected 4 rows, as many as the output has, got 3"):
            await parallel.backward(saved, y[:3])
        with pytest.raises(UsageError, match="dys: expected 2 arrays"):
            await parallel.backward_parallel(saved, [y])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "No devices provided"),
        (["cpu:0", "cpu:0"], "each of them once"),
        ([""], "expected a name"),
        ("cpu:0", "expected a sequence of names"),
    ],
)
def test_devices_that_cannot_be_are_refused(names: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DataParallel(make_model(), names)


def test_a_runtime_is_kept() -> None:
    runtime = CommunicationRuntime()
    parallel = create_data_parallel(make_model(), ["cpu:0"], runtime=runtime)
    assert parallel.runtime is runtime
    parallel.close()


# -- rows --------------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 200), parts=st.integers(1, 20))
def test_chunks_are_all_rows_in_order_and_only_the_last_may_be_shorter(rows: int, parts: int) -> None:
    chunks = chunk_rows(rows, parts)
    assert len(chunks) <= parts
    assert [row for chunk in chunks for row in range(rows)[chunk]] == list(range(rows))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert set(sizes[:-1]) <= {-(-rows // parts)}
    assert 1 <= sizes[-1] <= -(-rows // parts)


def test_seven_rows_over_three_parts() -> None:
    assert chunk_rows(7, 3) == (slice(0, 3), slice(3, 6), slice(6, 7))


def test_no_rows_and_no_parts_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one row"):
        chunk_rows(0, 2)
    with pytest.raises(UsageError, match="parts"):
        chunk_rows(2, 0)


@pytest.mark.parametrize("x", [np.zeros(()), np.zeros((0, 3)), [1, 2]], ids=["scalar", "empty", "list"])
def test_what_has_no_rows_is_refused(x: object) -> None:
    with pytest.raises(UsageError, match="input: expected an array of at least one row"):
        count_rows(x, "input")
