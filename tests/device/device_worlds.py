"""Worlds whose ranks have devices of a ``FakeCluster``, and communicators that move numpy arrays over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator, engine_of
from asyncpar.collectives.device.host import DeviceHost, use_fabric
from asyncpar.core.config.names import Name, ReduceOp
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric


@asynccontextmanager
async def device_world(
    size: int,
    *,
    cluster: FakeCluster | None = None,
    fabrics: Sequence[FakeFabric | None] | None = None,
    hosts: Sequence[str] | None = None,
    transport: str | None = "inproc",
    pin: str | None = None,
) -> AsyncIterator[tuple[Node, ...]]:
    """Yield the nodes of a world like ``local_world``, each with a device of its own.

    ``fabrics`` are those of the ranks; with None a rank has no NCCL.  At the end nothing may be left on the devices:
    streams, events and communicators are freed, and no work has touched freed memory.
    """
    cluster = cluster or FakeCluster()
    made = fabrics or [FakeFabric(cluster, visible=[rank]) for rank in range(size)]
    async with local_world(size, hosts=hosts, transport=transport, pin=pin) as nodes:
        for node, fabric in zip(nodes, made, strict=True):
            table = engine_of(node.world).table
            if fabric is None:
                table.devices = DeviceHost(table, None, "there is no driver")
            else:
                use_fabric(table, fabric)
        yield nodes
    await quiet(cluster, [fabric for fabric in made if fabric is not None])
    assert cluster.faults == []


async def quiet(cluster: FakeCluster, fabrics: Iterable[FakeFabric]) -> None:
    """Wait until threads have freed everything on the devices; fail if they do not."""
    left: tuple[Any, ...] = ()
    for _ in range(1000):
        left = cluster.streams, cluster.events, [len(fabric.cluster_communicators) for fabric in fabrics]
        if not any((*left[:2], *left[2])):
            return
        cluster.tick()
        await asyncio.sleep(0.001)
    raise AssertionError(f"left on the devices: {left[0]} streams, {left[1]} events, communicators {left[2]}")


class OnDevices:
    """A communicator that copies numpy arrays to a device, moves them from there, and copies results back.

    So suites of numpy arrays test the operations of device arrays.  Arrays that are not numeric, which must be refused,
    are passed on unchanged.
    """

    def __init__(self, communicator: Communicator, cluster: FakeCluster, device: int = 0) -> None:
        self._communicator, self._cluster, self._device = communicator, cluster, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    @property
    def rank(self) -> int:
        return self._communicator.rank

    def algorithms(self, operation: str) -> tuple[Name, ...]:
        """Return the algorithms for device arrays; a barrier has none of them."""
        return self._communicator.algorithms(operation) if operation == "barrier" else (Name("nccl"), Name("staged"))

    def subgroup(self, ranks: Iterable[int], **options: Any) -> OnDevices | None:
        made = self._communicator.subgroup(ranks, **options)
        return None if made is None else type(self)(made, self._cluster, self._device)

    async def split(self, color: int | None, key: int = 0, **options: Any) -> OnDevices | None:
        made = await self._communicator.split(color, key, **options)
        return None if made is None else type(self)(made, self._cluster, self._device)

    def all_reduce(self, x: Any, op: ReduceOp = "sum", *, out: Any = None, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._call(self._communicator.all_reduce, x, op, out=out, **options)

    def all_reduce_many(self, arrays: Iterable[Any], op: ReduceOp = "sum", **options: Any) -> Coroutine[Any, Any, Any]:
        given = list(arrays)
        staged = [self._staged(array) for array in given]
        call = self._communicator.all_reduce_many(staged, op, **options)

        async def back() -> list[Any]:
            return [self._fetched(found, array) for found, array in zip(await call, given, strict=True)]

        return back()

    def reduce(self, x: Any, op: ReduceOp = "sum", *, out: Any = None, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._call(self._communicator.reduce, x, op, out=out, fresh=True, **options)

    def reduce_scatter(
        self, x: Any, op: ReduceOp = "sum", *, out: Any = None, **options: Any
    ) -> Coroutine[Any, Any, Any]:
        return self._call(self._communicator.reduce_scatter, x, op, out=out, fresh=True, **options)

    def all_gather(self, x: Any, *, out: Any = None, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._call(self._communicator.all_gather, x, out=out, fresh=True, **options)

    def all_gather_v(self, x: Any, *, out: Any = None, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._call(self._communicator.all_gather_v, x, out=out, fresh=True, **_host_free(options))

    def gather(self, x: Any, *, out: Any = None, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._call(self._communicator.gather, x, out=out, fresh=True, **options)

    def scatter(self, x: Any = None, *, out: Any = None, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._call(self._communicator.scatter, x, out=out, fresh=True, **options)

    def broadcast(self, x: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._call(self._communicator.broadcast, x, **options)

    def all_to_all(self, x: Any, *, out: Any = None, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._call(self._communicator.all_to_all, x, out=out, fresh=True, **options)

    def all_to_all_v(self, x: Any, counts: Any, *, out: Any = None, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._call(self._communicator.all_to_all_v, x, counts, out=out, fresh=True, **options)

    def _staged(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind == "O":
            return value
        return FakeDeviceArray.of(self._cluster, value, self._device)

    def _fetched(self, found: Any, into: Array | None) -> Any:
        """Return a device array as a numpy array, in ``into`` if given, and other results unchanged."""
        values = self._on_host(found)
        if values is None:
            return found
        if into is None:
            return values
        into[...] = values
        return into

    def _on_host(self, found: Any) -> Array | None:
        """Return the values of an array on a device; None for anything else."""
        return found.get() if isinstance(found, FakeDeviceArray) else None

    def _call(
        self, start: Any, x: Any, *arguments: Any, out: Any = None, fresh: bool = False, **options: Any
    ) -> Coroutine[Any, Any, Any]:
        """Call ``start`` on copies; the result is returned in ``out``, else in ``x`` unless it is a ``fresh`` one."""
        if out is not None:
            options["out"] = self._staged(out)
        call = start(self._staged(x), *arguments, **options)
        into = out if out is not None else (None if fresh else x)

        async def back() -> Any:
            found = await call
            if isinstance(found, tuple):
                return self._fetched(found[0], into), *found[1:]
            return self._fetched(found, into)

        return back()


def _host_free(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` without the name of a host algorithm."""
    return {name: value for name, value in options.items() if name != "algorithm" or value in ("nccl", "staged", None)}
