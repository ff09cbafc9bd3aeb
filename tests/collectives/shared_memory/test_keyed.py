"""Operations in the arena that are matched by name: any order, any number in flight, and all the ways to fail."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator, announce_leaving
from asyncpar.collectives.shared_memory.group import ArenaGroup
from asyncpar.errors import OperationMismatch, PeerCancelled, PeerLost, PeerTimeout
from asyncpar.net.arena.driver import Driver
from asyncpar.net.arena.order_log import RING
from asyncpar.net.arena.run_queue import KeyedRunQueue, RunQueue, Task
from asyncpar.net.arena.sequencer import LeadingSequencer
from asyncpar.node import Node
from asyncpar.testing import local_world
from tests.collective_engines import engine_of
from tests.products import in_turn
from tests.soak import chosen

SIZES = (1, 40_000, 700_000)
"""Elements of float64: at once, at once, and in chunks."""


WAITS = ("poll", "doorbell")


@pytest.fixture(autouse=True, params=chosen([None], soak=WAITS), ids=chosen(["by turns"], soak=WAITS))
def wait(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait in one of two ways, which tests and their parameters share out; with ``--soak`` in both."""
    by_turns = WAITS[crc32(request.node.name.encode()) % len(WAITS)]
    monkeypatch.setenv("ASYNCPAR_ARENA_WAIT", request.param or by_turns)


