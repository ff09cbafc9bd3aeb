"""Collectives and messages of many groups at once, in random order, cancelled at random: all end, and nothing leaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from asyncpar.device.fabric import DeviceError, NcclResult
from asyncpar.errors import OperationMismatch, PeerCancelled, PeerError
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric
from tests.soak import chosen

FOUND = (339, 745, 1130, 2212, 2553, 2701, 2937, 2972)
"""Seeds that have found something: copies into freed memory, ranks that disagreed about a route, and ranks that waited
for the first one though it was through, as a rank had left."""

SEEDS = sorted({*range(chosen(4, soak=2000)), *FOUND})
"""Two thousand take ten minutes."""

LIMIT = 60.0
"""Seconds in which all must have ended: a group's deadline would come later."""

LARGE = 17_000
"""Elements of a message that goes by NCCL."""


@dataclass
class Case:
    """One operation of a group: its calls by place, and what each of their arrays holds if it ends well."""

    calls: list[Coroutine[Any, Any, Any]]
    arrays: list[tuple[Any, Any]] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    is_message: bool = False


class Schedule:
    """A random program for the ranks of a world."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice([2, 3, 4])
        self.cluster = FakeCluster(seed=seed, longest_delay=self.random.choice([0, 3, 30]))
        self.hosts = self.random.choice([None, [str(place % 2) for place in range(self.size)]])
        self.transport = "inproc" if self.hosts else self.random.choice(["inproc", "shm"])
        self.missing = self.random.choice([None, None, self.random.randrange(self.size)])
        self.fabrics = [self._fabric(place) for place in range(self.size)]

    def _fabric(self, place: int) -> FakeFabric | None:
        if place == self.missing:
            return None
        cut_off = self.random.choice(["", "", "", "fail"]) if self.hosts else ""
        host = self.hosts[place] if self.hosts else "localhost"
        return FakeFabric(self.cluster, visible=[place], host=host, cut_off=cut_off)

    def broken(self) -> list[Any]:
        """Return the communicators of NCCL that have failed and that are not freed: nothing has found them out yet."""
        return [one for one in self.communicators() if one.get_async_error() is NcclResult.INTERNAL_ERROR]

    def communicators(self) -> list[Any]:
        """Return those that are not freed, in an order that does not depend on addresses."""
        found = [one for fabric in self.fabrics if fabric is not None for one in fabric.cluster_communicators]
        return sorted(found, key=lambda one: one.number)

    def full(self, value: float, count: int = 6) -> Any:
        return FakeDeviceArray.of(self.cluster, np.full(count, value, np.float32))

    def collective(self, comms: list[Any]) -> Case:
        """Return a collective of ``comms``, the communicators of one group."""
        size, name = len(comms), self.random.choice(["all_reduce", "broadcast", "all_gather", "all_to_all_v"])
        count = self.random.choice([1, 6, 3000])
        given = [self.full(place + 1.0, count) for place in range(size)]
        if name == "all_reduce":
            total = sum(range(1, size + 1))
            return Case([comm.all_reduce(x) for comm, x in zip(comms, given, strict=True)], [(x, total) for x in given])
        if name == "broadcast":
            root = self.random.randrange(size)
            calls = [comm.broadcast(x, root=root) for comm, x in zip(comms, given, strict=True)]
            return Case(calls, [(x, root + 1.0) for x in given])
        if name == "all_gather":
            outs = [FakeDeviceArray(self.cluster, (size, count), np.dtype(np.float32)) for _ in range(size)]
            calls = [comm.all_gather(x, out=out) for comm, x, out in zip(comms, given, outs, strict=True)]
            rows = np.arange(1, size + 1)[:, None]
            return Case(calls, [(out, np.broadcast_to(rows, (size, count))) for out in outs])
        counts = [count, *[0] * (size - 1)]
        return Case([comm.all_to_all_v(x, counts) for comm, x in zip(comms, given, strict=True)])

    def message(self, comms: list[Any]) -> Case:
        """Return a message between two of ``comms``."""
        source, dest = self.random.sample(range(len(comms)), 2)
        count, tag = self.random.choice([5, LARGE, 3 * LARGE]), self.random.randrange(2)
        value = float(self.random.randrange(100))
        x, out = self.full(value, count), self.full(-1.0, count)
        if self.random.random() < 0.2:  # what has another size might get it
            tag = 7 + count
        return Case(
            [comms[source].send(x, dest, tag=tag), comms[dest].recv(source, out=out, tag=tag)],
            [(out, None)],
            is_message=True,
        )


@pytest.mark.parametrize("seed", SEEDS)
async def test_all_ends_and_groups_work_again(seed: int) -> None:
    plan = Schedule(seed)
    choose = plan.random
    async with device_world(
        plan.size, cluster=plan.cluster, fabrics=plan.fabrics, hosts=plan.hosts, transport=plan.transport
    ) as nodes:
        world: list[Any] = [node.world for node in nodes]
        groups = [world]
        if plan.size > 2:
            groups.append([comm.subgroup([0, 2]) for place, comm in enumerate(world) if place in (0, 2)])
        cases: list[Case] = []
        for _ in range(choose.randrange(4, 16)):
            comms = choose.choice(groups)
            case = plan.collective(comms) if choose.random() < 0.6 else plan.message(comms)
            case.tasks = [asyncio.ensure_future(call) for call in case.calls]
            cases.append(case)
            for _ in range(choose.choice([0, 0, 1, 5, 40])):
                await asyncio.sleep(0)
            if choose.random() < 0.3:
                choose.choice(choose.choice(cases).tasks).cancel()
            if choose.random() < 0.05:
                break_one(plan)
        await ended(cases, world)
        for case in cases:
            check(case)
        del cases, case
        for comms in groups:
            for _ in range(6):
                before = len(plan.broken())
                case = plan.collective(comms)
                case.tasks = [asyncio.ensure_future(call) for call in case.calls]
                _, pending = await asyncio.wait(case.tasks, timeout=LIMIT)
                assert not pending, [comm.describe_waits() for comm in comms]
                check(case)
                is_well = all(task.exception() is None for task in case.tasks)
                assert is_well or len(plan.broken()) < before, case.tasks  # it has found one of them out


@pytest.mark.parametrize("seed", SEEDS)
async def test_all_ends_when_a_rank_stops(seed: int) -> None:
    """Also on the rank itself, where all that is under way fails with one error that has the frames of all."""
    plan = Schedule(seed)
    choose = plan.random
    async with device_world(
        plan.size, cluster=plan.cluster, fabrics=plan.fabrics, hosts=plan.hosts, transport=plan.transport
    ) as nodes:
        world: list[Any] = [node.world for node in nodes]
        cases: list[Case] = []
        for _ in range(choose.randrange(3, 12)):
            case = plan.collective(world) if choose.random() < 0.6 else plan.message(world)
            case.tasks = [asyncio.ensure_future(call) for call in case.calls]
            cases.append(case)
            for _ in range(choose.choice([0, 0, 1, 5, 40])):
                await asyncio.sleep(0)
            if choose.random() < 0.2:
                choose.choice(choose.choice(cases).tasks).cancel()
        await choose.choice(nodes).stop()
        await ended(cases, world)
        for task in [task for case in cases for task in case.tasks]:
            error = None if task.cancelled() else task.exception()
            assert error is None or isinstance(error, PeerError | OperationMismatch | DeviceError), error


def break_one(plan: Schedule) -> None:
    """Let a communicator of NCCL fail."""
    found = plan.communicators()
    if found:
        plan.random.choice(found).fail_later(NcclResult.INTERNAL_ERROR)


async def ended(cases: list[Case], world: list[Any]) -> None:
    """Wait for all; a message that waits for one that was cancelled before it had a number is cancelled, too."""
    tasks = [task for case in cases for task in case.tasks]
    await asyncio.wait(tasks, timeout=0.2)
    collectives = [task for case in cases if not case.is_message for task in case.tasks]
    if collectives:
        await asyncio.wait(collectives, timeout=LIMIT)
    waits = [comm.describe_waits() for comm in world]
    assert all(task.done() for task in collectives), waits
    for case in cases:
        for task in case.tasks:
            task.cancel()
    await asyncio.wait(tasks, timeout=LIMIT)
    assert all(task.done() for task in tasks), waits


def check(case: Case) -> None:
    """Check what those that ended well have, and the errors of the others."""
    for task in case.tasks:
        if not task.cancelled():
            error = task.exception()
            assert error is None or isinstance(error, PeerCancelled | OperationMismatch | DeviceError), error
    if all(not task.cancelled() and task.exception() is None for task in case.tasks):
        for array, value in case.arrays:
            if value is not None:
                np.testing.assert_array_equal(array.get(), value)
            else:
                assert (array.get() == array.get()[0]).all()
