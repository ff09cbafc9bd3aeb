"""Three ways to keep replicas together: each does what it promises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, PeerCancelled, PeerLost, UsageError
from asyncpar.gradsync import GradientCompressionConfig, NonFinitePolicy
from asyncpar.nn import Array
from asyncpar.nn.optimizers import AdamW, Optimizer
from asyncpar.node import Node
from asyncpar.parallel import DDP_GROUP, DDPConfig, DistributedDataParallel, SynchronizationMode
from asyncpar.testing import run_virtual
from asyncpar.testing.world import local_world
from tests.parallel.replicas import (
    Branches,
    accumulate,
    assert_equal_bits,
    assert_same,
    descend,
    gradients_alone,
    make_batch,
    make_model,
    on_all,
    on_all_failing,
    open_replica,
    open_runtime,
    train_step,
    values_of,
)
from tests.products import in_turn

ASYNCHRONOUS = SynchronizationMode.ASYNCHRONOUS
bounded = SynchronizationMode.BOUNDED_STALENESS
LOOSE = [ASYNCHRONOUS, bounded(1), bounded(3)]


async def train_with_adam(node: Node, mode: SynchronizationMode) -> dict[str, Array]:
    model = make_model(seed=node.rank)
    async with open_replica(node, model, mode=mode) as ddp:
        optimizer = Optimizer(model.parameters(), AdamW())
        for step in range(4):
            await train_step(ddp, *make_batch(2, seed=10 * step + node.rank))
            await ddp.update(lambda: optimizer.step(0.01))
    return values_of(model)


async def test_a_bound_of_zero_is_synchronous_to_the_last_bit() -> None:
    async with local_world(3) as nodes:
        synchronous = await on_all(nodes, lambda node: train_with_adam(node, SynchronizationMode.SYNCHRONOUS))
        none_ahead = await on_all(nodes, lambda node: train_with_adam(node, bounded(0)))
    assert_equal_bits([*synchronous, *none_ahead])


@pytest.mark.parametrize("mode", LOOSE, ids=str)
async def test_parameters_are_equal_to_the_last_bit_in_the_end(mode: SynchronizationMode) -> None:
    async with local_world(3) as nodes:
        assert_equal_bits(await on_all(nodes, lambda node: train_with_adam(node, mode)))


class Journal:
    """Who ran which step when: a rank takes ``seconds[rank]`` for each."""

    def __init__(self, seconds: Sequence[float], counts: Sequence[int]) -> None:
        self.seconds, self.counts = seconds, counts
        self.done = [0] * len(seconds)
        """Steps that each rank has computed."""
        self.largest_lead = 0
        """Of a rank that begins a step, over the slowest of those that have more to do."""
        self.ends = [0.0] * len(seconds)
        self.waited = [0.0] * len(seconds)

    async def train(self, ddp: DistributedDataParallel) -> None:
        rank = ddp.rank()
        for step in range(1, self.counts[rank] + 1):
            ddp.zero_grad()
            _, saved = await ddp.forward(np.ones((2, 4)))
            others = [done for done, count in zip(self.done, self.counts, strict=True) if done < count]
            self.largest_lead = max(self.largest_lead, self.done[rank] - min(others))
            await asyncio.sleep(self.seconds[rank])
            await ddp.backward(saved, np.ones((2, 3)))
            self.done[rank] = step
            await ddp.update(lambda: descend(ddp))
        self.ends[rank] = asyncio.get_running_loop().time()
        self.waited[rank] = ddp.waited()


def run_journal(mode: SynchronizationMode, seconds: Sequence[float], counts: Sequence[int]) -> Journal:
    """Train on virtual time, check that nothing was lost, and return what happened."""
    journal = Journal(seconds, counts)

    async def main(node: Node) -> dict[str, Array]:
        model = Branches("a", "b")
        async with open_replica(node, model, mode=mode) as ddp:
            await journal.train(ddp)
        return values_of(model)

    async def on_nodes() -> list[dict[str, Array]]:
        async with local_world(len(seconds)) as nodes:
            return await on_all(nodes, main)

    results = run_virtual(on_nodes())
    assert_equal_bits(results)
    start = values_of(Branches("a", "b"))  # gradients are all 2 whatever the parameters
    moved = 0.1 * 2.0 * sum(counts) / len(counts)
    assert_same(results[0], {name: value - moved for name, value in start.items()})
    return journal


@pytest.mark.parametrize(
    ("bound", "seconds"), in_turn([1, 2, 5], [(1.0, 4.0), (3.0, 1.0, 1.7), (0.1, 0.1, 0.1, 9.0)]), ids=str
)
def test_no_rank_is_ever_further_ahead_than_the_bound_and_the_bound_is_used(
    bound: int, seconds: tuple[float, ...]
) -> None:
    journal = run_journal(bounded(bound), seconds, [12] * len(seconds))
    assert journal.largest_lead == bound
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    assert journal.ends[slowest] == pytest.approx(12 * seconds[slowest])
    assert journal.waited[slowest] == 0.0
    assert max(journal.waited) > 0.0


def test_asynchronous_ranks_never_wait() -> None:
    journal = run_journal(ASYNCHRONOUS, (1.0, 4.0, 0.5), (12, 12, 12))
    assert journal.ends == pytest.approx([12.0, 48.0, 6.0])
    assert journal.waited == [0.0, 0.0, 0.0]
    assert journal.largest_lead > 5


@pytest.mark.parametrize("mode", LOOSE, ids=str)
def test_ranks_may_make_different_numbers_of_updates(mode: SynchronizationMode) -> None:
    journal = run_journal(mode, (1.0, 1.0, 1.0), (9, 2, 0))
    assert journal.ends[0] == pytest.approx(9.0), "who has no more is not waited for"


@pytest.mark.parametrize("mode", LOOSE, ids=str)
async def test_training_learns(mode: SynchronizationMode) -> None:
    async def main(node: Node) -> tuple[float, float]:
        model = make_model()
        x, target = make_batch(8)
        first = float(np.square(model.forward(x)[0] - target).mean())
        mine = slice(4 * node.rank, 4 * node.rank + 4)
        async with open_replica(node, model, mode=mode) as ddp:
            for _ in range(40):
                await train_step(ddp, x[mine], target[mine])
                await ddp.update(lambda: descend(model, 0.2))
        return first, float(np.square(model.forward(x)[0] - target).mean())

    async with local_world(2) as nodes:
        for first, last in await on_all(nodes, main):
            assert last < 0.7 * first


@pytest.mark.parametrize("mode", LOOSE, ids=str)
async def test_training_goes_on_after_settling_and_join_settles(mode: SynchronizationMode) -> None:
    async def main(node: Node) -> list[dict[str, Array]]:
        model, after = make_model(), []
        async with open_replica(node, model, mode=mode) as ddp:
            for epoch in range(3):
                async with ddp.join():
                    for step in range(1 + (node.rank + epoch) % 3):
                        await train_step(ddp, *make_batch(2, seed=step))
                        await ddp.update(lambda: descend(model))
                after.append(values_of(model))
        return after

    async with local_world(3) as nodes:
        for values in zip(*await on_all(nodes, main), strict=True):
            assert_equal_bits(values)


async def test_micro_steps_weigh_equally() -> None:
    async def main(node: Node) -> None:
        model = make_model()
        async with open_replica(node, model, mode=ASYNCHRONOUS) as ddp:
            x, target = make_batch(6)
            with ddp.no_sync():
                for rows in (slice(0, 2), slice(2, 4)):
                    await accumulate(ddp, x[rows], target[rows])
            await accumulate(ddp, x[4:], target[4:])
            found = {parameter.name: parameter.grad.copy() for parameter in model.parameters()}
        assert_same(found, gradients_alone(make_model(), x, target))

    async with local_world(1) as nodes:
        await on_all(nodes, main)


async def test_evaluation_begins_no_step_and_an_update_needs_one() -> None:
    async with local_world(1) as (node,), open_replica(node, make_model(), mode=ASYNCHRONOUS) as ddp:
        ddp.set_training(False)
        await ddp.forward(make_batch(2)[0])
        with pytest.raises(UsageError, match="update: expected a forward pass before it"):
            await ddp.update(lambda: None)


@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_an_update_that_is_not_finite_is_not_sent_and_undone(value: float) -> None:
    async def main(node: Node) -> str:
        model = make_model()
        try:
            async with open_replica(node, model, mode=bounded(1)) as ddp:
                await train_step(ddp, *make_batch(2))
                before = values_of(model)
                parameter = model.parameters()[0]
                if node.rank == 0:
                    try:
                        await ddp.update(lambda: parameter.value.fill(value))
                    finally:
                        assert_equal_bits([before, values_of(model)])
                while True:
                    await ddp.update(lambda: descend(model))
                    await train_step(ddp, *make_batch(2))
        except (NonFiniteValue, PeerCancelled) as error:
            assert all(np.isfinite(array).all() for array in values_of(model).values())
            return type(error).__name__

    async with local_world(2) as nodes:
        assert await on_all(nodes, main) == ["NonFiniteValue", "PeerCancelled"]


@pytest.mark.parametrize("mode", LOOSE, ids=str)
async def test_a_rank_that_is_gone_is_peer_lost_on_all_others(mode: SynchronizationMode) -> None:
    async def main(node: Node) -> None:
        async with open_runtime(node) as runtime:
            model = make_model()
            ddp = await DistributedDataParallel(model, "cpu:0", DDP_GROUP, runtime, mode=mode).start()
            try:
                while True:
                    await train_step(ddp, *make_batch(2))
                    await ddp.update(lambda: descend(model))
                    if node.rank == 1:
                        await node.stop()
                        return
            finally:
                await ddp.close(failed=True)

    async with local_world(3) as nodes:
        results = await on_all_failing(nodes, main)
    assert results[1] is None
    for error in (results[0], results[2]):
        assert isinstance(error, PeerLost)
        assert error.rank == 1


@pytest.mark.parametrize("mode", LOOSE, ids=str)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("compression", {"compression": GradientCompressionConfig(codec="int8")}),
        ("bucket_size", {"bucket_size": 1000}),
        ("when_not_finite", {"when_not_finite": NonFinitePolicy.SKIP_STEP}),
        ("static_graph", {"config": DDPConfig(static_graph=True)}),
        ("gradient_as_bucket_view", {"config": DDPConfig(gradient_as_bucket_view=True)}),
    ],
)
async def test_settings_of_averaged_gradients_are_refused_where_none_are(
    mode: SynchronizationMode, name: str, settings: dict[str, Any]
) -> None:
    async with local_world(1) as nodes, open_runtime(nodes[0]) as runtime:
        with pytest.raises(UsageError, match=f"^{name}: expected the default with {mode} training"):
            DistributedDataParallel(make_model(), "cpu:0", DDP_GROUP, runtime, mode=mode, **settings)
        DistributedDataParallel(make_model(), "cpu:0", DDP_GROUP, runtime, **settings)


async def test_what_only_averaging_uses_cannot_be_set_later_either() -> None:
    async with local_world(1) as nodes, open_replica(nodes[0], make_model(), mode=ASYNCHRONOUS) as ddp:
        with pytest.raises(UsageError, match="bucket_size: expected the default"):
            ddp.set_bucket_size(1000)
        with pytest.raises(UsageError, match="divide_by_initial_world_size: expected the default"):
            async with ddp.join(divide_by_initial_world_size=True):
                pytest.fail("it was entered")
