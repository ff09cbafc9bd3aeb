"""All-reduce over hosts that have arenas: conformance, what leaves a host, and how it ends badly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import OperationMismatch, PeerCancelled, PeerLost, PeerTimeout
from asyncpar.net.arena.directory import NOTHING
from asyncpar.node import Node
from asyncpar.testing import local_world
from tests.collective_engines import engine_of
from tests.collectives.sampled_sizes import InSharedWorlds
from tests.soak import chosen, is_soak

PIN = "all_reduce:0-inf@hierarchical"
LAYOUTS = ("aabb", "aaabb", "abab", "aab", "aabbbc", "aabbccc", "aaaa", "abc")
"""Which host each rank is on."""


class TestTwoHosts(InSharedWorlds):
    out_of = 2
    sizes: ClassVar[Sequence[int]] = (4, 5)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        hosts = ["left"] * (size // 2) + ["right"] * (size - size // 2)
        async with local_world(size, transport=None, hosts=hosts, pin=PIN) as nodes:
            yield [node.world for node in nodes]


class TestThreeUnevenHosts(InSharedWorlds):
    out_of = 2
    sizes: ClassVar[Sequence[int]] = (6, 8)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        hosts = (["one", "two", "three", "two", "three"] + ["two"] * size)[:size]
        async with local_world(size, transport=None, hosts=hosts, pin=PIN) as nodes:
            yield [node.world for node in nodes]


class TestTwoHostsWithoutPolling(InSharedWorlds):
    turn = 1
    out_of = 2
    sizes: ClassVar[Sequence[int]] = (3, 5)

    @pytest.fixture(autouse=True)
    def no_polling(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ASYNCPAR_ARENA_WAIT", "doorbell")

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        hosts = ["left"] * (size // 2) + ["right"] * (size - size // 2)
        async with local_world(size, transport=None, hosts=hosts, pin=PIN) as nodes:
            yield [node.world for node in nodes]


@asynccontextmanager
async def world_on(layout: str) -> AsyncIterator[tuple[Node, ...]]:
    """Ranks on hosts; at the end nobody may have been woken by the timer only."""
    async with local_world(len(layout), transport=None, hosts=list(layout)) as nodes, asyncio.timeout(30):
        for node, host in zip(nodes, layout, strict=True):
            assert node.has_arena == (layout.count(host) > 1)
        yield nodes
        arenas = [engine_of(node.world).table.arena for node in nodes]
        assert all(arena is None or arena.driver.rescues == 0 for arena in arenas)


def inputs(nodes: Sequence[Node], count: int) -> list[Array]:
    return [np.random.default_rng(node.rank).standard_normal(count) for node in nodes]


async def reduce_all(nodes: Sequence[Node], arrays: Sequence[Array], **options: Any) -> None:
    options = {"algorithm": "hierarchical", **options}
    await asyncio.gather(*(node.world.all_reduce(x, **options) for node, x in zip(nodes, arrays, strict=True)))


async def check(nodes: Sequence[Node], count: int = 1000) -> None:
    arrays = inputs(nodes, count)
    expected = np.sum(arrays, axis=0)
    await reduce_all(nodes, arrays)
    for array in arrays:
        np.testing.assert_allclose(array, expected, rtol=1e-9, atol=1e-9)


def sent_to_hosts(nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
    """Return, by rank, the bytes of frames to ranks of other hosts, and to those of its own."""
    away, home = [0] * len(nodes), [0] * len(nodes)
    for node in nodes:
        for other in nodes:
            lane = node.links.link(other.rank).lane if other is not node and node.links.is_up(other.rank) else None
            if lane is not None:
                is_near = other.membership.members[other.rank].host == node.membership.members[node.rank].host
                (home if is_near else away)[node.rank] += lane.bytes_sent
    return away, home


ALGORITHMS = ("hierarchical", "hierarchical-tree")


@pytest.mark.parametrize(
    ("layout", "algorithm"),
    chosen(list(zip(LAYOUTS, 4 * ALGORITHMS, strict=True)), soak=list(product(LAYOUTS, ALGORITHMS))),
)
async def test_results_have_the_same_bits_on_all_ranks_and_again(
    layout: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest goes in four pieces; on one layout, and with ``--soak``, they are as long as ever."""
    longest = 1_300_001
    if layout != LAYOUTS[0] and not is_soak():
        longest //= 8
        monkeypatch.setattr("asyncpar.collectives.shared_memory.hierarchical._LEAST_PIECE", 256 << 10)
    async with world_on(layout) as nodes:
        for count, op in ((0, "sum"), (1, "max"), (7, "mean"), (longest, "mean")):
            results = set()
            for _ in range(2):
                arrays = inputs(nodes, count)
                expected = np.mean(arrays, axis=0) if op == "mean" else getattr(np, op)(arrays, axis=0)
                await reduce_all(nodes, arrays, op=op, algorithm=algorithm)
                np.testing.assert_allclose(arrays[0], expected, rtol=1e-9, atol=1e-9)
                results |= {array.tobytes() for array in arrays}
            assert len(results) == 1, (count, op)


