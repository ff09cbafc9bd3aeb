"""Large buckets go through worker threads, and a cancelled caller leaves no thread behind in their memory."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import cast

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.offload import INLINE_BYTES
from asyncpar.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import (
    GradientCompressionConfig,
    GradientSpec,
    GradientSynchronizer,
    NonFinitePolicy,
    plan_buckets,
)
from asyncpar.gradsync.flow import BucketFlow, FlowSettings, ThreadTurns
from asyncpar.gradsync.groups import SyncGroups
from asyncpar.gradsync.keys import BucketKeys, Keys, Name
from asyncpar.gradsync.phases import Packing
from asyncpar.gradsync.schemes import Alone
from asyncpar.nn import Array, Parameter
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from tests.gradsync.schemes.test_owners import Seat

LARGE = INLINE_BYTES  # values of four bytes: four times what is done inline


def make_parameter(rank: int) -> Parameter:
    parameter = Parameter("large", np.zeros(LARGE, np.float32))
    parameter.grad[:] = np.random.default_rng(rank).normal(size=LARGE)
    return parameter


@pytest.mark.parametrize("lossy", [False, True])
async def test_large_buckets_become_the_mean_too(lossy: bool) -> None:
    async def main(node: Node) -> Array:
        config = ThreeDParallelismConfig(dp_size=node.size)
        synchronizer = GradientSynchronizer(
            config,
            RankMapping(config, node.rank),
            communicator=node.world,
            compression=GradientCompressionConfig(codec="int8" if lossy else None),
        )
        parameter = make_parameter(node.rank)
        async with synchronizer.step([parameter]):
            pass
        return parameter.grad

    async with local_world(3) as nodes:
        results = await asyncio.gather(*(main(node) for node in nodes))
    expected = np.mean([make_parameter(rank).grad for rank in range(3)], axis=0)
    np.testing.assert_allclose(results[0], expected, atol=0.05 if lossy else 1e-6)
    for other in results:
        np.testing.assert_array_equal(other, results[0])


def make_flow(index: int, turns: ThreadTurns) -> BucketFlow:
    spec = GradientSpec(name="large", shape=(LARGE,), dtype=np.dtype(np.float32))
    (bucket,) = plan_buckets([spec], bucket_bytes=1, max_buckets=1).buckets
    alone = cast(Communicator, Seat(rank=0, size=1))
    settings = FlowSettings(
        groups=SyncGroups(everyone=alone, replicas=alone),
        packing=Packing(parameters={}),
        policy=NonFinitePolicy.ABORT,
        turns=turns,
        agreed=asyncio.Event(),
        step=1,
    )
    name = Name(Keys("test"), str(index))
    keys = BucketKeys(replicas=name, slices=name, ends=name)
    return BucketFlow(Alone(bucket), keys=keys, place=(0, 0), settings=settings)


async def test_a_cancelled_phase_is_waited_for() -> None:
    turns = ThreadTurns(threads=1)
    flow = make_flow(0, turns)
    has_begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def phase() -> None:
        loop.call_soon_threadsafe(has_begun.set)
        may_end.wait()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(flow._off_loop(turns.sending, [phase]))
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
    flows = [make_flow(index, turns) for index in range(4)]
    loop = asyncio.get_running_loop()
    begun: asyncio.Queue[str] = asyncio.Queue()
    may_end = threading.Semaphore(0)

    def phase(name: str) -> None:
        loop.call_soon_threadsafe(begun.put_nowait, name)
        may_end.acquire()

    async with asyncio.TaskGroup() as tasks:
        for flow in flows:
            tasks.create_task(flow._off_loop(turns.sending, [partial(phase, flow.name)]))
        try:
            for flow in flows:
                assert await begun.get() == flow.name
                await loop.run_in_executor(None, str)  # a thread is free for another phase
                assert begun.empty()
                may_end.release()
        finally:
            may_end.release(len(flows))
