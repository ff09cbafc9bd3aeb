"""Effects of the options of gradient synchronization and data parallelism, over two or four ranks of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

import numpy as np

from asyncpar.codecs import Identity, PowerSgd
from asyncpar.core.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.errors import AsyncparError, PeerTimeout, UsageError
from asyncpar.gradsync import (
    GradientBucketingConfig,
    GradientCompressionConfig,
    GradientSynchronizer,
    HostGroups,
    NonFinitePolicy,
    TuningConfig,
)
from asyncpar.gradsync.tuning_space import make_tuner
from asyncpar.nn import Parameter
from asyncpar.node import Node
from asyncpar.parallel import (
    DDP_GROUP,
    DataParallel,
    DDPConfig,
    DistributedDataParallel,
    SynchronizationMode,
)
from asyncpar.parallel.local import DiLoCo
from asyncpar.testing import local_world, run_virtual
from tests.options.effects import Refused, With, digest, effects
from tests.parallel.replicas import Branches, descend, loss_gradient, make_batch, make_model, open_runtime, values_of

T = TypeVar("T")
SHAPES: tuple[tuple[int, ...], ...] = ((20, 25), (300,), (200,))


async def on_all(nodes: Sequence[Node], main: Callable[[Node], Awaitable[T]]) -> T:
    """Run ``main`` on all ranks; return what rank 0 has."""
    async with asyncio.timeout(30.0):
        results = await asyncio.gather(*(main(node) for node in nodes), return_exceptions=True)
    first = results[0]
    if type(first) is UsageError:
        raise first
    return f"{type(first).__name__}" if isinstance(first, BaseException) else first  # type: ignore[return-value]


def parameters_of(rank: int, *, dtype: str = "float32") -> list[Parameter]:
    """Return parameters with gradients."""
    made = [Parameter(f"p{index}", np.zeros(shape, dtype)) for index, shape in enumerate(SHAPES)]
    for index, one in enumerate(made):
        one.accumulate(np.random.default_rng((rank, index)).normal(size=one.shape).astype(dtype))
    return made


async def synchronize(*, nan: bool = False, hosted: bool = False, steps: int = 2, **settings: Any) -> Any:
    """Synchronize a few steps; return what can be seen of it on rank 0."""
    size = 4 if hosted else 2
    config = ThreeDParallelismConfig(
        dp_size=size,
        comm_strategy=CommunicationStrategy.HIERARCHICAL_ALL_REDUCE if hosted else CommunicationStrategy.ALL_REDUCE,
    )

    async def main(node: Node) -> Any:
        made = dict(settings)
        if made.pop("hosts", None):
            made["hosts"] = HostGroups.of(node.world, ((0, 1), (2, 3)))
        synchronizer = GradientSynchronizer(config, RankMapping(config, node.rank), communicator=node.world, **made)
        seen: list[Any] = []
        for _ in range(steps):
            parameters = parameters_of(node.rank)
            if nan and node.rank:
                parameters[0].grad[3, 1] = np.nan
            before = [one.grad for one in parameters]
            async with synchronizer.step(parameters) as step:
                sent = node.world.traffic
                step.ready("p2")
                step.ready("p1")
                for _ in range(50):
                    await asyncio.sleep(0)
                seen.append(("early", node.world.traffic == sent))
            views = [one.grad is array for one, array in zip(parameters, before, strict=True)]
            seen.append((step.outcome.is_skipped, views, digest(*(one.grad for one in parameters))))
        stats = synchronizer.get_sync_stats()
        return seen, stats.total_buckets_synced, stats.bytes_on_wire, stats.residual_norm > 0.0

    async with local_world(size) as nodes:
        return await on_all(nodes, main)


def bucketing(**settings: Any) -> Any:
    return synchronize(bucketing=GradientBucketingConfig(**settings))


async def tuned(**settings: Any) -> Any:
    """Tune steps that take exactly as long as predicted; return what was tried."""
    async with local_world(4, hosts=["a", "b", "c", "d"]) as nodes:
        tuner, model = make_tuner(
            TuningConfig(**settings),
            nodes[0].world,
            bucket_size_mb=25.0,
            strategy=CommunicationStrategy.ALL_REDUCE,
            codec=Identity(),
            sizes=lambda size: (1 << 20,) * max(1, int(64 // size)),
        )
        for _ in range(100):
            seconds = model.predict(tuner.choice)
            tuner.observe(seconds, 2 * seconds)
        return tuner.table()


def compression(**settings: Any) -> Any:
    return synchronize(compression=GradientCompressionConfig(**settings))


def power_sgd(**settings: Any) -> Any:
    return compression(codec=PowerSgd(2, **settings))


async def replicate(*, branches: Sequence[str] | None = None, nan: bool = False, **settings: Any) -> Any:
    """Train a replica for two steps; return what can be seen of it on rank 0."""

    async def main(node: Node) -> Any:
        model: Any = make_model(node.rank) if branches is None else Branches("a", "b")
        seen: list[Any] = []
        async with open_runtime(node) as runtime:
            ddp = DistributedDataParallel(model, "cpu:0", DDP_GROUP, runtime, **settings)
            try:
                async with ddp:
                    for step in range(2):
                        if branches is not None:
                            model.chosen = ("a", "b")[: 1 + (step if branches == "later" else 0)]
                        x, target = make_batch(4, seed=10 * node.rank + step)
                        ddp.zero_grad()
                        before = [one.grad for one in model.parameters()]
                        y, saved = await ddp.forward(x)
                        dy = loss_gradient(y, target)
                        sent = node.world.traffic
                        if nan and node.rank:
                            dy[0] = np.nan
                        await ddp.backward(saved, dy)
                        views = [one.grad is old for one, old in zip(model.parameters(), before, strict=True)]
                        seen.append((views, node.world.traffic == sent))
                        await ddp.update(lambda: descend(model))
                    stats = ddp.get_sync_stats()
                    seen += [ddp.staleness() > 0, stats.total_buckets_synced, stats.bytes_on_wire]
            except AsyncparError as error:
                seen.append(type(error).__name__)
            seen.append(digest(*values_of(model).values()))
            seen.append(runtime.groups)
        return seen

    async with local_world(2) as nodes:
        return await on_all(nodes, main)


def replicate_with(**settings: Any) -> Any:
    branches = settings.pop("branches", None)
    bucket_size = settings.pop("bucket_size", 25 << 20)
    return replicate(config=DDPConfig(**settings), branches=branches, bucket_size=bucket_size)


async def accumulate(**settings: Any) -> Any:
    """Return a digest of the gradients of two passes, the first of them under ``no_sync``."""

    async def main(node: Node) -> str:
        model = make_model(node.rank)
        async with open_runtime(node) as runtime:
            made = DistributedDataParallel(model, "cpu:0", DDP_GROUP, runtime, DDPConfig(**settings))
            async with made as ddp:
                for step in range(2):
                    x, target = make_batch(4, seed=10 * node.rank + step)
                    with ddp.no_sync() if step == 0 else nullcontext():
                        y, saved = await ddp.forward(x)
                        await ddp.backward(saved, loss_gradient(y, target))
                return digest(*(one.grad for one in model.parameters()))

    async with local_world(2) as nodes:
        return await on_all(nodes, main)


def payload_of(node: Node) -> int:
    return sum(entry.payload_bytes for entry in node.world.traffic.operations)


async def overlap(**settings: Any) -> Any:
    """Return whether anything was sent before the backward pass had come to its end."""
    early: list[bool] = []

    async def main(node: Node) -> Any:
        parameters = [Parameter(name, np.zeros(400)) for name in ("first", "last")]
        loop = asyncio.get_running_loop()

        class Model:
            def forward(self, x: Any) -> Any:
                return x, None

            def backward(self, saved: Any, dy: Any, on_gradient: Any = None) -> Any:
                before = payload_of(node)
                on_gradient("last")
                for _ in range(200):
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
                if node.rank == 0:
                    early.append(payload_of(node) - before >= parameters[0].grad.nbytes)
                on_gradient("first")

            def parameters(self) -> Any:
                return parameters

            def zero_grad(self) -> None: ...

        async with open_runtime(node) as runtime:
            config = DDPConfig(**settings)
            made = DistributedDataParallel(Model(), "cpu:0", DDP_GROUP, runtime, config, bucket_size=100)
            async with made as ddp:
                await ddp.backward(None, np.zeros(1))

    async with local_world(2) as nodes:
        await on_all(nodes, main)
    return early


async def name_of_replica(**settings: Any) -> Any:
    """Start a replica whose rank 1 has the default name: ranks meet by it."""

    async def main(node: Node) -> Any:
        node.world.timeout = 0.2 if settings else 30.0  # they meet only by the same name
        async with open_runtime(node) as runtime:
            chosen = settings if node.rank == 0 else {}
            ddp = DistributedDataParallel(make_model(), "cpu:0", DDP_GROUP, runtime, **chosen)
            try:
                await ddp.start()
            except PeerTimeout:
                return "they do not meet"
            finally:
                await ddp.close()
        return "they meet"

    async with local_world(2) as nodes:
        return await on_all(nodes, main)


async def owned(**settings: Any) -> Any:
    async with local_world(1) as nodes, open_runtime(nodes[0]) as runtime:
        async with DistributedDataParallel(make_model(), "cpu:0", DDP_GROUP, runtime, **settings):
            pass
        return runtime.groups


def share_out(*, joined: bool = False, runtime: bool = False, timeout: float | None = 300.0) -> Any:
    """Average over replicas of two ranks, or wait for one that does not come."""

    async def main(node: Node) -> Any:
        model = make_model(node.rank)
        async with (
            open_runtime(node) as opened,
            DataParallel(model, ["a", "b"], opened if runtime else None, timeout=timeout) as parallel,
        ):
            if joined:
                return await wait(parallel)
            y, saved = await parallel.forward(make_batch(4, seed=node.rank)[0])
            await parallel.backward(saved, y)
            await parallel.sync_gradients()
            return digest(*(one.grad for one in model.parameters()))

    async def wait(parallel: DataParallel) -> str:
        parallel.set_sync_mode(SynchronizationMode.BOUNDED_STALENESS(1))
        with suppress(TimeoutError):
            try:
                async with asyncio.timeout(0.3), parallel.replica(0) as replica:
                    for _ in range(5):
                        await replica.forward(make_batch(2)[0])
                        await replica.update(lambda: None)
            except PeerTimeout:
                return "told"
        return "waits"

    async def world() -> Any:
        async with local_world(2) as nodes:
            return await on_all(nodes, main)

    return run_virtual(world()) if joined else asyncio.run(world())


async def rounds(**settings: Any) -> Any:
    async def main(node: Node) -> Any:
        one = Parameter("p", np.zeros(5))
        synchronizer = GradientSynchronizer.data_parallel(node.world, name="rounds")
        diloco = DiLoCo([one], synchronizer, every=1, **settings)
        for _ in range(3):
            one.value += 1.0 + node.rank
            await diloco.step()
        return digest(one.value)

    async with local_world(2) as nodes:
        return await on_all(nodes, main)


def outer(**settings: Any) -> Any:
    return rounds(**{f"outer_{name}": value for name, value in settings.items()})


TINY = {"bucket_size_mb": 0.0005}
ON = {"enable_compression": True}
ASYNCHRONOUS = SynchronizationMode.ASYNCHRONOUS

EFFECTS = [
    *effects(
        "gradsync.GradientBucketingConfig",
        bucketing,
        bucket_size_mb=0.0005,
        max_buckets=With(1, TINY),
        overlap_communication=With(False, TINY),
        gradient_as_bucket_view=True,
    ),
    *effects(
        "gradsync.GradientCompressionConfig",
        compression,
        enable_compression=True,
        compression_ratio=With(0.5, ON),
        error_feedback=With(False, ON),
        quantization_bits=With(4, ON),
        codec="int8",
    ),
    *effects(
        "gradsync.GradientSynchronizer",
        synchronize,
        bucketing=GradientBucketingConfig(bucket_size_mb=0.0005),
        compression=GradientCompressionConfig(codec="bf16"),
        when_not_finite=With(NonFinitePolicy.SKIP_STEP, {"nan": True}),
        hosts=With(True, {"hosted": True}),
        tuning=TuningConfig(pin="0.0005m"),
    ),
    *effects(
        "gradsync.TuningConfig",
        tuned,
        budget=0.5,
        bucket_sizes_mb=With((2.0,), {"budget": 0.5}),
        segments=With(("64k",), {"budget": 0.5}),
        pin="8m@halving/512k",
    ),
    *effects("codecs.PowerSgd", power_sgd, seed=5),
    *effects(
        "parallel.DistributedDataParallel",
        replicate,
        config=With(DDPConfig(find_unused_parameters=True), {"branches": "first"}),
        mode=ASYNCHRONOUS,
        bucket_size=100,
        compression=GradientCompressionConfig(codec="int8"),
        when_not_finite=With(NonFinitePolicy.SKIP_STEP, {"nan": True}),
    ),
    *effects("parallel.DistributedDataParallel", name_of_replica, name="other"),
    *effects("parallel.DistributedDataParallel", owned, owns_runtime=True),
    *effects(
        "parallel.DistributedDataParallel",
        lambda **settings: replicate(mode=ASYNCHRONOUS, **settings),
        bucket_size=Refused(100, "bucket_size: expected the default"),
        compression=Refused(GradientCompressionConfig(codec="int8"), "compression: expected the default"),
        when_not_finite=Refused(NonFinitePolicy.SKIP_STEP, "when_not_finite: expected the default"),
    ),
    *effects(
        "parallel.DDPConfig",
        replicate_with,
        find_unused_parameters=With(True, {"branches": "first"}),
        static_graph=With(True, {"branches": "later", "find_unused_parameters": True}),
        gradient_as_bucket_view=True,
    ),
    *effects("parallel.DDPConfig", overlap, delay_all_reduce=False),
    *effects("parallel.DDPConfig", accumulate, no_sync_weight="sum"),
    *effects("parallel.DataParallel", share_out, runtime=True, timeout=With(0.05, {"joined": True})),
    *effects("parallel.local.DiLoCo", rounds, outer_learning_rate=1.0, outer_momentum=0.5),
    *effects("parallel.local.OuterConfig", outer, learning_rate=1.0, momentum=0.5),
]
