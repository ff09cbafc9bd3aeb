"""Objects that exchange data by a name: no two that live share one, so they never exchange each other's data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncpar.agreement.errors import PipelineMismatch
from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.hybrid import ThreeDParallelismCoordinator, TransformerModel
from asyncpar.multinode import MultiNodeTrainer
from asyncpar.nn import Parameter, TransformerConfig
from asyncpar.nn.optimizers import SGD
from asyncpar.node import Node
from asyncpar.parallel import DDP_GROUP, DataParallel, DistributedDataParallel, SynchronizationMode
from asyncpar.parallel.local import HostSynchronizer
from asyncpar.pipeline import PipelineSchedule
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeROOptimizer
from tests.hybrid.worlds import make_config
from tests.multinode.worlds import config_of
from tests.parallel.replicas import make_model, open_runtime
from tests.pipeline.real_stages import InlineCompute, cut_model, make_samples, square_loss

SECONDS = 45.0
TINY = TransformerConfig(vocabulary=5, length=2, features=4, layers=2, heads=2)

Make = Callable[..., AbstractAsyncContextManager[Any]]
"""Makes a live object on a node; takes its ``name``, or none for the default."""


@asynccontextmanager
async def synchronizer(node: Node, **name: Any) -> AsyncIterator[GradientSynchronizer]:
    made = GradientSynchronizer.data_parallel(node.world, **name)
    yield made
    made.close()


@asynccontextmanager
async def replica(node: Node, **settings: Any) -> AsyncIterator[DistributedDataParallel]:
    async with (
        open_runtime(node) as runtime,
        DistributedDataParallel(make_model(), "cpu:0", DDP_GROUP, runtime, **settings) as ddp,
    ):
        yield ddp


def asynchronous_replica(node: Node, **name: Any) -> AbstractAsyncContextManager[DistributedDataParallel]:
    return replica(node, mode=SynchronizationMode.ASYNCHRONOUS, **name)


@asynccontextmanager
async def replicas_of_ranks(node: Node, **name: Any) -> AsyncIterator[DataParallel]:
    async with open_runtime(node) as runtime, DataParallel(make_model(), ["cpu:0"], runtime, **name) as made:
        yield made


@asynccontextmanager
async def host_synchronizer(node: Node, **name: Any) -> AsyncIterator[HostSynchronizer]:
    between = None
    if node.rank == 0:
        alone = node.world.subgroup([0], key="alone")
        assert alone is not None
        between = GradientSynchronizer.data_parallel(alone, name=f"between {name.get('name')}")
    try:
        made = HostSynchronizer(node.world, between, **name)
        yield made
        made.close()
    finally:
        if between is not None:
            between.close()


@asynccontextmanager
async def zero_optimizer(node: Node, **name: Any) -> AsyncIterator[ZeROOptimizer]:
    made = ZeROOptimizer(SGD(), ZeROConfig(), node.world, **name)
    await made.register_parameters([Parameter("weight", np.zeros(8, np.float32))])
    yield made
    made.close()


@asynccontextmanager
async def trainer(node: Node, **name: Any) -> AsyncIterator[MultiNodeTrainer]:
    async with MultiNodeTrainer(config_of(node.rank, 1, 2), SGD(), communicator=node.world, **name) as made:
        await made.register_parameters([Parameter("weight", np.zeros(8, np.float32))])
        yield made


@asynccontextmanager
async def coordinator(node: Node, **name: Any) -> AsyncIterator[ThreeDParallelismCoordinator]:
    config = make_config(2, layers=2)
    made = await ThreeDParallelismCoordinator.create(config, TransformerModel(config=TINY), node.world, **name)
    async with made:
        yield made


@asynccontextmanager
async def executor(node: Node, **name: Any) -> AsyncIterator[PipelineExecutor]:
    kind = PipelineScheduleType.GPIPE
    schedule = PipelineSchedule(num_stages=2, num_microbatches=2, schedule_type=kind)
    made = PipelineExecutor(
        schedule,
        [cut_model(2)[node.rank]],
        communicator=node.world,
        compute=InlineCompute(),
        loss=square_loss,
        **name,
    )
    yield made
    await made.close()


MAKERS: tuple[Make, ...] = (
    synchronizer,
    replica,
    asynchronous_replica,
    replicas_of_ranks,
    host_synchronizer,
    zero_optimizer,
    trainer,
    coordinator,
    executor,
)


async def on_both(main: Callable[[Node], Any]) -> list[Any]:
    async with local_world(2) as nodes, asyncio.timeout(SECONDS):
        return await asyncio.gather(*map(main, nodes), return_exceptions=True)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", [{}, {"name": "mine"}], ids=["default", "given"])
async def test_a_second_live_one_of_the_name_is_refused(make: Make, name: dict[str, str]) -> None:
    async def main(node: Node) -> None:
        async with make(node, **name):
            with pytest.raises(UsageError, match=r"name: .* live .* name of its own"):
                async with make(node, **name):
                    pass

    assert await on_both(main) == [None, None]


@pytest.mark.parametrize("make", MAKERS)
async def test_others_and_later_ones_are_not(make: Make) -> None:
    async def main(node: Node) -> None:
        kept = []
        for _ in range(2):
            async with make(node, name="one") as one, make(node, name="other") as other:
                kept += [one, other]

    assert await on_both(main) == [None, None]


async def test_one_that_was_collected_has_no_name() -> None:
    async def main(node: Node) -> None:
        for _ in range(2):
            GradientSynchronizer.data_parallel(node.world)

    assert await on_both(main) == [None, None]


async def in_other_orders(node: Node, run: Callable[[str], Any]) -> list[Any]:
    """Run tasks for two names, begun in another order on each rank, and return what came of them by name."""
    tasks = {}
    for name in ("a", "b") if node.rank == 0 else ("b", "a"):
        tasks[name] = asyncio.create_task(run(name))
        await asyncio.sleep(0)
    return list(await asyncio.gather(*(tasks[name] for name in ("a", "b")), return_exceptions=True))


async def test_steps_of_two_synchronizers_meet_in_any_order() -> None:
    async def main(node: Node) -> list[Any]:
        async def run(name: str) -> float:
            parameter = Parameter("weight", np.zeros(4, np.float32))
            parameter.grad[:] = {"a": 1.0, "b": 100.0}[name]
            async with synchronizer(node, name=name) as made, made.step([parameter]):
                pass
            return float(parameter.grad[0])

        return await in_other_orders(node, run)

    assert await on_both(main) == [[1.0, 100.0]] * 2


@pytest.mark.parametrize("mode", [SynchronizationMode.SYNCHRONOUS, SynchronizationMode.ASYNCHRONOUS])
async def test_replicas_of_two_models_meet_in_any_order(mode: SynchronizationMode) -> None:
    async def main(node: Node) -> list[Any]:
        async def run(name: str) -> float:
            model = make_model()
            for parameter in model.parameters():
                parameter.value[...] = {"a": 1.0, "b": 100.0}[name] + node.rank
            async with replica(node, name=name, mode=mode) as ddp:
                x = np.ones((1, 4))
                y, saved = await ddp.forward(x)
                await ddp.backward(saved, y)
                await ddp.update(lambda: None)
                return float(ddp.parameters()[0].value.flat[0])

        return await in_other_orders(node, run)

    first, second = await on_both(main)
    assert first == second


async def test_pipelines_that_were_made_in_another_order_do_not_run() -> None:
    inputs, targets = make_samples(2)

    async def main(node: Node) -> list[Any]:
        async def run(name: str) -> None:
            async with executor(node, name=name) as made:
                await made.run(inputs, targets)

        return await in_other_orders(node, run)

    for results in await on_both(main):
        for result in results:
            assert isinstance(result, PipelineMismatch)
            assert "by 'a'" in str(result)
            assert "by 'b'" in str(result)
