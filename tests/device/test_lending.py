"""Device arrays are lent to an operation until the devices are done with them, and no longer."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric
from tests.products import sampled

SIZE = 2
COUNT = 4

Make = Callable[[], Any]


def array(cluster: FakeCluster, count: int = COUNT) -> Any:
    return FakeDeviceArray.of(cluster, np.ones(count, np.float32))


CALLS: dict[str, Callable[[Any, Any, Make], Any]] = {
    "send": lambda comm, x, _: comm.send(x, 1 - comm.rank),
    "all_reduce": lambda comm, x, make: comm.all_reduce(x, out=make()),
    "reduce": lambda comm, x, _: comm.reduce(x, root=0),
    "reduce_scatter": lambda comm, x, _: comm.reduce_scatter(x),
    "all_gather": lambda comm, x, _: comm.all_gather(x),
    "all_gather_v": lambda comm, x, _: comm.all_gather_v(x),
    "gather": lambda comm, x, _: comm.gather(x, root=0),
    "all_to_all": lambda comm, x, _: comm.all_to_all(x),
}


async def passed(nodes: Any, cluster: FakeCluster, operation: str) -> tuple[list[asyncio.Future[Any]], list[Any]]:
    """Start ``operation`` on all ranks; return the tasks, and weak references of what was passed to it."""

    def make() -> Any:
        return array(cluster)

    calls, references = [], []
    for node in nodes:
        x = array(cluster, SIZE if operation == "all_to_all" else COUNT)
        references.append(weakref.ref(x))
        calls.append(asyncio.ensure_future(CALLS[operation](node.world, x, make)))
    if operation == "send":
        calls += [asyncio.ensure_future(node.world.recv(1 - node.rank, out=make())) for node in nodes]
    return calls, references


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("has_nccl", [True, False])
async def test_arrays_are_given_back_when_the_operation_is_over_though_its_task_is_kept(
    operation: str, has_nccl: bool
) -> None:
    """A task keeps its call as long as it lives, and programs keep lists of tasks."""
    cluster = FakeCluster(seed=1)
    fabrics = [FakeFabric(cluster), FakeFabric(cluster, visible=[1]) if has_nccl else None]
    async with device_world(SIZE, cluster=cluster, fabrics=fabrics) as nodes:
        tasks, references = await passed(nodes, cluster, operation)
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)
        assert [reference() for reference in references] == [None] * SIZE


@pytest.mark.parametrize(("operation", "turns", "has_nccl"), sampled(list(CALLS), [0, 1, 5, 25], [True, False]))
async def test_arrays_of_a_cancelled_operation_are_given_back_once_the_devices_are_done(
    operation: str, turns: int, has_nccl: bool
) -> None:
    cluster = FakeCluster(seed=turns, longest_delay=40)
    fabrics = [FakeFabric(cluster), FakeFabric(cluster, visible=[1]) if has_nccl else None]
    async with device_world(SIZE, cluster=cluster, fabrics=fabrics) as nodes:
        tasks, references = await passed(nodes, cluster, operation)
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        del task
        for task in tasks:  # an error that is kept keeps the frames it came through, as always in Python
            error = None if task.cancelled() else task.exception()
            if error is not None:
                error.__traceback__ = None
                error.__cause__ = error.__context__ = None
        del error, task
        await asyncio.sleep(0.01)
        tasks.clear()
        assert [reference() for reference in references] == [None] * SIZE
        assert cluster.faults == []


class ObservedCopies(FakeFabric):
    """A fabric that tells of each copy as it is enqueued."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        super().copy(target, source, nbytes, stream)
        self.observe(target, source)

    def observe(self, target: int, source: int) -> None:
        """Called with the addresses."""


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "send"])
@pytest.mark.parametrize("comes", ["from the array", "to the array"])
async def test_nothing_touches_arrays_of_a_cancelled_operation_that_goes_through_the_host(
    operation: str, comes: str
) -> None:
    """When it has ended they are the caller's again: what is copied into them later would overwrite the caller's."""
    cluster = FakeCluster(seed=1, longest_delay=60)
    fabrics = [ObservedCopies(cluster, visible=[rank]) for rank in range(SIZE)]
    async with device_world(SIZE, cluster=cluster, fabrics=fabrics) as nodes:
        arrays = {
            node.rank: (array(cluster), FakeDeviceArray(cluster, (SIZE, COUNT), np.dtype(np.float32))) for node in nodes
        }
        tasks: dict[str, asyncio.Task[Any]] = {}
        addresses = {one.address for both in arrays.values() for one in both}

        def observe(target: int, source: int) -> None:
            if (target if comes == "to the array" else source) in addresses:
                for task in tasks.values():
                    task.cancel()

        for fabric in fabrics:
            fabric.observe = observe  # type: ignore[method-assign]
        for rank, (x, out) in arrays.items():
            comm = nodes[rank].world
            if operation == "send":
                tasks[f"send {rank}"] = asyncio.create_task(comm.send(x, 1 - rank))
                tasks[f"recv {rank}"] = asyncio.create_task(comm.recv(1 - rank, out=arrays[1 - rank][0]))
            else:
                options = {"out": out} if operation == "all_gather" else {}
                tasks[f"{rank}"] = asyncio.create_task(getattr(comm, operation)(x, algorithm="staged", **options))
        await asyncio.wait(tasks.values())
        assert any(task.cancelled() for task in tasks.values())
        for both in arrays.values():
            for one in both:
                one.set(np.full(one.shape, 7, np.float32))
        for _ in range(300):
            cluster.tick()
        assert all((one.get() == 7).all() for both in arrays.values() for one in both)
