"""Whatever is wrong with devices or arrays: a typed error on every rank, with the rank and what to do, in time.

The groups are those of ``init_process_group("nccl")``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest

from asyncpar.backends import BackendConfig, BackendUnavailable, CommunicationRuntime, existing
from asyncpar.backends.compression import CompressionAlgorithm
from asyncpar.backends.nccl import nccl_over
from asyncpar.collectives.device.host import DeviceHost
from asyncpar.device.fabric import DeviceError
from asyncpar.errors import OperationMismatch, PeerCancelled, PeerTimeout, UsageError
from asyncpar.node import Node
from asyncpar.parallel import init_process_group
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric

SIZE = 2
DEADLINE = 10.0
"""Seconds within which every rank has its error; ``TIMEOUT`` is what the group allows an operation."""
TIMEOUT = 0.5

Groups: TypeAlias = Sequence[Any]


async def opened(node: Node, **settings: Any) -> tuple[CommunicationRuntime, Any]:
    """Open the backend over the world of ``node``, instead of over one that was launched."""
    runtime = CommunicationRuntime()
    runtime.register_backend("nccl", nccl_over(existing(node.world)))
    return await init_process_group("nccl", runtime=runtime, config=BackendConfig(**settings))


async def outcomes(*calls: Any) -> list[Any]:
    async with asyncio.timeout(DEADLINE):
        return list(await asyncio.gather(*calls, return_exceptions=True))


@asynccontextmanager
async def nccl_groups(
    cluster: FakeCluster, fabrics: Sequence[FakeFabric] | None = None, **settings: Any
) -> AsyncIterator[Groups]:
    """Yield the groups of all ranks, untyped as their operations are annotated for numpy arrays."""
    async with device_world(SIZE, cluster=cluster, fabrics=fabrics) as nodes:
        found = await outcomes(*(opened(node, **{"timeout": TIMEOUT} | settings) for node in nodes))
        assert not any(isinstance(one, BaseException) for one in found), found
        yield [group for _, group in found]
        for runtime, _ in found:
            await runtime.finalize()


# -- opening -----------------------------------------------------------------------------------------------------------

MISSING = {
    "driver": ("nccl: this host has no NVIDIA driver", "this host has no NVIDIA driver"),
    "library": (
        'nccl: needs nccl4py; install it with: pip install "asyncpar[nccl]"',
        r"pip install \"asyncpar\[nccl\]\"",
    ),
    "version": ("nccl: expected NCCL 2.29.0 or later, got 2.27.5; install a later one", "install a later one"),
    "devices": ("nccl: this process sees no CUDA device", "sees no CUDA device"),
}


@pytest.mark.parametrize("what", MISSING)
@pytest.mark.parametrize("lacking", [(0,), (1,), (0, 1)])
async def test_a_rank_without_nccl_is_named_on_all_ranks_when_the_group_is_opened(
    what: str, lacking: tuple[int, ...]
) -> None:
    reason, remedy = MISSING[what]
    async with device_world(SIZE) as nodes:
        for rank in lacking:
            table = nodes[rank].world._engine.table  # noqa: SLF001  # what a rank has is found when it is first asked for
            table.devices = DeviceHost(table, None, reason)
        for error in await outcomes(*(opened(node) for node in nodes)):
            assert isinstance(error, BackendUnavailable)
            assert re.search(rf"rank {lacking[0]} has no NCCL: .*{remedy}.*without NCCL use native", str(error))


async def test_ranks_with_different_versions_are_named_when_the_group_is_opened() -> None:
    cluster = FakeCluster()
    two = [FakeFabric(cluster, visible=[rank], version=version) for rank, version in enumerate((23004, 22902))]
    async with device_world(SIZE, cluster=cluster, fabrics=two) as nodes:
        for error in await outcomes(*(opened(node) for node in nodes)):
            assert isinstance(error, BackendUnavailable)
            assert re.search(r"rank 0 has NCCL 2\.30\.4 and rank 1 has 2\.29\.2; install the same", str(error))


async def test_a_rank_that_does_not_open_is_named_in_time() -> None:
    async with device_world(SIZE) as nodes:
        [error] = await outcomes(opened(nodes[0], timeout=0.3))
        assert isinstance(error, PeerTimeout)
        assert error.rank == 1


# -- operations --------------------------------------------------------------------------------------------------------


class Ranks:
    """The groups of a test, with good arrays and bad ones."""

    def __init__(self, groups: Groups, cluster: FakeCluster) -> None:
        self.groups = groups
        self.comms = [group.communicator for group in groups]
        self.cluster = cluster
        self.stream = cluster.create_stream(1)

    def good(self, count: int = 4, dtype: Any = np.float32, device: int = 0) -> FakeDeviceArray:
        return FakeDeviceArray.of(self.cluster, np.ones(count, dtype), device)

    def strided(self) -> FakeDeviceArray:
        array = self.good()
        array.strides = (8,)
        return array

    def fixed(self) -> FakeDeviceArray:
        array = self.good()
        array.is_writable = False
        return array

    def of_other_stream(self) -> FakeDeviceArray:
        array = self.good()
        array.stream = self.stream
        return array


Expected: TypeAlias = tuple[type[Any], str]


@dataclass(frozen=True)
class BadInput:
    """What the ranks do, and what each of them gets."""

    first: Callable[[Ranks], Any]
    expected: Expected
    second: Callable[[Ranks], Any] = lambda ranks: ranks.comms[1].all_reduce(ranks.good())
    reported: Expected = (PeerCancelled, "rank 0")


def mismatch(first: Callable[[Ranks], Any], second: Callable[[Ranks], Any], text: str) -> BadInput:
    expected = (OperationMismatch, rf"(?s)rank 0 calls.*rank 1 calls.*{text}|{text}")
    return BadInput(first, expected, second, expected)


def refused(first: Callable[[Ranks], Any], text: str) -> BadInput:
    return BadInput(first, (UsageError, rf"rank 0: .*{text}"), reported=(PeerCancelled, rf"rank 0.*{text}"))


CASES = {
    "mixed devices in a call": refused(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good(), out=ranks.good(device=1)),
        "expected arrays on one device, got arrays on cuda:0, cuda:1; copy them to one",
    ),
    "mixed devices in a bundle": refused(
        lambda ranks: ranks.comms[0].all_reduce_many([ranks.good(), ranks.good(device=1)]), "copy them to one"
    ),
    "host and device": mismatch(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good()),
        lambda ranks: ranks.comms[1].all_reduce(np.ones(4, np.float32)),
        "pass device arrays on all ranks, or on none",
    ),
    "out on the host": refused(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good(), out=np.ones(4, np.float32)),
        "on the host; pass device arrays on all ranks or on none",
    ),
    "not contiguous": refused(lambda ranks: ranks.comms[0].all_reduce(ranks.strided()), "pass a contiguous copy"),
    "read-only": refused(lambda ranks: ranks.comms[0].all_reduce(ranks.fixed()), "read-only one; pass a copy"),
    "a stream of another device": refused(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good(), stream=ranks.stream), "pass a stream of cuda:0"
    ),
    "its own stream of another device": refused(
        lambda ranks: ranks.comms[0].all_reduce(ranks.of_other_stream()), "make a stream of cuda:0 the current one"
    ),
    "no stream": refused(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good(), stream="main"), "expected a CUDA stream"
    ),
    "a destroyed stream": BadInput(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good(), stream=77), (DeviceError, "77 is no stream")
    ),
    "a stream for a numpy array": refused(
        lambda ranks: ranks.comms[0].all_reduce(np.ones(4), stream=ranks.stream),
        "pass device arrays on all ranks or on",
    ),
    "shapes": mismatch(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good(4)),
        lambda ranks: ranks.comms[1].all_reduce(ranks.good(5)),
        "float32",
    ),
    "dtypes": mismatch(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good()),
        lambda ranks: ranks.comms[1].all_reduce(ranks.good(dtype=np.int32)),
        "int32",
    ),
    "operations": mismatch(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good()),
        lambda ranks: ranks.comms[1].all_gather(ranks.good()),
        "all_gather",
    ),
    "reductions": mismatch(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good()),
        lambda ranks: ranks.comms[1].all_reduce(ranks.good(), "max"),
        "max",
    ),
    "roots": mismatch(
        lambda ranks: ranks.comms[0].broadcast(ranks.good(), root=0),
        lambda ranks: ranks.comms[1].broadcast(ranks.good(), root=1),
        "root=1",
    ),
    "dtypes that NCCL lacks, where it is wanted": refused(
        lambda ranks: ranks.comms[0].all_reduce(ranks.good(dtype=np.int16), algorithm="nccl"),
        "leave the algorithm to asyncpar",
    ),
    "a message of another shape": BadInput(
        lambda ranks: ranks.comms[0].recv(1, out=ranks.good(5)),
        (OperationMismatch, "rank 1 sends"),
        lambda ranks: ranks.comms[1].send(ranks.good(4), 0),
        (type(None), ""),
    ),
}


def check(outcome: Any, expected: Expected) -> None:
    kind, text = expected
    assert isinstance(outcome, kind), repr(outcome)
    assert re.search(text, str(outcome)), str(outcome)


async def begun(call: Callable[[Ranks], Any], ranks: Ranks) -> Any:
    """Make a call that may be refused before it can be awaited."""
    return await call(ranks)


@pytest.mark.parametrize("name", CASES)
async def test_bad_input_is_an_error_on_every_rank_and_the_group_goes_on(name: str) -> None:
    case = CASES[name]
    cluster = FakeCluster(seed=len(name))
    fabrics = [FakeFabric(cluster, visible=[2 * rank, 2 * rank + 1]) for rank in range(SIZE)]
    async with nccl_groups(cluster, fabrics) as groups:
        ranks = Ranks(groups, cluster)
        for is_warm in (False, True):
            if is_warm:
                await outcomes(*(comm.all_reduce(ranks.good()) for comm in ranks.comms))
            first, second = await outcomes(begun(case.first, ranks), begun(case.second, ranks))
            check(first, case.expected)
            check(second, case.reported)
        found = await outcomes(*(comm.all_reduce(ranks.good()) for comm in ranks.comms))
        assert [one.get().tolist() for one in found] == [[2.0] * 4] * SIZE
        cluster.destroy_stream(ranks.stream)


async def test_two_ranks_on_one_gpu_learn_of_the_variable() -> None:
    cluster = FakeCluster()
    async with nccl_groups(cluster, [FakeFabric(cluster, visible=[3]) for _ in range(SIZE)]) as groups:
        ranks = Ranks(groups, cluster)
        for error in await outcomes(*(comm.all_reduce(ranks.good()) for comm in ranks.comms)):
            assert isinstance(error, UsageError)
            assert "ranks 0 and 1 use the same GPU" in str(error)
            assert "NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks" in str(error)
        cluster.destroy_stream(ranks.stream)


async def test_compression_of_the_backend_refuses_device_arrays_and_says_what_to_use() -> None:
    cluster = FakeCluster()
    compression = CompressionAlgorithm.quantization(8)
    async with nccl_groups(cluster, compression=compression) as groups:
        ranks = Ranks(groups, cluster)

        async def call(group: Any) -> Any:
            return await group.run("all_reduce", ranks.good())

        for error in await outcomes(*(call(group) for group in groups)):
            assert isinstance(error, UsageError | PeerCancelled)
            assert "GradientSynchronizer" in str(error)
        cluster.destroy_stream(ranks.stream)


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_gather", "all_to_all"])
async def test_arrays_that_their_owner_drops_while_in_flight_are_lent_until_it_is_over(operation: str) -> None:
    cluster = FakeCluster(seed=3, longest_delay=200)
    async with nccl_groups(cluster, timeout=30.0) as groups:
        calls = []
        for group in groups:
            array = FakeDeviceArray.of(cluster, np.full(SIZE, group.rank + 1, np.float32))
            calls.append(asyncio.ensure_future(group.run(operation, array)))
            del array
        found = await outcomes(*calls)
        assert not any(isinstance(one, BaseException) for one in found), found
        expected = {"all_reduce": [3, 3], "broadcast": [1, 1], "all_to_all": [1, 2]}.get(operation)
        assert expected is None or found[1].value.get().tolist() == expected
        assert cluster.faults == []


async def test_a_group_goes_on_from_one_device_to_another() -> None:
    cluster = FakeCluster()
    fabrics = [FakeFabric(cluster, visible=[2 * rank, 2 * rank + 1]) for rank in range(SIZE)]
    async with nccl_groups(cluster, fabrics) as groups:
        ranks = Ranks(groups, cluster)
        for devices in ((0, 0), (1, 1), (0, 1)):
            found = await outcomes(
                *(comm.all_reduce(ranks.good(device=on)) for comm, on in zip(ranks.comms, devices, strict=True))
            )
            assert [one.get().tolist() for one in found] == [[2.0] * 4] * SIZE
        cluster.destroy_stream(ranks.stream)
