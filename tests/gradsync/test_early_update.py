"""Updates in the step: the same bits as an optimizer's step behind it, and undone where there is no step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.names import CodecChoice
from asyncpar.errors import NonFiniteValue, PeerCancelled, PeerError, UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn import Parameter
from asyncpar.nn.half import HalfParameter
from asyncpar.nn.optimizers import SGD, AdamW, EarlyStep, Optimizer
from asyncpar.node import Node
from asyncpar.testing import local_world
from tests.gradsync.worlds import CODECS
from tests.products import in_turn

SHAPES = ((70, 600), (600,), (1,), (300, 100), (0, 3))
RULE = AdamW(weight_decay=0.01)


class Replica:
    """A rank with parameters, an optimizer and a synchronizer."""

    def __init__(self, node: Node, rule: Any = RULE, dtype: str = "float32", **settings: Any) -> None:
        self.node = node
        rng = np.random.default_rng(5)
        values = [rng.standard_normal(shape) for shape in SHAPES]
        self.parameters: list[Parameter]
        if dtype in ("bfloat16", "float16"):
            self.parameters = [
                HalfParameter(f"p{place}", value.astype(np.float32), storage=dtype)
                for place, value in enumerate(values)
            ]
        else:
            self.parameters = [Parameter(f"p{place}", value.astype(dtype)) for place, value in enumerate(values)]
        self.optimizer = Optimizer(self.parameters, rule)
        self.synchronizer = GradientSynchronizer.data_parallel(node.world, **settings)

    def draw(self, step: int) -> None:
        rng = np.random.default_rng((self.node.rank, step))
        for parameter in self.parameters:
            parameter.grad[...] = rng.standard_normal(parameter.shape)

    async def step(self, step: int, *, early: bool) -> None:
        self.draw(step)
        await self.take(early=early)

    async def take(self, *, early: bool) -> None:
        update = EarlyStep(self.optimizer, 0.1) if early else None
        async with self.synchronizer.step(self.parameters, update=update) as synchronization:
            for parameter in reversed(self.parameters):
                synchronization.ready(parameter.name)
                await asyncio.sleep(0)
        if not early and not synchronization.outcome.is_skipped:
            self.optimizer.step(0.1)

    def state(self) -> dict[str, bytes]:
        """Return all that a step changes."""
        arrays = {parameter.name: parameter.value for parameter in self.parameters}
        for parameter in self.parameters:
            arrays |= {
                f"{parameter.name}/{kind}": array for kind, array in self.optimizer.state(parameter.name).items()
            }
        counts = {"steps": bytes([self.optimizer.step_count])}
        return {name: array.tobytes() for name, array in arrays.items()} | counts

    def gradients(self) -> list[bytes]:
        return [parameter.grad.tobytes() for parameter in self.parameters]


@asynccontextmanager
async def replicas(size: int = 2, transport: str = "inproc", **settings: Any) -> AsyncIterator[Sequence[Replica]]:
    async with local_world(size, transport=transport) as nodes:
        yield [Replica(node, **settings) for node in nodes]


async def on_all(ranks: Sequence[Replica], step: int, *, early: bool) -> None:
    await asyncio.gather(*(rank.step(step, early=early) for rank in ranks))


@pytest.mark.parametrize(("codec", "size"), in_turn(CODECS, [1, 2, 3]))
async def test_parameters_are_those_of_a_step_behind_the_synchronization(codec: CodecChoice, size: int) -> None:
    settings: dict[str, Any] = {
        "compression": GradientCompressionConfig(codec=None if codec == "none" else codec),
        "bucketing": GradientBucketingConfig(bucket_size_mb=0.1),
    }
    found = []
    for early in (False, True):
        async with replicas(size, **settings) as ranks:
            for step in range(3):
                await on_all(ranks, step, early=early)
            found.append([(rank.state(), rank.gradients()) for rank in ranks])
    assert found[0] == found[1]


@pytest.mark.parametrize(("transport", "as_views"), in_turn(["tcp", "shm"], [False, True]))
async def test_it_is_so_over_lanes_and_in_shared_memory(transport: str, as_views: bool) -> None:
    bucketing = GradientBucketingConfig(gradient_as_bucket_view=as_views)
    found = []
    for early in (False, True):
        async with replicas(2, transport, bucketing=bucketing) as ranks:
            for step in range(3):
                await on_all(ranks, step, early=early)
            found.append([rank.state() for rank in ranks])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("dtype", "rule"), [("float64", SGD(momentum=0.9)), ("float32", SGD()), ("bfloat16", RULE), ("float16", RULE)]
)
async def test_every_rule_and_dtype_can_be_early(dtype: str, rule: Any) -> None:
    found = []
    for early in (False, True):
        async with replicas(2, rule=rule, dtype=dtype) as ranks:
            for step in range(2):
                await on_all(ranks, step, early=early)
            found.append([rank.state() for rank in ranks])
    assert found[0] == found[1]


async def test_parts_are_taken_before_the_last_bytes_have_come() -> None:
    """One rank takes all its buckets but one, and holds that up until the other has moved what it can."""
    async with replicas(2, bucketing=GradientBucketingConfig(bucket_size_mb=0.1)) as ranks:
        for step in range(2):  # in the second step the order is known
            await on_all(ranks, step, early=True)
        moved = asyncio.Event()
        loop = asyncio.get_running_loop()

        class Watched(EarlyStep):
            def take(self, name: str, part: slice, gradient: Any) -> None:
                super().take(name, part, gradient)
                loop.call_soon_threadsafe(moved.set)

        async def slow() -> None:
            rank = ranks[1]
            rank.draw(3)
            async with rank.synchronizer.step(rank.parameters) as synchronization:
                for parameter in reversed(rank.parameters[1:]):
                    synchronization.ready(parameter.name)
                await asyncio.wait_for(moved.wait(), 30)
            rank.optimizer.step(0.1)

        async def quick() -> None:
            rank = ranks[0]
            rank.draw(3)
            async with rank.synchronizer.step(rank.parameters, update=Watched(rank.optimizer, 0.1)):
                pass

        await asyncio.gather(slow(), quick())
        assert ranks[0].state() == ranks[1].state()


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("policy", ["abort", "skip_step"])
async def test_what_is_not_finite_is_undone(codec: CodecChoice | None, policy: str) -> None:
    compression = GradientCompressionConfig(codec=codec)
    async with replicas(2, compression=compression, when_not_finite=policy) as ranks:
        await on_all(ranks, 0, early=True)
        for rank in ranks:
            rank.draw(1)
        ranks[1].parameters[0].grad[3, 3] = np.nan
        before = [(rank.state(), rank.gradients()) for rank in ranks]
        outcomes = await asyncio.gather(*(rank.take(early=True) for rank in ranks), return_exceptions=True)
        wanted = NonFiniteValue if policy == "abort" else type(None)
        assert [type(outcome) for outcome in outcomes] == [wanted] * 2
        assert [(rank.state(), rank.gradients()) for rank in ranks] == before
        await on_all(ranks, 2, early=True)
        assert ranks[0].state() == ranks[1].state() != before[0][0]


async def test_a_step_that_fails_on_one_rank_is_undone_on_all() -> None:
    class Failing(EarlyStep):
        def take(self, name: str, part: slice, gradient: Any) -> None:
            super().take(name, part, gradient)
            raise RuntimeError("no update")

    async with replicas(2) as ranks:
        await on_all(ranks, 0, early=True)
        for rank in ranks:
            rank.draw(1)
        before = [(rank.state(), rank.gradients()) for rank in ranks]

        async def failing(rank: Replica) -> None:
            async with rank.synchronizer.step(rank.parameters, update=Failing(rank.optimizer, 0.1)):
                pass

        outcomes = await asyncio.gather(failing(ranks[0]), ranks[1].take(early=True), return_exceptions=True)
        assert isinstance(outcomes[0], RuntimeError)
        assert isinstance(outcomes[1], PeerError)
        assert [(rank.state(), rank.gradients()) for rank in ranks] == before
        await on_all(ranks, 2, early=True)
        assert ranks[0].state() == ranks[1].state()


async def test_a_block_that_raises_moves_nothing() -> None:
    async with replicas(2) as ranks:
        before = [rank.state() for rank in ranks]

        async def raising(rank: Replica) -> None:
            rank.draw(0)
            update = EarlyStep(rank.optimizer, 0.1)
            async with rank.synchronizer.step(rank.parameters, update=update) as step:
                for parameter in rank.parameters:
                    step.ready(parameter.name)
                await asyncio.sleep(0.01)
                raise RuntimeError("in the backward pass")

        outcomes = await asyncio.gather(raising(ranks[0]), ranks[1].step(0, early=True), return_exceptions=True)
        assert isinstance(outcomes[0], RuntimeError)
        assert isinstance(outcomes[1], PeerCancelled)
        assert [rank.state() for rank in ranks] == before


async def test_ranks_need_not_all_update_early() -> None:
    async with replicas(2) as ranks:
        await asyncio.gather(*(rank.step(0, early=rank.node.rank == 0) for rank in ranks))
        assert ranks[0].state() == ranks[1].state()


async def test_dropping_ranks_and_early_updates_exclude_each_other_on_every_rank() -> None:
    async with replicas(2, when_not_finite="drop") as ranks:
        outcomes = await asyncio.gather(*(rank.step(0, early=True) for rank in ranks), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [UsageError] * 2
        assert "when_not_finite" in str(outcomes[0])


def test_an_update_of_a_parameter_that_the_optimizer_has_not_is_refused() -> None:
    optimizer = Optimizer([Parameter("a", np.ones(3))], SGD())
    with pytest.raises(UsageError, match="'b'"):
        EarlyStep(optimizer, 0.1).take("b", slice(0, 3), np.ones(3))
