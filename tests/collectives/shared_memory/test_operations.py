"""Operations in the arena: turns, heap buffers, and failures that pass through shared memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.long_waits import LongWaits
from asyncpar.collectives.operation import Operation
from asyncpar.errors import OperationMismatch, PeerCancelled, PeerLost, PeerTimeout, UsageError
from asyncpar.node import Node
from asyncpar.testing import local_world
from tests.collective_engines import engine_of

SIZES = (1, 20_000, 100_000, 700_000)
"""Elements of float64: at once, at once, in slices of one chunk, and in chunks."""


@asynccontextmanager
async def arena_of(size: int) -> AsyncIterator[tuple[Node, ...]]:
    async with local_world(size, transport="shm") as nodes, asyncio.timeout(30):
        for node in nodes:
            assert node.has_arena
        yield nodes
        assert [_rescues(node) for node in nodes] == [0] * size


def _rescues(node: Node) -> int:
    arena = engine_of(node.world).table.arena
    assert arena is not None
    return arena.driver.rescues


def _inputs(size: int, count: int) -> list[Any]:
    return [np.arange(count, dtype=np.float64) % 13 + rank for rank in range(size)]


async def _sum_everywhere(nodes: tuple[Node, ...], count: int = 100) -> None:
    arrays = _inputs(len(nodes), count)
    expected = sum(arrays)
    await asyncio.gather(*(node.world.all_reduce(x) for node, x in zip(nodes, arrays, strict=True)))
    for x in arrays:
        np.testing.assert_array_equal(x, expected)


async def test_operations_of_one_host_choose_the_arena() -> None:
    async with arena_of(3) as nodes:
        await _sum_everywhere(nodes)
        assert [entry.algorithm for entry in nodes[0].world.traffic.operations] == ["arena"]


@pytest.mark.parametrize("count", SIZES)
async def test_operations_may_be_awaited_in_any_order(count: int) -> None:
    async with arena_of(2) as nodes:

        async def reduce_all(comm: Communicator, order: list[int]) -> None:
            arrays = [np.full(count, number + comm.rank, np.float64) for number in range(10)]
            calls = [comm.all_reduce(array) for array in arrays]
            for number in order:
                await calls[number]
                assert (arrays[number] == 2 * number + 1).all()

        await _sum_everywhere(nodes)
        for _ in range(2):
            await asyncio.gather(
                reduce_all(nodes[0].world, list(range(10))), reduce_all(nodes[1].world, [9, 3, 0, 1, 8, 2, 7, 4, 6, 5])
            )


@pytest.mark.parametrize("count", SIZES)
async def test_after_a_cancelled_operation_the_group_goes_on(count: int) -> None:
    """A rank that has a cancelled rank's whole part may still get the result; all others learn who cancelled."""
    async with arena_of(3) as nodes:
        await _sum_everywhere(nodes)
        for victim in range(3):
            late = (victim + 1) % 3
            arrays = _inputs(3, count)
            expected = sum(arrays)
            calls = [node.world.all_reduce(x) for node, x in zip(nodes, arrays, strict=True)]
            waiting = {rank: asyncio.ensure_future(call) for rank, call in enumerate(calls) if rank != late}
            await asyncio.sleep(0)
            assert _started(nodes) == 2
            waiting[victim].cancel()
            waiting[late] = asyncio.ensure_future(calls[late])
            await asyncio.wait(waiting.values())
            assert waiting.pop(victim).cancelled()
            for rank, call in waiting.items():
                error = call.exception()
                if error is None and count < max(SIZES):
                    np.testing.assert_array_equal(arrays[rank], expected)
                else:
                    assert isinstance(error, PeerCancelled)
                    assert error.rank == victim
            await _sum_everywhere(nodes, count)


def _started(nodes: tuple[Node, ...]) -> int:
    pending = (operation for node in nodes for operation in engine_of(node.world).group.pending())
    return sum(operation.has_started for operation in pending)


