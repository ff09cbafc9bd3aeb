"""Replicas of one process that train by themselves: no waiting, or only so far apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, PeerCancelled, PeerTimeout, UsageError
from asyncpar.nn import Array
from asyncpar.parallel import DataParallel, SynchronizationMode
from tests.parallel.replicas import (
    assert_same,
    descend,
    gradients_alone,
    loss_gradient,
    make_batch,
    make_model,
    values_of,
)

ASYNCHRONOUS = SynchronizationMode.ASYNCHRONOUS
MODES = [ASYNCHRONOUS, SynchronizationMode.BOUNDED_STALENESS(2)]


def devices(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


async def train(parallel: DataParallel, index: int, steps: int, *, on_step: Callable[[], None] = lambda: None) -> float:
    """Train replica ``index`` on batches of its own; return how long it waited."""
    async with parallel.replica(index) as replica:
        for step in range(steps):
            x, target = make_batch(4, seed=100 * index + step)
            replica.zero_grad()
            y, saved = await replica.forward(x)
            on_step()
            await replica.backward(saved, loss_gradient(y, target))
            await replica.update(lambda: descend(parallel.replicas[0]))
        return replica.waited()


@pytest.mark.parametrize("mode", MODES, ids=str)
async def test_one_replica_trains_as_the_model_alone(mode: SynchronizationMode) -> None:
    model, alone = make_model(), make_model()
    async with DataParallel(model, devices(1)) as parallel:
        parallel.set_sync_mode(mode)
        await train(parallel, 0, 3)
    for step in range(3):
        gradients_alone(alone, *make_batch(4, seed=step))
        descend(alone)
    assert_same(values_of(model), values_of(alone))


@pytest.mark.parametrize("mode", MODES, ids=str)
async def test_steps_from_the_same_values_are_together_that_of_the_mean(mode: SynchronizationMode) -> None:
    model, alone = make_model(), make_model()
    begun = asyncio.Barrier(3)

    async def step(parallel: DataParallel, index: int) -> None:
        x, target = make_batch(4, seed=index)
        async with parallel.replica(index) as replica:
            y, saved = await replica.forward(x)
            await begun.wait()
            await replica.backward(saved, loss_gradient(y, target))
            await replica.update(lambda: descend(model))

    async with DataParallel(model, devices(3)) as parallel:
        parallel.set_sync_mode(mode)
        await asyncio.gather(*(step(parallel, index) for index in range(3)))
    batches = [make_batch(4, seed=index) for index in range(3)]
    x, target = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    gradients_alone(alone, x, target)
    descend(alone)
    assert_same(values_of(model), values_of(alone))


async def test_asynchronous_replicas_do_not_wait() -> None:
    async with DataParallel(make_model(), devices(2)) as parallel:
        parallel.set_sync_mode(ASYNCHRONOUS)
        assert await train(parallel, 0, 20) < 0.1
        assert parallel.replica(0).staleness() == 20
        await train(parallel, 1, 3)


@pytest.mark.parametrize("bound", [1, 3])
async def test_no_replica_runs_further_ahead_than_the_bound(bound: int) -> None:
    ahead: list[int] = []
    begun = [0, 0, 0]
    are_at_the_bound = asyncio.Event()

    async def count(parallel: DataParallel, index: int, steps: int) -> None:
        def on_step() -> None:
            begun[index] += 1
            ahead.append(max(begun) - min(begun))
            if begun[:2] == [bound + 1] * 2:
                are_at_the_bound.set()

        await train(parallel, index, steps, on_step=on_step)

    async with DataParallel(make_model(), devices(3)) as parallel:
        parallel.set_sync_mode(SynchronizationMode.BOUNDED_STALENESS(bound))
        first = [asyncio.create_task(count(parallel, index, 12)) for index in (0, 1)]
        await are_at_the_bound.wait()
        await asyncio.gather(count(parallel, 2, 12), *first)
    assert max(ahead) == bound + 1  # steps that are begun: one more than those that are done
    assert begun == [12] * 3


async def test_a_replica_that_does_not_come_is_named() -> None:
    model = make_model()
    updates: list[Array] = []
    async with DataParallel(model, devices(2), timeout=0.05) as parallel:
        parallel.set_sync_mode(SynchronizationMode.BOUNDED_STALENESS(2))
        with pytest.raises(PeerTimeout, match=r"replica 0: waited 0\.05 s for a step of replica 1, which is 3 steps"):
            await train(parallel, 0, 9, on_step=lambda: updates.append(np.zeros(1)))
    assert len(updates) == 3


async def test_replicas_that_are_through_are_not_waited_for_and_may_begin_again() -> None:
    async with DataParallel(make_model(), devices(2), timeout=5.0) as parallel:
        parallel.set_sync_mode(SynchronizationMode.BOUNDED_STALENESS(1))
        for _ in range(2):
            await asyncio.gather(train(parallel, 0, 9), train(parallel, 1, 2))


async def test_a_replica_that_fails_ends_the_others_and_a_new_mode_begins_anew() -> None:
    async def fail(parallel: DataParallel) -> None:
        async with parallel.replica(1):
            raise RuntimeError("no data")

    async with DataParallel(make_model(), devices(2), timeout=30.0) as parallel:
        parallel.set_sync_mode(SynchronizationMode.BOUNDED_STALENESS(1))
        results = await asyncio.gather(train(parallel, 0, 9), fail(parallel), return_exceptions=True)
        assert isinstance(results[0], PeerCancelled)
        assert str(results[0]) == "replica 1 has failed: RuntimeError('no data')"
        with pytest.raises(PeerCancelled, match="replica 1"):
            await train(parallel, 0, 1)
        parallel.set_sync_mode(ASYNCHRONOUS)
        await asyncio.gather(train(parallel, 0, 2), train(parallel, 1, 2))


async def test_a_change_that_is_not_finite_is_taken_back() -> None:
    model = make_model()
    before = values_of(model)

    def ruin() -> None:
        model.parameters()[0].value[...] = np.nan

    async with DataParallel(model, devices(1)) as parallel:
        parallel.set_sync_mode(ASYNCHRONOUS)
        async with parallel.replica(0) as replica:
            await replica.forward(make_batch(2)[0])
            with pytest.raises(NonFiniteValue, match="update"):
                await replica.update(ruin)
    assert_same(values_of(model), before, tolerance=0.0)


async def test_gradients_are_averaged_again_in_synchronous_mode() -> None:
    model, alone = make_model(), make_model()
    x, target = make_batch(6)
    async with DataParallel(model, devices(2)) as parallel:
        parallel.set_sync_mode(ASYNCHRONOUS)
        assert parallel.mode is ASYNCHRONOUS
        for call in (parallel.forward(x), parallel.sync_gradients()):
            with pytest.raises(UsageError, match="in asynchronous mode each replica trains by itself"):
                await call
        parallel.set_training(False)
        await parallel.forward(x)
        parallel.set_training(True)
        parallel.set_sync_mode(SynchronizationMode.BOUNDED_STALENESS(0))
        assert parallel.mode == SynchronizationMode.SYNCHRONOUS
        y, saved = await parallel.forward(x)
        await parallel.backward(saved, loss_gradient(y, target))
        await parallel.sync_gradients()
        expected = gradients_alone(alone, x, target)
        assert_same({p.name: p.grad for p in model.parameters()}, expected)


async def test_what_does_not_fit_the_mode_is_refused() -> None:
    async with DataParallel(make_model(), devices(2)) as parallel:
        with pytest.raises(UsageError, match="replica: expected another mode than synchronous"):
            parallel.replica(0)
        with pytest.raises(UsageError, match="mode: expected a SynchronizationMode, got 'async'"):
            parallel.set_sync_mode("async")  # type: ignore[arg-type]
        parallel.set_sync_mode(ASYNCHRONOUS)
        with pytest.raises(UsageError, match=r"index: expected 0\.\.1, got 2"):
            parallel.replica(2)
        replica = parallel.replica(0)
        with pytest.raises(UsageError, match="expected its block to be entered"):
            await replica.forward(make_batch(2)[0])
        async with replica:
            with pytest.raises(UsageError, match="update: expected a forward pass before it"):
                await replica.update(lambda: None)
            with pytest.raises(UsageError, match="backward: expected a forward pass before it"):
                await replica.backward(None, make_batch(2)[1])
            with pytest.raises(
                UsageError, match="set_sync_mode: expected no replica to train by itself, but replica 0"
            ):
                parallel.set_sync_mode(ASYNCHRONOUS)
    with pytest.raises(UsageError, match="timeout: expected a positive number of seconds or None, got 0"):
        DataParallel(make_model(), devices(1), timeout=0)
