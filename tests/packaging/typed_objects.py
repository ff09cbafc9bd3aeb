"""Assertions about types of results: mypy reads them in ``scripts/check``, pyright in a test.  They are never run."""

from __future__ import annotations

import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, assert_type

import numpy as np
from numpy.typing import NDArray

import asyncpar as ap
import asyncpar.blocking
from asyncpar.backends import CompressionAlgorithm
from asyncpar.blocking.pending import Pending
from asyncpar.codecs import TopK
from asyncpar.elasticity.job import ElasticJob
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.nn import Parameter
from asyncpar.zero import ZeROConfig

Array: TypeAlias = NDArray[Any]


@dataclass
class Settings:
    """A value that ranks send."""

    rate: float


class Store(ap.Actor):
    """An actor whose references are typed by its class."""

    @ap.endpoint
    async def swap(self, settings: Settings) -> Settings:
        return settings

    @ap.endpoint
    async def each(self) -> AsyncIterator[Settings]:
        yield Settings(0.1)


async def of_asks(node: ap.Node, settings: Settings) -> None:
    store = node.ref("store", rank=1, actor_class=Store)
    assert_type(await store.swap(settings), Settings)
    assert_type(await (await node.spawn(Store)).swap(settings), Settings)
    async for item in store.each.stream():
        assert_type(item, Settings)


async def of_coroutines(comm: ap.Communicator, settings: Settings) -> None:
    assert_type(await comm.broadcast_object(settings, wanted=Settings), Settings)
    assert_type(await comm.all_gather_object(settings, wanted=Settings), list[Settings])
    assert_type(await comm.gather_object(settings, root=1, wanted=Settings), list[Settings] | None)
    assert_type(await comm.scatter_object([settings], key="k", wanted=Settings), Settings)
    assert_type(await comm.recv_object(0, tag=3, wanted=Settings), Settings)
    assert_type(await comm.broadcast_object({"a": [1]}, wanted=dict[str, list[int]]), dict[str, list[int]])
    assert_type(await comm.broadcast_object(), Any)
    assert_type(await comm.all_gather_object(1, wanted=int | None), list[Any])


async def of_arrays(comm: ap.Communicator, x: NDArray[np.float32], until: Literal["all"] | ap.Deadline) -> None:
    assert_type(await comm.all_reduce(x, "mean"), NDArray[np.float32])
    assert_type(await comm.all_reduce(x, until=ap.Deadline(1.0)), ap.Reduced)
    assert_type(await comm.all_reduce(x, until=until), NDArray[np.float32] | ap.Reduced)
    assert_type(await comm.reduce(x, "max", root=1), NDArray[np.float32] | None)
    assert_type(await comm.all_gather(x), NDArray[np.float32])
    assert_type(await comm.recv(0), Array)
    assert_type(await comm.recv(0, out=x), Array)
    assert_type(await comm.all_reduce_many([x, np.ones(3)]), list[Array])
    assert_type(await comm.all_gather(array.array("d", [1.0])), array.array[float])
    assert_type(await comm.broadcast(memoryview(b"abc")), memoryview)


async def of_names(comm: ap.Communicator, x: NDArray[np.float32], read: str) -> None:
    await comm.all_reduce(x, "summ")  # type: ignore[call-overload]  # pyright: ignore
    await comm.reduce_scatter(x, "average")  # type: ignore[arg-type]  # pyright: ignore
    await comm.reduce(x, read)  # type: ignore[arg-type]  # pyright: ignore
    await comm.reduce(x, ap.Name(read))
    async with ap.init(transport="rdma"):  # type: ignore[arg-type]  # pyright: ignore
        pass
    async with ap.init(transport=ap.Name("my_lanes.ring:KIND")) as node:
        assert_type(node, ap.Node)


async def of_algorithms(comm: ap.Communicator, x: NDArray[np.float32], read: str) -> None:
    await comm.all_reduce(x, algorithm="rign")  # type: ignore[call-overload]  # pyright: ignore
    await comm.all_reduce(x, algorithm=read)  # type: ignore[call-overload]  # pyright: ignore
    await comm.all_gather(x, algorithm="tree")  # type: ignore[arg-type]  # pyright: ignore
    await comm.barrier(algorithm="ring")  # type: ignore[arg-type]  # pyright: ignore
    comm.predict("all_reduce", 8, algorithm="rign")  # type: ignore[arg-type]  # pyright: ignore
    ZeROConfig(algorithm="rign")  # type: ignore[arg-type]  # pyright: ignore
    await comm.all_reduce(x, algorithm="ring")
    await comm.all_reduce(x, algorithm="ring/256k")
    await comm.all_reduce(x, algorithm=ap.Name("ring/128k"))
    for algorithm in comm.algorithms("all_gather"):
        await comm.all_gather(x, algorithm=algorithm)


def of_codecs(job: ElasticJob, parameters: list[Parameter], read: str) -> None:
    GradientCompressionConfig(codec="int9")  # type: ignore[arg-type]  # pyright: ignore
    GradientCompressionConfig(codec=read)  # type: ignore[arg-type]  # pyright: ignore
    CompressionAlgorithm.custom("topk")  # type: ignore[arg-type]  # pyright: ignore
    job.state(parameters, codec="auto")  # type: ignore[arg-type]  # pyright: ignore
    job.state(parameters, codec="int8", residual_codec="bf61")  # type: ignore[arg-type]  # pyright: ignore
    GradientCompressionConfig(codec="auto")
    GradientCompressionConfig(codec="topk:0.01+int8")
    GradientCompressionConfig(codec=TopK(0.02))
    GradientCompressionConfig(codec=ap.Name("topk:0.02"))
    job.state(parameters, codec="topk:0.01", residual_codec="bf16")


def of_blocking_programs(comm: asyncpar.blocking.Communicator, settings: Settings) -> None:
    assert_type(comm.broadcast_object(settings, wanted=Settings), Settings)
    assert_type(comm.all_gather_object(settings, wanted=Settings, timeout=9), list[Settings])
    assert_type(comm.gather_object(settings, wanted=Settings), list[Settings] | None)
    assert_type(comm.scatter_object([settings], wanted=Settings), Settings)
    assert_type(comm.recv_object(wanted=Settings), Settings)
    assert_type(comm.broadcast_object(), Any)
    assert_type(comm.start.broadcast_object(settings, wanted=Settings), Pending[Settings])
    assert_type(comm.start.all_gather_object(settings, wanted=Settings).wait(), list[Settings])
    assert_type(comm.start.broadcast_object({}), Pending[Any])
    comm.broadcast(np.ones(2), algorithm="chian")  # type: ignore[arg-type]  # pyright: ignore
    comm.start.reduce(np.ones(2), algorithm="ring")  # type: ignore[arg-type]  # pyright: ignore