async def test_different_operations_at_one_place_are_reported_on_all_ranks() -> None:
    async with arena_of(3) as nodes:
        await _sum_everywhere(nodes)
        outcomes = await asyncio.gather(
            nodes[0].world.all_reduce(np.zeros(5)),
            nodes[1].world.all_reduce(np.zeros(6)),
            nodes[2].world.all_reduce(np.zeros(5)),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [OperationMismatch] * 3
        assert "float64[5]" in str(outcomes[0])
        assert "float64[6]" in str(outcomes[0])
        await _sum_everywhere(nodes)


async def test_an_operation_by_messages_where_another_rank_uses_the_arena_is_a_mismatch() -> None:
    async with arena_of(2) as nodes:
        await _sum_everywhere(nodes)
        outcomes = await asyncio.gather(
            nodes[0].world.all_reduce(np.zeros(5)),
            nodes[1].world.all_reduce(np.zeros(5), algorithm="ring"),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [OperationMismatch] * 2
        await _sum_everywhere(nodes)


async def test_a_call_that_is_never_awaited_fails_on_the_others() -> None:
    async with arena_of(2) as nodes:
        await _sum_everywhere(nodes)
        for count in SIZES:
            call = nodes[0].world.all_reduce(np.zeros(count))
            with pytest.warns(RuntimeWarning, match=r"Communicator\.all_reduce' was never awaited"):
                del call
            with pytest.raises(PeerCancelled, match="never awaited"):
                await nodes[1].world.all_reduce(np.zeros(count))
        await _sum_everywhere(nodes)


async def test_a_call_is_awaited_once() -> None:
    async with arena_of(2) as nodes:
        await _sum_everywhere(nodes)
        for count in SIZES:
            call = nodes[0].world.all_reduce(np.zeros(count))
            await asyncio.gather(call, nodes[1].world.all_reduce(np.zeros(count)))
            with pytest.raises(RuntimeError, match="already awaited"):
                await call


async def test_a_rank_that_leaves_ends_what_needs_it() -> None:
    async with arena_of(3) as nodes:
        await _sum_everywhere(nodes)
        waiting = [asyncio.ensure_future(node.world.all_reduce(np.zeros(9))) for node in nodes[:2]]
        await asyncio.sleep(0)
        await nodes[2].stop()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [PeerLost] * 2
        assert {outcome.rank for outcome in outcomes if isinstance(outcome, PeerLost)} == {2}
        with pytest.raises(PeerLost):
            await nodes[0].world.barrier()


async def test_a_rank_that_leaves_after_its_part_does_no_harm() -> None:
    async with arena_of(2) as nodes:
        await _sum_everywhere(nodes)
        x, y = np.arange(10.0), np.zeros(10)

        async def hand_out_and_leave() -> None:
            await nodes[0].world.broadcast(x)
            await nodes[0].stop()

        await asyncio.gather(nodes[1].world.broadcast(y), hand_out_and_leave())
        np.testing.assert_array_equal(y, x)


async def test_a_rank_that_does_not_come_is_named_when_time_is_up() -> None:
    async with arena_of(3) as nodes:
        await _sum_everywhere(nodes)
        for node in nodes:
            node.world.timeout = 0.2
        outcomes = await asyncio.gather(
            *(node.world.all_reduce(np.zeros(9)) for node in nodes[:2]), return_exceptions=True
        )
        assert any(isinstance(outcome, PeerTimeout) and outcome.rank == 2 for outcome in outcomes)
        assert all(isinstance(outcome, PeerTimeout | PeerCancelled) for outcome in outcomes)


async def test_more_groups_than_fit_go_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCPAR_ARENA_BYTES", "256K")
    async with arena_of(2) as nodes:
        kept = []  # groups that nobody has any more give their memory back
        for number in range(12):
            groups = [node.world.subgroup([0, 1], name=f"group {number}") for node in nodes]
            kept += groups
            arrays = [np.full(50_000, node.rank + 1.0) for node in nodes]
            await asyncio.gather(
                *(group.all_reduce(x) for group, x in zip(groups, arrays, strict=True) if group is not None)
            )
            assert all((x == 3.0).all() for x in arrays)
        refused = [arena for group in groups if group is not None and (arena := engine_of(group).arena) is not None]
        assert [group.is_refused for group in refused] == [True, True]
        sent = [group.traffic.payload_bytes for group in groups if group is not None]
        assert sent == [arrays[0].nbytes, arrays[0].nbytes]  # by messages, and not into a slot besides


def _pair(nodes: tuple[Node, ...], name: str) -> list[Communicator]:
    made = [node.world.subgroup([0, 1], name=name) for node in nodes]
    return [group for group in made if group is not None]


async def _use(groups: list[Communicator]) -> None:
    """Reduce in all ways that the arena has: at once, in chunks, by name; and ask whether it was used."""
    for count, key in ((5, None), (50_000, None), (7, "key"), (50_000, "key"), (5, None)):
        arrays = [np.full(count, group.rank + 1.0) for group in groups]
        await asyncio.gather(*(group.all_reduce(x, key=key) for group, x in zip(groups, arrays, strict=True)))
        assert all((x == 3.0).all() for x in arrays)
    for group in groups:
        ways = (engine_of(group).arena, engine_of(group)._keyed_arena)  # noqa: SLF001  # a keyed call gives the same sums by messages: that it goes by memory shows nowhere else
        assert all(way is not None and way.is_open for way in ways), group.name


async def test_groups_that_end_give_their_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCPAR_ARENA_BYTES", "512K")  # four groups that stay use it up
    async with arena_of(2) as nodes:
        late: list[Communicator] = []
        for number in range(175):  # with two offers each, more than there are places for
            groups = _pair(nodes, f"group {number}")
            await _use(groups)
            groups[0].give_up(0, "it is not needed any more")
            for group in late:  # the other rank is one behind
                group.give_up(1, "it is not needed any more")
            late = groups[1:]


async def test_memory_of_a_group_is_not_used_again_while_another_rank_may_look_at_it() -> None:
    async with arena_of(2) as nodes:
        directories = [arena.directory for node in nodes if (arena := engine_of(node.world).table.arena) is not None]
        first = _pair(nodes, "first")
        await _use(first)
        before = set(directories[0]._offers.values())  # noqa: SLF001  # which memory a group was given, and when it is given again, shows in no result
        first[0].give_up(0, "it is not needed any more")
        second = _pair(nodes, "second")
        await _use(second)
        assert not before & set(directories[0]._offers.values())  # noqa: SLF001  # which memory a group was given, and when it is given again, shows in no result
        first[1].give_up(1, "it is not needed any more")
        await _use(_pair(nodes, "third"))
        assert before <= set(directories[0]._offers.values())  # noqa: SLF001  # which memory a group was given, and when it is given again, shows in no result
        await _use(second)


async def test_groups_of_one_host_work_at_the_same_time() -> None:
    async with arena_of(4) as nodes:
        pairs = [[0, 1], [2, 3], [0, 2], [1, 3]]

        async def work(node: Node) -> None:
            groups = [node.world.subgroup(pair) for pair in pairs]

            async def reduce(group: Communicator) -> None:
                for round_ in range(20):
                    x = np.full(30_000, float(node.rank + round_))
                    await group.all_reduce(x)
                    assert (x == sum(group.ranks) + 2 * round_).all()

            await asyncio.gather(*(reduce(group) for group in groups if group is not None))

        await asyncio.gather(*(work(node) for node in nodes))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("count", [3, 90_001, 700_000])
async def test_buffers_of_the_arena_give_the_same_bits_as_any_other(count: int, mixed: bool) -> None:
    async with arena_of(3) as nodes:
        rng = np.random.default_rng(7)
        inputs = [rng.standard_normal(count).astype(np.float32) for _ in nodes]

        def buffer(node: Node) -> Any:
            array = node.empty(count, np.float32) if not mixed or node.rank == 1 else np.empty(count, np.float32)
            array[:] = inputs[node.rank]
            return array

        for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather"):

            async def run(node: Node, x: Any, operation: str = operation) -> Any:
                return await getattr(node.world, operation)(x)

            plain = await asyncio.gather(*(run(node, inputs[node.rank].copy()) for node in nodes))
            placed = await asyncio.gather(*(run(node, buffer(node)) for node in nodes))
            for one, other in zip(plain, placed, strict=True):
                if one is not None:
                    np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8), operation)