@pytest.fixture
def early_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks ask around after a tenth of a second."""
    monkeypatch.setattr("asyncpar.collectives.long_waits.PROBE_AFTER", 0.1)


@asynccontextmanager
async def arena_of(size: int) -> AsyncIterator[tuple[Node, ...]]:
    async with local_world(size, transport="shm") as nodes, asyncio.timeout(30):
        yield nodes
        arenas = [engine_of(node.world).table.arena for node in nodes]
        assert [arena.driver.rescues for arena in arenas if arena is not None] == [0] * size


def keyed_group(communicator: Communicator) -> ArenaGroup:
    group = engine_of(communicator)._keyed_arena  # noqa: SLF001  # which group carries keyed operations shows in no result
    assert group is not None
    return group


def run_queue_of(node: Node) -> KeyedRunQueue:
    run_queue = keyed_group(node.world).run_queue
    assert isinstance(run_queue, KeyedRunQueue)
    return run_queue


def started(nodes: Sequence[Node]) -> int:
    pending = (operation for node in nodes for operation in engine_of(node.world).group.pending())
    return sum(operation.has_started for operation in pending)


async def until_started(nodes: Sequence[Node], count: int) -> None:
    """Let the loop run until so many operations are awaited."""
    while started(nodes) < count:  # noqa: ASYNC110 - no event tells of it
        await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def sum_everywhere(nodes: Sequence[Node], key: str = "sum", count: int = 100) -> None:
    arrays = [np.arange(count, dtype=np.float64) % 13 + node.rank for node in nodes]
    expected = sum(arrays)
    await asyncio.gather(*(node.world.all_reduce(x, key=key) for node, x in zip(nodes, arrays, strict=True)))
    for x in arrays:
        np.testing.assert_array_equal(x, expected)


async def test_operations_with_keys_choose_the_arena() -> None:
    async with arena_of(3) as nodes:
        await sum_everywhere(nodes)
        assert [entry.algorithm for entry in nodes[0].world.traffic.operations] == ["arena"]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("size", [2, 3])
async def test_each_rank_may_use_keys_in_its_own_order(size: int, count: int) -> None:
    async with arena_of(size) as nodes:

        async def reduce_all(node: Node, step: int) -> None:
            keys = list(range(6))
            random.Random(size * step + node.rank).shuffle(keys)
            arrays = {key: np.full(count, float(10 * key + node.rank)) for key in keys}
            await asyncio.gather(*(node.world.all_reduce(arrays[key], key=f"layer {key}") for key in keys))
            for key, array in arrays.items():
                assert (array == size * 10 * key + sum(range(size))).all()

        for step in range(4):
            await asyncio.gather(*(reduce_all(node, step) for node in nodes))


async def test_every_operation_takes_a_key() -> None:
    async with arena_of(3) as nodes:

        async def run(node: Node) -> dict[str, Any]:
            comm, x = node.world, np.arange(6.0).reshape(3, 2) + node.rank
            out = np.zeros(2)
            calls: dict[str, Any] = {
                "all_reduce": comm.all_reduce(x.copy(), key="k0"),
                "reduce": comm.reduce(x, root=1, key="k1"),
                "reduce_scatter": comm.reduce_scatter(x, key="k2"),
                "all_gather": comm.all_gather(x, key="k3"),
                "broadcast": comm.broadcast(x.copy(), root=2, key="k4"),
                "gather": comm.gather(x, root=2, key="k5"),
                "scatter": comm.scatter(x if node.rank == 1 else None, root=1, out=out, key="k6"),
                "all_to_all": comm.all_to_all(x, key="k7"),
                "barrier": comm.barrier(key="k8"),
            }
            names = list(calls)
            random.Random(node.rank).shuffle(names)
            results = await asyncio.gather(*(calls[name] for name in names))
            assert [entry.algorithm for entry in comm.traffic.operations] == ["arena"] * len(calls)
            return dict(zip(names, results, strict=True))

        results = await asyncio.gather(*(run(node) for node in nodes))
    inputs = [np.arange(6.0).reshape(3, 2) + rank for rank in range(3)]
    total = inputs[0] + inputs[1] + inputs[2]
    for rank, got in enumerate(results):
        np.testing.assert_array_equal(got["all_reduce"], total)
        np.testing.assert_array_equal(got["reduce_scatter"], total[rank : rank + 1])
        np.testing.assert_array_equal(got["all_gather"], np.stack(inputs))
        np.testing.assert_array_equal(got["broadcast"], inputs[2])
        np.testing.assert_array_equal(got["scatter"], inputs[1][rank])
        np.testing.assert_array_equal(got["all_to_all"], np.stack([x[rank] for x in inputs]))
    np.testing.assert_array_equal(results[1]["reduce"], total)
    np.testing.assert_array_equal(results[2]["gather"], np.stack(inputs))


@pytest.mark.parametrize("size", [2, 3])
async def test_many_more_than_a_ring_holds_may_be_in_flight(size: int) -> None:
    async with arena_of(size) as nodes:
        count = chosen(2, soak=8) * RING

        async def reduce_all(node: Node) -> None:
            keys = list(range(count))
            if node.rank == 1:
                keys.reverse()
            elif node.rank == 2:
                random.Random(2).shuffle(keys)
            arrays = {key: np.array([key + node.rank]) for key in keys}
            await asyncio.gather(*(node.world.all_reduce(arrays[key], key=str(key)) for key in keys))
            assert all(array[0] == size * key + sum(range(size)) for key, array in arrays.items())

        await asyncio.gather(*(reduce_all(node) for node in nodes))


async def test_nobody_waits_for_a_key_that_another_rank_has_not_begun() -> None:
    async with arena_of(3) as nodes:
        early = [asyncio.ensure_future(node.world.all_reduce(np.ones(4), key="early")) for node in nodes[:2]]
        also = asyncio.ensure_future(nodes[2].world.barrier(key="only there"))
        await until_started(nodes, 3)
        for _ in range(3):
            await sum_everywhere(nodes, "later")
        assert not any(call.done() for call in (*early, also))
        result = await nodes[2].world.all_reduce(np.ones(4), key="early")
        for reduced in (result, *await asyncio.gather(*early)):
            assert (reduced == 3).all()
        await asyncio.gather(also, *(node.world.barrier(key="only there") for node in nodes[:2]))


async def test_a_call_that_is_not_awaited_yet_holds_up_nothing() -> None:
    async with arena_of(2) as nodes:
        calls = [node.world.all_reduce(np.ones(3), key="first") for node in nodes]
        second = asyncio.ensure_future(calls[1])
        await sum_everywhere(nodes, "second")
        assert not second.done()
        assert ((await calls[0]) == 2).all()
        assert ((await second) == 2).all()


async def test_operations_with_and_without_keys_work_side_by_side() -> None:
    async with arena_of(2) as nodes:

        async def run(node: Node) -> None:
            ordered = [np.full(50_000, float(number + node.rank)) for number in range(8)]
            named = [np.full(50_000, float(10 * number + node.rank)) for number in range(8)]
            calls = [node.world.all_reduce(x) for x in ordered]
            numbers = list(range(8)) if node.rank else list(reversed(range(8)))
            calls += [node.world.all_reduce(named[number], key=str(number)) for number in numbers]
            await asyncio.gather(*calls)
            assert [x[-1] for x in ordered] == [2 * number + 1 for number in range(8)]
            assert [x[-1] for x in named] == [20 * number + 1 for number in range(8)]

        for _ in range(3):
            await asyncio.gather(*(run(node) for node in nodes))


@pytest.mark.parametrize(("others", "victim"), in_turn([[], [0], [1], [2], [0, 1], [0, 2], [1, 2]], [0, 1, 2]))
async def test_cancelled_before_all_are_ready_it_fails_on_all_and_the_group_goes_on(
    victim: int, others: list[int]
) -> None:
    """``others`` have announced it when the victim gives it up."""
    async with arena_of(3) as nodes:
        await sum_everywhere(nodes)
        ready = dict.fromkeys([*others, victim]) if victim not in others else dict.fromkeys(others)
        calls = {rank: asyncio.ensure_future(nodes[rank].world.all_reduce(np.ones(9), key="k")) for rank in ready}
        await until_started(nodes, len(ready))
        calls[victim].cancel()
        await asyncio.wait({calls[victim]})
        late = [rank for rank in range(3) if rank not in calls]
        calls |= {rank: asyncio.ensure_future(nodes[rank].world.all_reduce(np.ones(9), key="k")) for rank in late}
        assert calls.pop(victim).cancelled() or not late
        for outcome in await asyncio.gather(*calls.values(), return_exceptions=True):
            if isinstance(outcome, PeerCancelled):
                assert outcome.rank == victim
            else:  # where all had announced it, some may have had all they need before the victim gave up
                assert not late
                assert np.array_equal(np.asarray(outcome), np.full(9, 3.0))
        await sum_everywhere(nodes, "k")
        await sum_everywhere(nodes)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("victim", [0, 1])
async def test_cancelled_at_any_moment_it_is_a_result_or_an_error(victim: int, count: int) -> None:
    async with arena_of(2) as nodes:
        await sum_everywhere(nodes)
        for steps in range(12):
            arrays = [np.full(count, node.rank + 1.0) for node in nodes]
            blockers = [node.world.all_reduce(np.ones(700_000), key="blocker") for node in nodes]
            blocking = [asyncio.ensure_future(blocker) for blocker in blockers]
            calls = [
                asyncio.ensure_future(node.world.all_reduce(x, key="k")) for node, x in zip(nodes, arrays, strict=True)
            ]
            for _ in range(steps):
                await asyncio.sleep(0)
            calls[victim].cancel()
            await asyncio.wait(calls)
            other = calls[1 - victim].exception()
            if other is None:
                assert (arrays[1 - victim] == 3.0).all()
            else:
                assert isinstance(other, PeerCancelled)
            assert all((result == 2).all() for result in await asyncio.gather(*blocking))
            await sum_everywhere(nodes, "k")


async def test_a_call_that_is_never_awaited_fails_on_the_others() -> None:
    async with arena_of(2) as nodes:
        await sum_everywhere(nodes)
        for rank in range(2):
            call = nodes[rank].world.all_reduce(np.zeros(3), key="k")
            with pytest.warns(RuntimeWarning, match=r"Communicator\.all_reduce' was never awaited"):
                del call
            with pytest.raises(PeerCancelled, match="never awaited"):
                await nodes[1 - rank].world.all_reduce(np.zeros(3), key="k")
        await sum_everywhere(nodes)


@pytest.mark.parametrize("victim", chosen([0, 2], soak=[0, 1, 2]))
async def test_of_what_was_given_up_nothing_is_kept(victim: int) -> None:
    """More than a ring holds is announced and given up, while the sequencer works on and while it does not."""
    async with arena_of(3) as nodes:
        await sum_everywhere(nodes)
        for step in range(3 * RING):
            call = asyncio.ensure_future(nodes[victim].world.barrier(key=f"{step}"))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call})
            if step % 200 == 199:
                await sum_everywhere(nodes, f"between {step}")
        await settle()
        await sum_everywhere(nodes)
        for node in nodes:
            run_queue = run_queue_of(node)
            assert not run_queue._unplaced  # noqa: SLF001  # operations left behind unplaced show nowhere but in memory
            assert not run_queue.tasks
            assert len(run_queue._unsent) <= RING  # noqa: SLF001  # old announcements that stay show nowhere but in memory
        sequencer = run_queue_of(nodes[0]).sequencer
        assert isinstance(sequencer, LeadingSequencer)
        assert len(sequencer._roll) == 0  # noqa: SLF001  # old announcements that stay show nowhere but in memory


async def test_what_a_rank_gives_up_by_itself_is_not_taken_for_a_lost_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer that looks for lost rings fires before the rank goes on from what it has given up."""
    bury = Driver.bury

    def bury_and_recheck(driver: Driver, run_queue: RunQueue, task: Task) -> None:
        bury(driver, run_queue, task)
        driver._recheck()  # noqa: SLF001  # the timer may fire at any time

    monkeypatch.setattr("asyncpar.net.arena.driver.RECHECK_SECONDS", 0.0)
    monkeypatch.setattr(Driver, "bury", bury_and_recheck)
    async with arena_of(2) as nodes:
        await sum_everywhere(nodes)
        for step in range(20):
            call = asyncio.ensure_future(nodes[1].world.barrier(key=f"{step}"))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call})
        for node in nodes:
            arena = engine_of(node.world).table.arena
            assert arena is not None
            assert arena.driver.rescues == 0


