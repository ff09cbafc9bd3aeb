"""A fault on one rank raises on all, and leaves parameters as they were."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, PeerCancelled, PeerLost, PeerTimeout
from asyncpar.gradsync import GradientCompressionConfig, NonFinitePolicy
from asyncpar.nn import Array
from asyncpar.node import Node
from asyncpar.parallel import DDP_GROUP, DDPConfig, DistributedDataParallel, OnGradient
from asyncpar.testing import run_virtual
from asyncpar.testing.world import local_world
from tests.parallel.replicas import (
    CONFIGS,
    Branches,
    assert_equal_bits,
    assert_same,
    gradients_alone,
    gradients_of,
    make_batch,
    make_model,
    on_all,
    on_all_failing,
    open_replica,
    open_runtime,
    train_step,
    values_of,
)


class Breaking(Branches):
    """Fails in the middle of the backward pass, on demand."""

    is_broken = False

    def backward(self, saved: Any, dy: Array, on_gradient: OnGradient | None = None) -> Array | None:
        if self.is_broken and on_gradient is not None:
            on_gradient("a")
            raise ZeroDivisionError
        return super().backward(saved, dy, on_gradient)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
async def test_a_backward_pass_that_fails_on_one_rank_raises_on_all_and_the_next_step_is_right(
    config: DDPConfig,
) -> None:
    async def main(node: Node) -> tuple[str, dict[str, Array]]:
        model = Breaking("a", "b")
        async with open_replica(node, model, config=config) as ddp:
            before = values_of(model)
            model.is_broken = node.rank == 1
            with pytest.raises((ZeroDivisionError, PeerCancelled)) as caught:
                await train_step(ddp, *make_batch(2))
            assert_equal_bits([before, values_of(model)])
            model.is_broken = False
            await train_step(ddp, *make_batch(2))
            return caught.typename, gradients_of(model)

    async with local_world(3) as nodes:
        results = await on_all(nodes, main)
    assert [name for name, _ in results] == ["PeerCancelled", "ZeroDivisionError", "PeerCancelled"]
    for _, gradients in results:
        assert_same(gradients, gradients_alone(Branches("a", "b"), *make_batch(2)))


async def test_a_rank_that_fails_between_steps_ends_the_waiting_of_the_others_and_all_can_begin_anew() -> None:
    async def main(node: Node) -> tuple[str, dict[str, Array]]:
        model = make_model()
        async with open_runtime(node) as runtime:
            try:
                async with DistributedDataParallel(model, "cpu:0", DDP_GROUP, runtime) as ddp:
                    await train_step(ddp, *make_batch(2))
                    if node.rank == 1:
                        raise ZeroDivisionError
                    await train_step(ddp, *make_batch(2))
            except (ZeroDivisionError, PeerCancelled) as error:
                failure = type(error).__name__
            async with DistributedDataParallel(model, "cpu:0", DDP_GROUP, runtime) as ddp:
                await train_step(ddp, *make_batch(2, seed=node.rank))
                return failure, gradients_of(model)

    async with local_world(3) as nodes:
        results = await on_all(nodes, main)
    assert [failure for failure, _ in results] == ["PeerCancelled", "ZeroDivisionError", "PeerCancelled"]
    assert_equal_bits([gradients for _, gradients in results])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_rank_that_never_comes_is_named_after_the_timeout(config: DDPConfig) -> None:
    async def main(node: Node) -> None:
        async with open_replica(node, make_model(), config=config) as ddp:
            await train_step(ddp, *make_batch(2))
            node.world.timeout = 30.0
            if node.rank == 1:
                await asyncio.sleep(100.0)
                raise ZeroDivisionError
            await train_step(ddp, *make_batch(2))

    async def on_nodes() -> list[BaseException | None]:
        async with local_world(3) as nodes:
            return await on_all_failing(nodes, main)

    zero, _, two = run_virtual(on_nodes())
    assert any(isinstance(error, PeerTimeout) for error in (zero, two)), "the first that loses patience"
    for error in (zero, two):
        assert isinstance(error, (PeerTimeout, PeerCancelled))
        assert "for rank 1" in str(error)


async def test_the_state_of_compression_can_be_carried_over() -> None:
    async def main(node: Node) -> None:
        compression = GradientCompressionConfig(codec="int8")
        async with open_replica(node, make_model(), compression=compression) as ddp:
            await train_step(ddp, *make_batch(2))
            state = ddp.synchronizer.state()
            assert state
        async with open_replica(node, make_model(), compression=compression) as ddp:
            ddp.synchronizer.restore(state)
            assert_equal_bits([state, ddp.synchronizer.state()])

    async with local_world(2) as nodes:
        await on_all(nodes, main)


async def test_gradients_that_are_not_finite_raise_on_all_ranks() -> None:
    async def main(node: Node) -> None:
        async with open_replica(node, make_model()) as ddp:
            x, target = make_batch(2)
            x[0, 0] = np.nan if node.rank == 1 else 0.0
            await train_step(ddp, x, target)

    async with local_world(2) as nodes:
        for error in await on_all_failing(nodes, main):
            assert isinstance(error, NonFiniteValue)
            assert "rank 1" in str(error)


async def test_a_step_that_is_not_finite_can_be_skipped() -> None:
    async def main(node: Node) -> tuple[bool, bool]:
        async with open_replica(node, make_model(), when_not_finite=NonFinitePolicy.SKIP_STEP) as ddp:
            x, target = make_batch(2)
            await train_step(ddp, x * (np.nan if node.rank == 1 else 1.0), target)
            first = ddp.outcome().is_skipped
            await train_step(ddp, x, target)
            return first, ddp.outcome().is_skipped

    async with local_world(2) as nodes:
        assert await on_all(nodes, main) == [(True, False), (True, False)]


@pytest.mark.parametrize("config", [CONFIGS["default"], CONFIGS["overlapping"], CONFIGS["find unused"]])
async def test_a_rank_that_is_gone_is_peer_lost_on_all_others(config: DDPConfig) -> None:
    async def main(node: Node) -> None:
        model = make_model()
        async with open_runtime(node) as runtime:
            ddp = await DistributedDataParallel(model, "cpu:0", DDP_GROUP, runtime, config).start()
            await train_step(ddp, *make_batch(2))
            if node.rank == 1:
                await ddp.close()
                await node.stop()
                return
            before = values_of(model)
            try:
                await train_step(ddp, *make_batch(2))
            finally:
                assert_equal_bits([before, values_of(model)])
                await ddp.close()

    async with local_world(3) as nodes:
        results = await on_all_failing(nodes, main)
    assert results[1] is None
    for error in (results[0], results[2]):
        assert isinstance(error, PeerLost)
        assert error.rank == 1


async def test_a_cancelled_backward_pass_ends_the_step_on_all_ranks_and_leaves_nothing_running() -> None:
    async def main(node: Node) -> str:
        model, loop = Waiting("a"), asyncio.get_running_loop()
        model.waits = node.rank == 0
        async with open_replica(node, model) as ddp:
            y, saved = await ddp.forward(make_batch(2)[0])
            task = asyncio.ensure_future(ddp.backward(saved, y))
            if node.rank == 0:
                await loop.run_in_executor(None, model.has_begun.wait, 10.0)
                task.cancel()
                loop.call_soon(model.may_end.set)
            await asyncio.wait({task})
            assert not model.is_running
            return "CancelledError" if task.cancelled() else type(task.exception()).__name__

    async with local_world(2) as nodes:
        cancelled, other = await on_all(nodes, main)
    assert cancelled == "CancelledError"
    assert other in ("PeerCancelled", "NonFiniteValue")  # what a rank gives up may be spoiled


class Waiting(Branches):
    """Waits in the backward pass."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.waits = self.is_running = False
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def backward(self, saved: Any, dy: Array, on_gradient: OnGradient | None = None) -> Array | None:
        self.is_running = True
        self.has_begun.set()
        if self.waits:
            assert self.may_end.wait(10.0)
        dx = super().backward(saved, dy, on_gradient)
        self.is_running = False
        return dx


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(
    "failure", [ZeroDivisionError("no batch left"), asyncio.CancelledError()], ids=["error", "cancel"]
)
async def test_the_others_get_the_error_by_which_a_block_was_left_as_the_reason(
    failure: BaseException, config: DDPConfig
) -> None:
    async def main(node: Node) -> None:
        async with open_replica(node, make_model(), config=config) as ddp:
            await train_step(ddp, *make_batch(2))
            if node.rank == 1:
                raise failure
            await train_step(ddp, *make_batch(2))

    async with local_world(3) as nodes:
        errors = await on_all_failing(nodes, main)
    reason = "ZeroDivisionError: no batch left" if str(failure) else "its block was left by CancelledError"
    for rank in (0, 2):
        error = errors[rank]
        assert isinstance(error, PeerCancelled)
        assert error.rank == 1
        assert reason in str(error)
        assert "Abandoned" not in str(error)