async def test_a_cancelled_buffer_of_the_arena_never_makes_a_wrong_number() -> None:
    count = 700_000
    async with arena_of(2) as nodes:
        await _sum_everywhere(nodes)
        for steps in range(12):
            x = nodes[0].empty(count, np.float64)
            x[:] = 1.0
            y = np.full(count, 2.0)
            giving = asyncio.ensure_future(nodes[0].world.all_reduce(x))
            taking = asyncio.ensure_future(nodes[1].world.all_reduce(y))
            for _ in range(steps):
                await asyncio.sleep(0)
            giving.cancel()
            await asyncio.wait({giving})
            x[:] = -1000.0
            outcome = (await asyncio.gather(taking, return_exceptions=True))[0]
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, PeerCancelled)
            else:
                assert (y == 3.0).all()
            await _sum_everywhere(nodes)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [0, 3, 1_000_000])
async def test_a_root_is_not_over_before_all_others_have_come(size: int, count: int) -> None:
    async with arena_of(size) as nodes:
        await _sum_everywhere(nodes)
        root = asyncio.ensure_future(nodes[0].world.broadcast(np.full(count, 7.0)))
        others = [asyncio.ensure_future(node.world.broadcast(np.zeros(count))) for node in nodes[1:-1]]
        await asyncio.sleep(0.05)
        assert not root.done()
        for x in await asyncio.gather(root, *others, nodes[-1].world.broadcast(np.zeros(count))):
            assert (x == 7.0).all()