@pytest.mark.parametrize("missing", chosen([0, 2], soak=[0, 1, 2]))
async def test_a_rank_that_never_calls_is_named_when_time_is_up(missing: int) -> None:
    async with arena_of(3) as nodes:
        await sum_everywhere(nodes)
        for node in nodes:
            node.world.timeout = 0.2
        calls = [node.world.all_reduce(np.zeros(9), key="k") for node in nodes if node.rank != missing]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        timeouts = [outcome for outcome in outcomes if isinstance(outcome, PeerTimeout)]
        assert timeouts
        for outcome in timeouts:
            assert outcome.rank == missing
            # directly, or behind the other rank that waits for it
            assert re.search(rf'all_reduce #1 "k" waited \d+\.\d s for .*rank {missing}', str(outcome))
        assert all(isinstance(outcome, PeerTimeout | PeerCancelled) for outcome in outcomes)
        for node in nodes:
            node.world.timeout = 30.0
        await sum_everywhere(nodes)


@pytest.mark.usefixtures("early_probes")
async def test_a_rank_that_has_called_but_does_not_await_is_named_and_described() -> None:
    async with arena_of(2) as nodes:
        await sum_everywhere(nodes)
        call = nodes[1].world.all_reduce(np.zeros(9), key="k")
        waiting = asyncio.ensure_future(nodes[0].world.all_reduce(np.zeros(9), key="k"))
        await until_started(nodes, 1)
        (operation,) = engine_of(nodes[0].world).group.pending()
        while not operation.answers:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)
        nodes[0].world.timeout = 0.01
        with pytest.raises(PeerTimeout, match=r"for rank 1 .*has called that operation, but does not await it"):
            await waiting
        with pytest.raises(PeerCancelled):
            await call


