"""The registry of backends and the runtime over them, with ranks of this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from asyncpar.backends import (
    BackendConfig,
    BackendNotRegistered,
    BackendUnavailable,
    CollectiveOp,
    CollectiveResult,
    CommunicationBackend,
    CommunicationRuntime,
    GroupNotFound,
    NoGroup,
    ThreadBackend,
    existing,
)
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import OperationMismatch, PeerTimeout, UsageError
from asyncpar.testing import local_world
from tests.backends.worlds import on_all, open_runtimes
from tests.device.nccl_stand_in import given


async def test_all_backends_of_the_enum_are_registered() -> None:
    assert set(CommunicationRuntime().backends) == {str(backend) for backend in CommunicationBackend}


async def test_the_native_backend_alone_is_a_world_of_one() -> None:
    async with CommunicationRuntime() as runtime:
        group = await runtime.initialize()
        assert (group.name, group.backend, group.rank, group.size) == ("world", "native", 0, 1)
        assert group.communicator.timeout == 30.0


async def test_a_place_that_the_native_backend_was_not_launched_at_is_refused() -> None:
    async with CommunicationRuntime() as runtime:
        with pytest.raises(UsageError, match="world_size: expected 1, which is what the native backend was started"):
            await runtime.initialize("native", BackendConfig(rank=0, world_size=2))
        assert (await runtime.initialize("native", BackendConfig(rank=0, world_size=1))).size == 1


async def test_an_unknown_backend_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(BackendNotRegistered, match="expected one of gloo, mpi, native, nccl, thread, got 'smoke'"):
        await CommunicationRuntime().initialize("smoke")


async def test_nccl_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    with pytest.raises(BackendUnavailable, match=r'nccl4py, which .*"asyncpar\[nccl\]"; without NCCL use native'):
        await CommunicationRuntime().initialize(CommunicationBackend.NCCL)


async def test_nccl_opens_a_world_where_its_libraries_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    async with CommunicationRuntime() as runtime:
        group = await runtime.initialize(CommunicationBackend.NCCL)
        assert (group.backend, group.size) == ("nccl", 1)
        assert (await group.communicator.all_reduce(np.ones(3))).tolist() == [1.0, 1.0, 1.0]


async def test_nccl_has_no_use_for_a_rendezvous() -> None:
    with pytest.raises(UsageError, match="rendezvous: the nccl backend has no use for it"):
        await CommunicationRuntime().initialize("nccl", BackendConfig(rendezvous="tcp://localhost:1"))


@pytest.mark.parametrize(("backend", "module"), [("mpi", "mpi4py"), ("gloo", "torch")])
async def test_a_backend_without_its_library_says_which_extra_to_install(
    backend: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(BackendUnavailable, match=rf'{backend} needs {module}.*pip install "asyncpar\[{backend}\]"'):
        await CommunicationRuntime().initialize(backend, BackendConfig(rank=0, world_size=1))


async def test_before_a_backend_is_open_there_is_no_group() -> None:
    runtime = CommunicationRuntime()
    for call in (runtime.get_group, lambda: runtime.create_group("a"), lambda: runtime.collective_op("barrier")):
        with pytest.raises(NoGroup, match="no backend is open"):
            call()


async def test_collective_op_does_each_operation() -> None:
    async def work(runtime: CommunicationRuntime) -> list[list[float]]:
        rank = runtime.get_group().rank
        x = np.arange(3.0) + rank

        async def run(op: CollectiveOp, x: np.ndarray | None, **more: object) -> list[float]:
            result: CollectiveResult = await runtime.collective_op(op, x, **more)  # type: ignore[arg-type]
            assert result.operation is op
            assert result.seconds > 0
            return [] if result.value is None else np.asarray(result.value).reshape(-1).tolist()

        return [
            await run(CollectiveOp.ALL_REDUCE, x.copy()),
            await run(CollectiveOp.ALL_REDUCE, x.copy(), reduction="average"),
            await run(CollectiveOp.ALL_REDUCE, x.copy(), reduction="max"),
            await run(CollectiveOp.ALL_REDUCE, x.copy(), reduction="product"),
            await run(CollectiveOp.REDUCE, x.copy(), reduction="min", root=1),
            await run(CollectiveOp.REDUCE_SCATTER, x.copy()),
            await run(CollectiveOp.ALL_GATHER, x[:1].copy()),
            await run(CollectiveOp.GATHER, x[:1].copy(), root=2),
            await run(CollectiveOp.SCATTER, np.eye(3) if rank == 0 else None, out=None if rank == 0 else np.empty(3)),
            await run(CollectiveOp.BROADCAST, x.copy(), root=2),
            await run(CollectiveOp.ALL_TO_ALL, x.copy()),
            await run(CollectiveOp.BARRIER, None),
        ]

    async with open_runtimes(3) as runtimes:
        results = await on_all(runtimes, work)
    assert results[1] == [
        [3, 6, 9],
        [1, 2, 3],
        [2, 3, 4],
        [0, 6, 24],
        [0, 1, 2],
        [6],
        [0, 1, 2],
        [],
        [0, 1, 0],
        [2, 3, 4],
        [1, 2, 3],
        [],
    ]
    assert [result[7] for result in results] == [[], [], [0, 1, 2]]


async def test_send_and_receive_are_operations_of_two_ranks() -> None:
    async def work(runtime: CommunicationRuntime) -> list[float]:
        rank, x = runtime.get_group().rank, np.arange(3.0)
        if rank == 0:
            sent = await runtime.collective_op(CollectiveOp.SEND, x, peer=2, tag=7)
            assert (sent.operation, sent.value) == (CollectiveOp.SEND, None)
            await runtime.collective_op("send", x + 1, peer=2)
        if rank != 2:
            return []
        tagged = await runtime.collective_op(CollectiveOp.RECV, peer=0, tag=7)
        out = np.empty(3)
        other = await runtime.collective_op("recv", out=out)
        assert other.value is out
        assert tagged.value is not None
        assert runtime.get_metrics().of("recv").errors == 0
        return [*tagged.value.tolist(), *out.tolist()]

    async with open_runtimes(3) as runtimes:
        assert await on_all(runtimes, work) == [[], [], [0, 1, 2, 1, 2, 3]]


@pytest.mark.parametrize(
    ("operation", "argument"),
    [
        ("all_reduce", {"root": 1}),
        ("all_gather", {"reduction": "max"}),
        ("broadcast", {"out": np.empty(2)}),
        ("broadcast", {"peer": 1}),
        ("send", {"key": "a", "peer": 1}),
        ("recv", {"x": np.empty(2)}),
        ("barrier", {"tag": 3}),
        ("barrier", {"x": np.empty(2)}),
    ],
)
async def test_arguments_that_an_operation_does_not_have_are_refused(
    operation: str, argument: dict[str, object]
) -> None:
    name = next(iter(argument))
    given = argument if operation in ("recv", "barrier") else {"x": np.ones(2), **argument}
    async with open_runtimes(2) as runtimes:
        with pytest.raises(UsageError, match=f"^{name}: {operation} has no use for it, got "):
            _ = runtimes[0].collective_op(operation, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operation", "x", "more", "message"),
    [
        ("send", np.ones(2), {}, r"peer: expected the rank of the group to send to, 0\.\.1, got None"),
        ("send", None, {"peer": 1}, "x: send expects an array, got None"),
        ("all_hands", np.ones(2), {}, "all_hands"),
        ("all_reduce", None, {}, "x: all_reduce expects an array, got None"),
        ("all_reduce", np.ones(2), {"reduction": "median"}, "median"),
        ("broadcast", np.ones(2), {"root": 7}, "root: expected a rank 0..1"),
        ("all_gather", [1.0], {}, "x: expected a numpy array, got list"),
    ],
)
async def test_wrong_arguments_of_collective_op_raise_at_once(
    operation: str, x: object, more: dict[str, object], message: str
) -> None:
    async with open_runtimes(2) as runtimes:
        with pytest.raises(UsageError, match=message):
            _ = runtimes[0].collective_op(operation, x, **more)  # type: ignore[arg-type]


async def test_operations_take_their_place_when_they_are_called() -> None:
    async def work(runtime: CommunicationRuntime) -> tuple[float, float]:
        first = runtime.collective_op("all_reduce", np.array([1.0]))
        second = runtime.collective_op("all_reduce", np.array([10.0]))
        later, sooner = (await second).value, (await first).value
        assert later is not None
        assert sooner is not None
        return float(sooner[0]), float(later[0])

    async with open_runtimes(2) as runtimes:
        assert await on_all(runtimes, work) == [(2.0, 20.0)] * 2


async def test_groups_are_real_subsets_and_only_their_members_have_them() -> None:
    async def work(runtime: CommunicationRuntime) -> float:
        rank = runtime.get_group().rank
        odd, even = runtime.create_group("odd", [1, 3]), runtime.create_group("even", [0, 2])
        mine = odd if rank % 2 else even
        assert mine is not None
        assert (mine.size, mine.ranks[mine.rank]) == (2, rank)
        assert runtime.get_group(mine.name) is mine
        with pytest.raises(GroupNotFound, match="this rank is not in"):
            runtime.get_group("even" if rank % 2 else "odd")
        result = await runtime.collective_op("all_reduce", np.array([float(rank)]), group=mine.name)
        assert result.value is not None
        assert result.group == mine.name
        return float(result.value[0])

    async with open_runtimes(4) as runtimes:
        assert await on_all(runtimes, work) == [2.0, 4.0, 2.0, 4.0]


async def test_a_group_within_a_group_is_numbered_as_that() -> None:
    async def work(runtime: CommunicationRuntime) -> tuple[int, ...] | None:
        runtime.create_group("high", [1, 2])
        if runtime.get_group().rank == 0:
            return None
        inner = runtime.create_group("last", [1], within="high")
        return None if inner is None else inner.ranks

    async with open_runtimes(3) as runtimes:
        assert await on_all(runtimes, work) == [None, None, (2,)]


async def test_algorithms_can_be_pinned_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCPAR_ALGORITHM", "all_reduce:0-inf@tree")
    async with open_runtimes(2) as runtimes:
        await on_all(runtimes, lambda runtime: runtime.collective_op("all_reduce", np.ones(3)))
        traffic = runtimes[0].get_group().communicator.traffic
    assert traffic.of("all_reduce", "tree").calls == 1


async def test_names_of_groups_are_used_once_and_unknown_ones_are_distinguished_from_absent_ones() -> None:
    async with open_runtimes(2) as runtimes:
        runtime = runtimes[0]
        runtime.create_group("pair")
        with pytest.raises(UsageError, match="group: 'pair' exists already"):
            runtime.create_group("pair")
        with pytest.raises(UsageError, match="name: expected a name of at least one character"):
            runtime.create_group("")
        with pytest.raises(GroupNotFound, match="expected one of world, pair, got 'trio'"):
            runtime.get_group("trio")
        with pytest.raises(UsageError, match="rank"):
            runtime.create_group("far", [0, 9])


async def test_metrics_are_what_the_communicators_counted() -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        group = runtime.get_group()
        for _ in range(3):
            await runtime.collective_op("all_reduce", np.ones(1000, np.float32))
        await group.communicator.all_gather(np.ones(10))
        metrics = runtime.get_metrics()
        traffic = group.communicator.traffic
        assert metrics.of("all_reduce").count == 3
        assert metrics.of("all_reduce").bytes == traffic.of("all_reduce").payload_bytes == 3 * 4000
        assert metrics.of("all_gather").bytes == 80
        assert metrics.total.count == 4
        assert metrics.total.seconds > 0
        assert metrics.of("all_reduce").avg_latency == metrics.of("all_reduce").seconds / 3
        assert metrics.of("broadcast").avg_latency == 0.0
        assert metrics.total.errors == 0

    async with open_runtimes(2) as runtimes:
        await on_all(runtimes, work)


async def test_metrics_count_errors_and_outlive_the_worlds() -> None:
    async def work(runtime: CommunicationRuntime) -> None:
        rank = runtime.get_group().rank
        with pytest.raises(OperationMismatch):
            await runtime.collective_op("all_reduce", np.ones(3 + rank))
        await runtime.collective_op("all_reduce", np.ones(3))

    async with open_runtimes(2) as runtimes:
        await on_all(runtimes, work)
        assert runtimes[0].get_metrics("world").of("all_reduce").errors == 1
        await on_all(runtimes, lambda runtime: runtime.finalize())
        entry = runtimes[0].get_metrics().of("all_reduce")
        assert (entry.count, entry.errors) == (1, 1)


async def test_finalize_ends_the_groups_is_idempotent_and_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    async with open_runtimes(2) as runtimes:
        await on_all(runtimes, lambda runtime: runtime.finalize())
        for runtime in runtimes:
            await runtime.finalize()
            with pytest.raises(NoGroup):
                _ = runtime.collective_op("barrier")
    assert asyncio.all_tasks() == before


async def test_two_backends_are_two_worlds_of_one_runtime() -> None:
    async with CommunicationRuntime() as runtime:
        first = await runtime.initialize("thread")
        second = await runtime.initialize("native")
        third = await runtime.initialize("mine") if "mine" in runtime.backends else None
        assert (first.name, second.name, third) == ("world", "native", None)
        assert runtime.get_group() is first
        assert runtime.groups == ("world", "native")
        with pytest.raises(UsageError, match="backend: 'native' is open already"):
            await runtime.initialize("native")
        with pytest.raises(UsageError, match="is open; finalize the runtime first"):
            runtime.register_backend("native", existing(first.communicator))


async def test_a_backend_of_the_users_own_is_opened_by_its_name_and_left_by_the_task_that_entered_it() -> None:
    seen: list[object] = []

    @asynccontextmanager
    async def mine(config: BackendConfig) -> AsyncIterator[Communicator]:
        async with asyncio.TaskGroup(), local_world(1) as nodes:
            seen.extend(["open", config.timeout, asyncio.current_task()])
            yield nodes[0].world
        seen.extend(["closed", asyncio.current_task()])

    runtime = CommunicationRuntime()
    runtime.register_backend("mine", mine)
    group = await asyncio.create_task(runtime.initialize("mine", BackendConfig(timeout=7.0)))
    assert (group.backend, group.communicator.timeout) == ("mine", 7.0)
    await asyncio.create_task(runtime.finalize())
    assert seen == ["open", 7.0, seen[2], "closed", seen[2]]


async def test_what_a_backend_raises_when_it_is_opened_or_closed_reaches_the_caller() -> None:
    @asynccontextmanager
    async def faulty(config: BackendConfig) -> AsyncIterator[Communicator]:
        if config.timeout == 1.0:
            raise OSError("no way in")
        async with local_world(1) as nodes:
            yield nodes[0].world
        raise OSError("no way out")

    runtime = CommunicationRuntime()
    runtime.register_backend("faulty", faulty)
    with pytest.raises(OSError, match="no way in"):
        await runtime.initialize("faulty", BackendConfig(timeout=1.0))
    assert runtime.groups == ()
    await runtime.initialize("faulty")
    with pytest.raises(OSError, match="no way out"):
        await runtime.finalize()
    await runtime.finalize()


async def test_what_cannot_be_a_backend_is_refused() -> None:
    runtime = CommunicationRuntime()
    with pytest.raises(UsageError, match="backend: expected a function that takes a BackendConfig"):
        runtime.register_backend("mine", 5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="name: expected a name"):
        runtime.register_backend("", existing)  # type: ignore[arg-type]


async def test_cancelling_initialize_takes_the_backend_down() -> None:
    meeting, runtime, before = ThreadBackend(2), CommunicationRuntime(), asyncio.all_tasks()
    runtime.register_backend("thread", meeting)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await runtime.initialize("thread")
    assert runtime.groups == ()
    assert asyncio.all_tasks() == before


async def test_existing_worlds_can_be_used_and_stay_open() -> None:
    async with local_world(2) as nodes:
        for node in nodes:
            async with CommunicationRuntime() as runtime:
                runtime.register_backend("node", existing(node.world))
                group = await runtime.initialize("node", BackendConfig(timeout=3.0))
                assert group.communicator is node.world
                assert node.world.timeout == 3.0
            assert node.world.timeout == 300.0
        await asyncio.gather(*(node.world.barrier() for node in nodes))


async def test_ranks_of_the_thread_backend_that_do_not_come_are_named() -> None:
    with pytest.raises(PeerTimeout, match=r"rank 1: waited 0.01 s for ranks 0, 2 of the thread backend"):
        await _initialize(ThreadBackend(3), BackendConfig(rank=1, timeout=0.01))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BackendConfig(world_size=3), "world_size: this thread backend has 1 rank, got 3; the ranks of a process meet"),
        (BackendConfig(transport="tcp"), "transport: the thread backend has no use for it, got 'tcp'"),
        (BackendConfig(rendezvous="tcp://here:1"), "rendezvous: the thread backend has no use for it"),
        (BackendConfig(rank=2), r"rank: expected one of those that are free, \[0\], got 2"),
    ],
)
async def test_settings_that_do_not_fit_the_thread_backend_are_refused(config: BackendConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        await _initialize(ThreadBackend(), config)


async def test_a_rank_of_the_thread_backend_is_taken_once() -> None:
    meeting = ThreadBackend()
    await _initialize(meeting, BackendConfig())
    with pytest.raises(UsageError, match="all 1 ranks of this thread backend are taken"):
        await _initialize(meeting, BackendConfig())
    with pytest.raises(UsageError, match="size: expected at least 1 rank, got 0"):
        ThreadBackend(0)


async def _initialize(backend: ThreadBackend, config: BackendConfig) -> None:
    async with CommunicationRuntime() as runtime:
        runtime.register_backend("thread", backend)
        await runtime.initialize("thread", config)
