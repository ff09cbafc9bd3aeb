"""Effects of names: two live objects of one name would meet each other's operations, so the second one is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.nn.optimizers import SGD
from asyncpar.node import Node
from asyncpar.parallel import DataParallel
from asyncpar.parallel.local import HostSynchronizer
from asyncpar.pipeline import PipelineSchedule
from asyncpar.testing import local_world
from asyncpar.zero import ZeROConfig, ZeroEngine, ZeROOptimizer
from tests.options.effects import effects
from tests.parallel.replicas import make_model, open_runtime
from tests.pipeline.timed_stages import make_executor
from tests.zero.replicas import draw_parameters

Make = Callable[..., Awaitable[object]]


def beside_one(make: Make) -> Any:
    """Return a probe that makes a second object, beside one with the default name."""

    async def run(**settings: Any) -> str:
        async with local_world(1) as nodes:
            first = await make(nodes[0])
            try:
                second = await make(nodes[0], **settings)
            except UsageError:
                return "refused"
            return f"{type(first).__name__} beside {type(second).__name__}"

    return run


async def synchronizer(node: Node, **settings: Any) -> object:
    return GradientSynchronizer.data_parallel(node.world, **settings)


async def hosts(node: Node, **settings: Any) -> object:
    between = GradientSynchronizer.data_parallel(node.world, name=f"between {settings}")
    return HostSynchronizer(node.world, between, **settings)


async def engine(node: Node, **settings: Any) -> object:
    made = ZeroEngine(draw_parameters(), SGD(), ZeROConfig(), node.world, **settings)
    await made.prepare()
    return made


async def optimizer(node: Node, **settings: Any) -> object:
    made = ZeROOptimizer(SGD(), ZeROConfig(), node.world, **settings)
    await made.register_parameters(draw_parameters())
    return made


async def executor(node: Node, **settings: Any) -> object:
    schedule = PipelineSchedule(num_stages=1, num_microbatches=1, schedule_type=PipelineScheduleType.GPIPE)
    return make_executor(schedule, node.world, **settings)


async def share_out(**settings: Any) -> str:
    async with (
        local_world(1) as nodes,
        open_runtime(nodes[0]) as runtime,
        DataParallel(make_model(), ["a"], runtime),
    ):
        try:
            async with DataParallel(make_model(), ["a"], runtime, **settings):
                return "beside each other"
        except UsageError:
            return "refused"


EFFECTS = [
    *effects("gradsync.GradientSynchronizer", beside_one(synchronizer), name="other"),
    *effects("parallel.local.HostSynchronizer", beside_one(hosts), name="other"),
    *effects("parallel.DataParallel", share_out, name="other"),
    *effects("pipeline.PipelineExecutor", beside_one(executor), name="other"),
    *effects("zero.ZeroEngine", beside_one(engine), name="other"),
    *effects("zero.ZeROOptimizer", beside_one(optimizer), name="other"),
]