async def test_different_operations_under_one_key_are_reported_on_all_ranks() -> None:
    async with arena_of(3) as nodes:
        await sum_everywhere(nodes)
        for odd in range(3):
            calls = [node.world.all_reduce(np.zeros(6 if node.rank == odd else 5), key="k") for node in nodes]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [OperationMismatch] * 3
            assert "float64[5]" in str(outcomes[0])
            assert "float64[6]" in str(outcomes[0])
            assert f'operation #{odd + 1} "k"' in str(outcomes[0])
        await sum_everywhere(nodes, "k")


@pytest.mark.usefixtures("early_probes")
@pytest.mark.parametrize("there", [0, 1])
async def test_an_operation_by_messages_where_another_rank_uses_the_arena_is_a_mismatch(there: int) -> None:
    async with arena_of(2) as nodes:
        await sum_everywhere(nodes)
        outcomes = await asyncio.gather(
            nodes[there].world.all_reduce(np.zeros(5), key="k"),
            nodes[1 - there].world.all_reduce(np.zeros(5), key="k", algorithm="ring"),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [OperationMismatch] * 2
        await sum_everywhere(nodes, "k")


@pytest.mark.usefixtures("early_probes")
async def test_a_rank_leaves_after_an_operation_has_failed_that_waited_for_its_offer() -> None:
    async with arena_of(2) as nodes:
        await sum_everywhere(nodes)
        group, _ = (node.world.subgroup((0, 1)) for node in nodes)
        assert group is not None
        waiting = asyncio.ensure_future(group.all_reduce(np.zeros(1 << 18)))
        operation = None
        while operation is None or not operation.answers:
            await asyncio.sleep(0)
            operation = next(iter(engine_of(group).group.pending()), None)
        lost: list[int] = []
        nodes[0].links.add_loss_listener(lambda rank, _: lost.append(rank))
        announce_leaving(nodes[1].world)
        with pytest.raises(PeerLost, match=r"rank 1 .*it left the world"):
            await waiting
        await nodes[1].stop()
        with pytest.raises(PeerLost, match=r"rank 1 .*it left the world"):
            await nodes[0].world.barrier()
        assert lost == [1]


@pytest.mark.parametrize(
    ("leaver", "ranks"),
    [(0, [1]), (0, [2]), (0, [1, 2]), (1, [0]), (1, [2]), (1, [0, 2]), (2, [0]), (2, [1]), (2, [0, 1])],
)
async def test_a_rank_that_leaves_ends_what_needs_it(leaver: int, ranks: list[int]) -> None:
    """Whether or not the sequencer knows of the operation."""
    async with arena_of(3) as nodes:
        await sum_everywhere(nodes)
        waiting = [asyncio.ensure_future(nodes[rank].world.all_reduce(np.zeros(9), key="k")) for rank in ranks]
        await until_started(nodes, len(ranks))
        await nodes[leaver].stop()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, PeerLost)
            assert outcome.rank == leaver
        with pytest.raises(PeerLost):
            await nodes[(leaver + 1) % 3].world.barrier(key="another")