@pytest.mark.parametrize("layout", ["aabb", "aaabbbccc", "aaabb", "abb"])
async def test_no_more_than_must_leaves_a_host_and_nothing_goes_by_lanes_inside(layout: str) -> None:
    count, hosts = 400_000, sorted(set(layout))
    async with world_on(layout) as nodes:
        await check(nodes)
        away_before, home_before = sent_to_hosts(nodes)
        await check(nodes, count)
        away, home = sent_to_hosts(nodes)
        assert home == home_before
        for host in hosts:
            ranks = [rank for rank, name in enumerate(layout) if name == host]
            left = sum(away[rank] - away_before[rank] for rank in ranks)
            share = left / (count * 8 * 2 * (len(hosts) - 1) / len(hosts))
            assert 1.0 <= share < 1.01, host
            parts = [(away[rank] - away_before[rank]) / left for rank in ranks]
            leaders = min(map(layout.count, hosts))
            np.testing.assert_allclose(parts, [1 / leaders] * leaders + [0] * (len(ranks) - leaders), atol=0.01)


async def test_messages_between_hosts_are_the_same_where_a_host_has_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[int]] = []
    results: list[set[bytes]] = []
    for refused in ("", "a", "ab"):
        async with world_on("aaabb") as nodes:
            for node, host in zip(nodes, "aaabb", strict=True):
                arena = engine_of(node.world).table.arena
                assert arena is not None
                if host in refused:
                    monkeypatch.setattr(arena.directory, "_allot", lambda: NOTHING)
            await check(nodes)
            before, home_before = sent_to_hosts(nodes)
            arrays = inputs(nodes, 400_000)
            await reduce_all(nodes, arrays)
            after, home = sent_to_hosts(nodes)
            sent.append([new - old for new, old in zip(after, before, strict=True)])
            results.append({array.tobytes() for array in arrays})
            assert [mine > old for mine, old in zip(home, home_before, strict=True)] == [h in refused for h in "aaabb"]
    assert sent[0] == sent[1] == sent[2]
    assert [len(found) for found in results] == [1, 1, 1]


async def test_buffers_in_the_arena_are_reduced_where_they_are() -> None:
    async with world_on("aaabb") as nodes:
        for count in (10, 1_500_000):
            arrays = [node.empty(count, np.float64) for node in nodes]
            for array, values in zip(arrays, inputs(nodes, count), strict=True):
                array[...] = values
            expected = np.sum(inputs(nodes, count), axis=0)
            await reduce_all(nodes, arrays)
            for array in arrays:
                np.testing.assert_allclose(array, expected, rtol=1e-9, atol=1e-9)
                assert array.tobytes() == arrays[0].tobytes()


async def test_keyed_operations_meet_in_any_order_and_many_are_in_flight() -> None:
    async with world_on("aabbb") as nodes:
        keys = [f"bucket/{number}" for number in range(12)]
        arrays = {
            key: [np.full(70_000, number + node.rank, float) for node in nodes] for number, key in enumerate(keys)
        }

        async def run(node: Node) -> None:
            order = keys[node.rank :] + keys[: node.rank]
            calls = [node.world.all_reduce(arrays[key][node.rank], algorithm="hierarchical", key=key) for key in order]
            await asyncio.gather(*calls)

        await asyncio.gather(*map(run, nodes))
        for number, key in enumerate(keys):
            assert all((array == 5 * number + 10).all() for array in arrays[key])


async def test_a_later_call_may_be_awaited_before_an_earlier_one() -> None:
    async with world_on("aabb") as nodes:

        async def run(node: Node, count: int) -> None:
            calls = [node.world.all_reduce(np.ones(count), algorithm="hierarchical") for _ in range(3)]
            for number in (2, 0, 1):
                assert float((await calls[number])[-1]) == 4.0

        for count in (1, 900_000):
            await asyncio.gather(*(run(node, count) for node in nodes))


async def sent_more_than(node: Node, count: int) -> None:
    """Let the loop run until ``node`` has sent so many bytes in all."""
    for _ in range(1_000_000):
        if node.links.bytes_sent > count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"rank {node.rank} never sent {count} bytes")


