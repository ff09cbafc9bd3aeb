"""Large buckets go through worker threads, and a cancelled caller leaves no thread behind in their memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from asyncpar.core.concurrency.tasks import INLINE_BYTES
from asyncpar.gradsync import GradientSpec, plan_buckets
from asyncpar.gradsync.schemes import Alone, ReductionStep
from asyncpar.gradsync.step import BucketRun, ThreadTurns

LARGE = INLINE_BYTES  # values of four bytes: four times what is done inline


def make_run(turns: ThreadTurns, *, count: int = LARGE) -> BucketRun:
    spec = GradientSpec(name="x", shape=(count,), dtype=np.dtype(np.float32))
    (bucket,) = plan_buckets([spec], bucket_bytes=1, max_buckets=1).buckets
    agreed = asyncio.Event()
    agreed.set()
    return BucketRun(scheme=Alone(bucket), turns=turns, agreed=agreed)


async def test_a_cancelled_phase_is_waited_for() -> None:
    turns = ThreadTurns(threads=1)
    run = make_run(turns)
    has_begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def phase() -> None:
        loop.call_soon_threadsafe(has_begun.set)
        may_end.wait()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.work([phase], is_first=True))
        await has_begun.wait()
        running.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not running.done()
        may_end.set()
    assert running.cancelled()


async def test_phases_of_large_buckets_take_turns_in_order() -> None:
    """Buckets that are ready together go one after the other: the first must not wait for all to be encoded."""
    turns = ThreadTurns(threads=1)
    runs = [make_run(turns) for _ in range(4)]
    loop = asyncio.get_running_loop()
    begun: asyncio.Queue[int] = asyncio.Queue()
    may_end = threading.Semaphore(0)

    def phase(index: int) -> None:
        loop.call_soon_threadsafe(begun.put_nowait, index)
        may_end.acquire()

    async with asyncio.TaskGroup() as tasks:
        for index, run in enumerate(runs):
            tasks.create_task(run.work([partial(phase, index)], is_first=True))
        try:
            for index in range(len(runs)):
                assert await begun.get() == index
                await loop.run_in_executor(None, str)  # a thread is free for another phase
                assert begun.empty()
                may_end.release()
        finally:
            may_end.release(len(runs))


async def test_times_tell_work_before_the_first_message_from_work_behind_it_and_both_from_messages() -> None:
    run = make_run(ThreadTurns(threads=1), count=1)
    seen: list[str] = []

    def noting(what: str) -> Callable[[], None]:
        return lambda: seen.append(what)

    async def message() -> None:
        seen.append(f"message with {run.times.sending > 0} {run.times.receiving > 0}")

    step = ReductionStep(noting("encode"), message)
    await run.take([step, step], before=noting("pack"), after=noting("unpack"))
    assert seen == ["pack", "encode", "message with True False", "encode", "message with True True", "unpack"]
    assert run.times.exchanging > 0