@pytest.mark.parametrize("root", [0, 1])
async def test_a_rank_that_leaves_after_its_part_does_no_harm(root: int) -> None:
    async with arena_of(2) as nodes:
        await sum_everywhere(nodes)
        x, y = np.arange(10.0), np.zeros(10)

        async def hand_out_and_leave() -> None:
            await nodes[root].world.broadcast(x, root=root, key="k")
            await nodes[root].stop()

        await asyncio.gather(nodes[1 - root].world.broadcast(y, root=root, key="k"), hand_out_and_leave())
        np.testing.assert_array_equal(y, x)


async def test_groups_have_orders_of_their_own() -> None:
    async with arena_of(4) as nodes:
        pairs = [[0, 1], [2, 3], [3, 0], [1, 2], [2, 1, 0], [0, 1, 2, 3]]

        async def work(node: Node) -> None:
            groups = [(number, node.world.subgroup(pair)) for number, pair in enumerate(pairs)]

            async def reduce(number: int, group: Communicator) -> None:
                keys = [f"{key}" for key in range(12)]
                random.Random(node.rank + 7 * number).shuffle(keys)
                arrays = {key: np.full(3000, float(node.rank + int(key))) for key in keys}
                await asyncio.gather(*(group.all_reduce(arrays[key], key=key) for key in keys))
                assert all((x == sum(group.ranks) + group.size * int(key)).all() for key, x in arrays.items())

            await asyncio.gather(*(reduce(number, group) for number, group in groups if group is not None))

        await asyncio.gather(*(work(node) for node in nodes))


async def test_where_there_is_no_room_they_go_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCPAR_ARENA_BYTES", "256K")
    async with arena_of(2) as nodes:
        kept = []  # a group that nobody has any more would give its room back
        for number in range(6):
            groups = [node.world.subgroup([0, 1], name=f"group {number}") for node in nodes]
            kept.append(groups)
            for _ in range(2):
                arrays = [[np.full(5000, node.rank + 1.0) for _ in range(3)] for node in nodes]
                calls = [
                    group.all_reduce(x, key=str(key))
                    for group, rows in zip(groups, arrays, strict=True)
                    for key, x in enumerate(rows)
                    if group is not None
                ]
                await asyncio.gather(*calls)
                assert all((x == 3.0).all() for rows in arrays for x in rows)
        refused = [keyed_group(group).is_refused for group in groups if group is not None]
        assert refused == [True, True]


async def test_buffers_of_the_arena_are_read_in_place() -> None:
    count = 700_000
    async with arena_of(2) as nodes:
        arrays = [node.world.empty(count, np.float32) for node in nodes]
        for step in range(2):
            for node, x in zip(nodes, arrays, strict=True):
                x[:] = node.rank + step
            calls = [node.world.all_reduce(x, "mean", key="k") for node, x in zip(nodes, arrays, strict=True)]
            await asyncio.gather(*calls)
            assert all((x == step + 0.5).all() for x in arrays)