async def test_the_arena_is_refused_where_there_is_none() -> None:
    async with local_world(2) as nodes:
        with pytest.raises(UsageError, match="cannot run in the arena"):
            await nodes[0].world.all_reduce(np.zeros(3), algorithm="arena")
        assert nodes[0].world.algorithms("barrier") == ("dissemination", "tree")


async def test_two_hosts_have_an_arena_each() -> None:
    async with local_world(4, transport=None, hosts=["a", "b", "a", "b"]) as nodes, asyncio.timeout(30):
        assert all(node.has_arena for node in nodes)
        local = [node.world.subgroup([0, 2] if node.rank % 2 == 0 else [1, 3]) for node in nodes]
        arrays = [np.full(5, float(node.rank)) for node in nodes]
        await asyncio.gather(
            *(group.all_reduce(x) for group, x in zip(local, arrays, strict=True) if group is not None)
        )
        assert [x[0] for x in arrays] == [2.0, 4.0, 2.0, 4.0]
        assert [group.traffic.of("all_reduce", "arena").calls for group in local if group is not None] == [1] * 4
        await _sum_everywhere(nodes)


async def test_a_loop_full_of_small_operations_is_no_loop_without_turns() -> None:
    async with arena_of(2) as nodes:
        await _sum_everywhere(nodes, 1)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count_turns())
        root = engine_of(nodes[0].world).arena
        assert root is not None
        driver = root.host.driver
        driver.give_turn(0.0)
        reducing = asyncio.ensure_future(nodes[1].world.all_reduce(np.zeros(1)))
        await asyncio.sleep(0)
        before = turns
        assert driver.is_turn_due(time.perf_counter())
        await nodes[0].world.all_reduce(np.zeros(1))
        assert turns > before
        await reducing
        counting.cancel()


@pytest.mark.parametrize("root", [0, 1])
async def test_a_small_broadcast_out_of_the_heap_meets_one_that_goes_the_quick_way(root: int) -> None:
    async with local_world(2, transport="shm") as nodes:

        async def send(node: Node) -> None:
            for value in range(5):
                x = node.empty(16, np.int64)
                x[...] = value
                await node.world.broadcast(x, root=root, algorithm="arena")

        async def receive(node: Node) -> list[int]:
            got = []
            for _ in range(5):
                x = np.full(16, -1)
                await node.world.broadcast(x, root=root)
                got.append(int(x.min()) if x.min() == x.max() else -2)
            return got

        calls = [send(node) if node.rank == root else receive(node) for node in nodes]
        assert (await asyncio.gather(*calls))[1 - root] == [0, 1, 2, 3, 4]


async def test_an_operation_that_is_over_when_its_askers_are_answered_asks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers wait a little for what others find out; by then a short operation has ended."""
    monkeypatch.setattr("asyncpar.collectives.long_waits.PROBE_AFTER", 0.1)
    watched: list[tuple[LongWaits, Operation]] = []
    watch = LongWaits.watch

    def noted(waits: LongWaits, operation: Operation) -> None:
        watched.append((waits, operation))
        watch(waits, operation)

    monkeypatch.setattr(LongWaits, "watch", noted)
    async with arena_of(2) as nodes:
        await _sum_everywhere(nodes)
        first, late = nodes
        waiting = asyncio.ensure_future(first.world.all_reduce(np.zeros(700_000)))
        waits = engine_of(late.world).table.waits
        while not waits._askers:  # noqa: ASYNC110,SLF001 - no event tells of it
            await asyncio.sleep(0)
        await late.world.all_reduce(np.zeros(700_000))
        await waiting
        operations = [operation for its, operation in watched if its is waits]
        assert operations
        for operation in operations:
            waits._announce_begun(operation)  # noqa: SLF001 - a timer calls it
