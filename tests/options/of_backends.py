"""Effects of the options of backends, tensors, actors and pipelines, over ranks of this process."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.declaration import MailboxPolicy, WhenFull
from asyncpar.actors.supervision.child import Child
from asyncpar.actors.supervision.policy import Backoff, Intensity
from asyncpar.actors.supervision.supervisor import Supervisor
from asyncpar.backends import (
    BackendConfig,
    BackendUnavailable,
    CommunicationRuntime,
    CompressionAlgorithm,
    CompressionKind,
    ThreadBackend,
)
from asyncpar.blocking import LoopThread
from asyncpar.codecs import Int8
from asyncpar.core.config.parallel import (
    MemoryOptimizationStrategy,
    PipelineScheduleType,
    RankMapping,
    ThreeDParallelismConfig,
)
from asyncpar.errors import (
    ActorDown,
    AsyncparError,
    MailboxFull,
    NotFound,
    PeerCancelled,
    PeerTimeout,
    RemoteError,
    UsageError,
)
from asyncpar.pipeline import MemoryManager, PipelineExecutor, PipelineSchedule, StepAlarm
from asyncpar.tensors import ModelParallelConfig, ModelParallelContext, TensorCommunicator
from asyncpar.testing import local_world, run_virtual
from tests.options.effects import Refused, With, digest, effects
from tests.pipeline.timed_stages import SlowCommunicator, TimedStage, VirtualCompute
from tests.pipeline.worlds import open_ranks

X = np.random.default_rng(2).normal(size=600).astype(np.float32)


async def compress(**settings: Any) -> Any:
    """All-reduce through an algorithm; return the result and what was sent."""
    algorithm = CompressionAlgorithm(**settings)
    meeting = ThreadBackend(2)

    async def main(rank: int) -> Any:
        runtime = CommunicationRuntime()
        runtime.register_backend("thread", meeting)
        async with runtime:
            await runtime.initialize("thread", BackendConfig(rank=rank, compression=algorithm))
            result = await runtime.collective_op("all_reduce", X * (rank + 1))
            assert result.value is not None
            return digest(result.value), runtime.get_metrics().of("all_reduce").bytes, result.codec

    return (await asyncio.gather(main(0), main(1)))[0]


def open_backend(*, backend: str = "thread", silent: bool = False, **settings: Any) -> Any:
    """Open a backend on one rank of two, or alone, in virtual time; return the outcome."""

    async def main() -> Any:
        runtime = CommunicationRuntime()
        if silent:
            runtime.register_backend("thread", ThreadBackend(2))
        async with runtime:
            try:
                async with asyncio.timeout(0.3):
                    group = await runtime.initialize(backend, BackendConfig(**settings))
            except (PeerTimeout, TimeoutError) as error:
                return type(error).__name__
            return group.rank, group.size, group.communicator.timeout

    return run_virtual(main())


async def take_places(**settings: Any) -> Any:
    """Let two ranks meet; return the number of the first one."""
    meeting = ThreadBackend(2)

    async def main(config: BackendConfig) -> int:
        runtime = CommunicationRuntime()
        runtime.register_backend("thread", meeting)
        async with runtime:
            return (await runtime.initialize("thread", config)).rank

    return await asyncio.gather(main(BackendConfig(timeout=5.0, **settings)), main(BackendConfig(timeout=5.0)))


async def size_of(**settings: Any) -> Any:
    meeting = ThreadBackend(**settings)

    async def main() -> int:
        runtime = CommunicationRuntime()
        runtime.register_backend("thread", meeting)
        async with runtime:
            return (await runtime.initialize("thread")).size

    return await asyncio.gather(*(main() for _ in range(meeting.size)))


def loop_thread(**settings: Any) -> Any:
    thread = LoopThread(**settings)
    try:
        return sorted(one.name for one in threading.enumerate() if "asyncpar" in one.name or "mine" in one.name)
    finally:
        thread.close()


async def open_context(**settings: Any) -> Any:
    try:
        async with ModelParallelContext.open(ModelParallelConfig(**settings)) as context:
            return (await context.all_reduce(np.ones(3))).tolist()
    except BackendUnavailable as error:
        return str(error)


async def close_communicator(*, close: bool = False) -> Any:
    closed: list[str] = []

    async def note() -> None:
        closed.append("closed")

    async with local_world(1) as nodes:
        await TensorCommunicator(nodes[0].world, close=note if close else None).close()
    return closed


def local_rank(**settings: Any) -> Any:
    return RankMapping(ThreeDParallelismConfig(), 0, **settings)


# -- actors -----------------------------------------------------------------------------------------------------------


def fill(*, count: int = 6, **settings: Any) -> Any:
    """Ask a busy actor more than it can take; return the outcomes of the asks."""

    class Busy(Actor):
        mailbox = MailboxPolicy(**settings)

        @endpoint
        async def work(self, number: int) -> int:
            await asyncio.sleep(1.0)
            return number

    async def main() -> Any:
        async with local_world(1) as nodes:
            ref = await nodes[0].spawn(Busy)
            results = await asyncio.gather(*(ref.work(number) for number in range(count)), return_exceptions=True)
            return ["full" if isinstance(one, MailboxFull) else one for one in results]

    return run_virtual(main())


class Fragile(Actor):
    """Fails on request, and takes its time to stop."""

    lives: ClassVar[dict[str, int]] = {}

    def __init__(self, label: str) -> None:
        self.label = label

    async def on_start(self) -> None:
        self.lives[self.label] = self.lives.get(self.label, 0) + 1

    async def on_stop(self) -> None:
        await asyncio.sleep(3.0)

    @endpoint
    async def crash(self) -> None:
        raise ValueError(self.label)


def supervise(*, child: dict[str, Any] | None = None, failures: int = 1, pause: float = 0.0, **settings: Any) -> Any:
    """Let a child fail; return how often the children have started, and how long it all took."""

    async def main() -> Any:
        Fragile.lives.clear()
        loop = asyncio.get_running_loop()
        async with local_world(1) as nodes:
            given = {"name": "a", **(child or {})}
            children = [Child(Fragile, "a", **given), Child(Fragile, "b", name="b")]
            supervisor = await nodes[0].spawn(Supervisor, children, **settings)
            status = await supervisor.children()
            watch = nodes[0].watch(supervisor)
            for _ in range(failures):
                ref = nodes[0].ref(status[0].name, actor_class=Fragile)
                with suppress(RemoteError, ActorDown, NotFound):
                    await ref.crash.tell()
                await asyncio.sleep(10.0 + pause)
            names = [one.name for one in status]
            lives, began = dict(Fragile.lives), loop.time()
            with suppress(UsageError):  # it has given up
                await nodes[0].stop_actor(supervisor)
            down = await watch
            return names, lives, loop.time() - began, str(down.reason)

    return run_virtual(main())


def child(**settings: Any) -> Any:
    return supervise(child=settings)


def intensity(**settings: Any) -> Any:
    failures = settings.pop("failures", 2)
    pause = settings.pop("pause", 0.0)
    return supervise(intensity=Intensity(**settings), failures=failures, pause=pause)


def backoff(**settings: Any) -> Any:
    """Return how often a child has started that failed twice, 30 seconds apart."""
    return supervise(backoff=Backoff(initial=5.0, factor=6.0, **settings), failures=2, pause=20.0)


# -- pipelines --------------------------------------------------------------------------------------------------------


class CountingMemory(MemoryManager):
    """Counts what is stored."""

    stored = 0

    def store_activation(self, *arguments: Any, **more: Any) -> None:
        self.stored += 1
        super().store_activation(*arguments, **more)


class CountingReceiver(SlowCommunicator):
    """Notes how many receives are under way at once."""

    def __init__(self, communicator: Any, peaks: list[int]) -> None:
        super().__init__(communicator, 0.0)
        self._peaks = peaks
        self._calls: list[Any] = []

    def subgroup(self, *arguments: Any, **options: Any) -> Any:
        return CountingReceiver(self._communicator.subgroup(*arguments, **options), self._peaks)

    def _receive(self, *arguments: Any, **options: Any) -> Any:
        call = self._communicator._receive(*arguments, **options)  # noqa: SLF001
        self._calls.append(call)
        self._peaks.append(sum(not one.is_over for one in self._calls))
        return call


def run_pipeline(*, loss: bool = True, watched: bool = False, **settings: Any) -> Any:
    """Run a pipeline of two ranks on virtual time; return losses, memory and time, or the error."""
    schedule = PipelineSchedule(num_stages=2, num_microbatches=8, schedule_type=PipelineScheduleType.GPIPE)
    has_memory = settings.pop("memory", None)
    has_alarm = settings.pop("alarm", None)

    async def main() -> Any:
        async with open_ranks(2) as ranks:
            memories, peaks = [CountingMemory(), CountingMemory()], [0]

            async def rank(number: int) -> Any:
                alarm = StepAlarm(ranks.communicators[number]) if has_alarm else None
                communicator: Any = CountingReceiver(ranks.communicators[number], peaks)
                compute = VirtualCompute()
                executor = PipelineExecutor(
                    schedule,
                    [TimedStage(compute)],
                    communicator=communicator,
                    compute=compute,
                    loss=(lambda y, _: (float(y[0]), np.ones(1))) if loss else None,
                    memory=memories[number] if has_memory else None,
                    alarm=alarm,
                    **settings,
                )
                inputs = [np.array([float(one)]) for one in range(8)]
                try:
                    result = await executor.run(inputs, inputs)
                    return tuple(result.losses), result.seconds
                except AsyncparError as error:
                    return type(error).__name__
                finally:
                    await executor.close()
                    if alarm is not None:
                        await alarm.close()

            outcome = await asyncio.gather(rank(0), rank(1), return_exceptions=True)
            return (
                [str(type(one)) if isinstance(one, BaseException) else one for one in outcome],
                memories[0].stored,
                max(peaks),
            )

    return run_virtual(main())


async def manage(*, room: bool = False, **settings: Any) -> Any:
    """Store activations; return where they went."""
    async with MemoryManager(**settings) as manager:
        for number in range(4):
            manager.store_activation((0, number), np.ones(1000))
        await manager.settle()
        return manager.stats.offloaded.count, manager.stats.peak_bytes


def gone() -> str:
    return str(Path(tempfile.gettempdir()) / "asyncpar-no-such-folder")


def graces(**settings: Any) -> Any:
    """Fail on one rank while the other does not answer; return how long it takes to give that up."""

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        async with open_ranks(2) as ranks:
            one = StepAlarm(ranks.communicators[0], **settings)
            other = StepAlarm(ranks.communicators[1], **settings)

            async def fail() -> float:
                began = loop.time()
                try:
                    async with one.watch():
                        raise PeerCancelled("nobody says why", rank=1)
                except AsyncparError:
                    return loop.time() - began
                finally:
                    await one.close()

            try:
                return await fail()
            finally:
                await other.close()

    return run_virtual(main())


EFFECTS = [
    *effects(
        "backends.CompressionAlgorithm",
        compress,
        kind=Refused(CompressionKind.TOP_K, "k: expected"),
        k=With(20, {"kind": CompressionKind.TOP_K, "k": 10}),
        ratio=With(0.5, {"kind": CompressionKind.RANDOM, "ratio": 0.1}),
        bits=With(4, {"kind": CompressionKind.QUANTIZATION, "bits": 8}),
        codec=With(Int8(), {"kind": CompressionKind.CUSTOM, "codec": CompressionAlgorithm.custom("int4").codec}),
    ),
    *effects(
        "backends.BackendConfig",
        open_backend,
        timeout=With(0.05, {"silent": True, "rank": 0}),
        world_size=2,
        transport=Refused("tcp", "transport: the thread backend has no use for it"),
        rendezvous=Refused("file:///a", "rendezvous: the thread backend has no use for it"),
    ),
    *effects("backends.BackendConfig", take_places, rank=1),
    *effects(
        "backends.BackendConfig",
        lambda compression=None: compress(
            kind=CompressionKind.CUSTOM, codec=CompressionAlgorithm.custom("int8" if compression else "int4").codec
        ),
        compression=True,
    ),
    *effects("backends.ThreadBackend", size_of, size=2),
    *effects("blocking.LoopThread", loop_thread, name="mine"),
    *effects("tensors.ModelParallelConfig", open_context, comm_backend="nccl"),
    *effects("tensors.TensorCommunicator", close_communicator, close=True),
    *effects("hybrid.RankMapping", local_rank, local_rank=3),
    *effects("Mailbox", fill, limit=With(2, {"when_full": WhenFull.FAIL}), when_full=With("fail", {"count": 1200})),
    *effects("Child", child, name="other", restart="temporary", shutdown=0.5),
    *effects(
        "Intensity",
        intensity,
        restarts=With(0, {"failures": 1}),
        period=With(1000.0, {"restarts": 1, "failures": 3}),
    ),
    *effects(
        "Supervisor",
        supervise,
        strategy="one_for_all",
        intensity=Intensity(restarts=0),
        backoff=Backoff(initial=30.0),
    ),
    *effects("Backoff", backoff, reset_after=1.0),
    *effects(
        "pipeline.PipelineExecutor",
        run_pipeline,
        loss=False,
        memory=True,
        alarm=True,
        receive_ahead=1,
    ),
    *effects(
        "pipeline.MemoryManager",
        manage,
        strategy=MemoryOptimizationStrategy.EXTREME,
        limit=17000,
        folder=Refused(gone(), "folder: expected a folder that exists"),
    ),
    *effects("pipeline.StepAlarm", graces, grace=0.5),
]