@pytest.mark.parametrize(
    ("victim", "count"),
    chosen([(0, 3_000_000), (1, 1), (3, 1), (4, 3_000_000)], soak=list(product(range(5), (1, 3_000_000)))),
)
async def test_cancelling_on_one_rank_ends_it_on_all_and_leaves_the_group_usable(victim: int, count: int) -> None:
    """The second time everyone is there, and the payload half way.

    A rank that has a cancelled rank's whole part may still get the result; all others learn who cancelled.
    """
    async with world_on("aaabb") as nodes:
        await check(nodes)
        late = (victim + 1) % 5
        for is_complete in (False, True):
            arrays = [np.ones(count) for _ in nodes]
            calls = [node.world.all_reduce(x, algorithm="hierarchical") for node, x in zip(nodes, arrays, strict=True)]
            tasks = [asyncio.ensure_future(calls[rank]) for rank in range(5) if is_complete or rank != late]
            for _ in range(20):
                await asyncio.sleep(0)
            started = nodes[0].links.bytes_sent
            if is_complete and count > 1:
                await sent_more_than(nodes[0], started + count)
            cancelled = tasks[victim if is_complete or victim < late else victim - 1]
            if cancelled.done():
                assert count == 1
                await asyncio.gather(*tasks)
                continue
            cancelled.cancel()
            if not is_complete:
                await asyncio.wait({cancelled})
                tasks.append(asyncio.ensure_future(calls[late]))
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, np.ndarray):
                    assert outcome.tolist() == [5.0]
                elif not isinstance(outcome, asyncio.CancelledError):
                    assert isinstance(outcome, PeerCancelled)
                    assert (outcome.rank, outcome.operation) == (
                        victim,
                        f"all_reduce #{engine_of(nodes[0].world).ledger.last}",
                    )
            assert cancelled.cancelled()
            for array in arrays:
                array[...] = 7
            await check(nodes)
            assert all((array == 7).all() for array in arrays), "memory was touched after the end"


async def test_shapes_that_differ_inside_a_host_or_between_hosts_are_reported_on_all_ranks() -> None:
    async with world_on("aabb") as nodes:
        for odd in range(4):
            await check(nodes)
            calls = [
                node.world.all_reduce(np.zeros(5 + (node.rank == odd)), algorithm="hierarchical") for node in nodes
            ]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, OperationMismatch)
                assert "float64[5]" in str(error)
                assert "float64[6]" in str(error)


async def test_a_rank_that_calls_something_else_is_found_by_asking() -> None:
    async with world_on("aabb") as nodes:
        await check(nodes)
        calls = [
            node.world.barrier() if node.rank == 1 else node.world.all_reduce(np.zeros(4), algorithm="hierarchical")
            for node in nodes
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [OperationMismatch] * 4
        await check(nodes)


@pytest.mark.parametrize("absent", [0, 1, 3])
async def test_a_rank_that_does_not_come_is_named_after_the_timeout(absent: int) -> None:
    async with world_on("aabb") as nodes:
        await check(nodes)
        present = [node for node in nodes if node.rank != absent]
        for node in nodes:
            node.world.timeout = 0.3
        calls = [node.world.all_reduce(np.ones(1000), algorithm="hierarchical") for node in present]
        missed = nodes[absent].world.all_reduce(np.ones(1000), algorithm="hierarchical")
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(outcome, PeerTimeout) and outcome.rank == absent for outcome in outcomes)
        assert all(isinstance(outcome, PeerTimeout | PeerCancelled) for outcome in outcomes)
        with pytest.raises(PeerCancelled):
            await missed
        for node in nodes:
            node.world.timeout = 30.0
        await check(nodes)


@pytest.mark.parametrize("gone", [0, 1, 4])
async def test_a_rank_that_leaves_ends_it_on_all_others(gone: int) -> None:
    async with world_on("aabbb") as nodes:
        await check(nodes)
        others = [node for node in nodes if node.rank != gone]
        tasks = [
            asyncio.ensure_future(node.world.all_reduce(np.ones(500_000), algorithm="hierarchical")) for node in others
        ]
        for _ in range(20):
            await asyncio.sleep(0)
        await nodes[gone].stop()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, PeerLost)
            assert outcome.rank == gone


async def test_hierarchical_is_chosen_where_it_pays_and_alike_on_all_ranks() -> None:
    async with world_on("aaabb") as nodes:
        tables = {node.world.algorithm_table() for node in nodes}
        assert len(tables) == 1
        await asyncio.gather(*(node.world.all_reduce(np.ones(2_000_000)) for node in nodes))
        await asyncio.gather(*(node.world.all_reduce(np.ones(2)) for node in nodes))
        used = [entry.algorithm for entry in nodes[0].world.traffic.operations]
        assert "hierarchical" in used
        assert len(used) == 2
        group = nodes[0].world.subgroup((0, 1, 2))
        assert group is not None
        assert engine_of(group).policy.model.has_arenas


async def test_a_part_of_a_world_over_hosts_is_hierarchical_too() -> None:
    async with world_on("aaabbb") as nodes:
        groups = [node.world.subgroup((5, 0, 3, 1)) for node in nodes]
        members = [group for group in groups if group is not None]
        arrays = [np.full(400_000, group.rank + 1.0) for group in members]
        calls = (group.all_reduce(x, algorithm="hierarchical") for group, x in zip(members, arrays, strict=True))
        await asyncio.gather(*calls, check(nodes, 400_000))
        assert all((array == 10).all() for array in arrays)


async def test_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    async with world_on("aabb") as nodes:
        await check(nodes, 1_000_000)
        ours = asyncio.all_tasks()
        call = asyncio.ensure_future(nodes[0].world.all_reduce(np.ones(9), algorithm="hierarchical"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() - ours == {call}
        call.cancel()
        await asyncio.wait({call})
    assert asyncio.all_tasks() == before
