"""The face: arguments, groups, statistics, choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import chain, count
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncpar.collectives.calibration import calibrate
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.testing import run_virtual
from tests.collective_engines import engine_of
from tests.collectives.conftest import OpenRanks, Ranks

Call = Callable[[Communicator], Any]


async def on_all(ranks: Ranks, call: Call) -> list[Any]:
    return list(await asyncio.gather(*(call(communicator) for communicator in ranks.communicators)))


def read_only() -> Any:
    array = np.zeros(4)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.all_reduce([1.0]), "x: expected a numpy array, got list"),
        (lambda c: c.all_reduce(np.array(["a"])), "x: expected a numeric dtype"),
        (lambda c: c.all_reduce(np.zeros(2, ">f8")), "native byte order"),
        (lambda c: c.all_reduce(np.ma.array([1.0, 2.0], mask=[False, True])), "x: expected an array without a mask"),
        (lambda c: c.all_reduce(read_only()), "x: expected an array that can be written, got a read-only one"),
        (lambda c: c.all_reduce(np.zeros(2), out=np.zeros(3)), r"out: expected float64\[2\].* got float64\[3\]"),
        (lambda c: c.all_reduce(np.zeros(2), "total"), "op: expected one of sum, mean, .*, got 'total'"),
        (lambda c: c.all_reduce(np.zeros(2, "i4"), "mean"), "op: mean needs a floating dtype.*int32 has sum, prod"),
        (lambda c: c.all_reduce(np.zeros(2), "bor"), "op: bor works on integers and bool; float64 has sum, mean"),
        (lambda c: c.all_reduce(np.zeros(2), algorithm="bruck"), "algorithm: all_reduce has ring, .*got 'bruck'"),
        (lambda c: c.all_reduce(np.zeros(2), algorithm=1), "algorithm: expected a name, got 1"),
        (lambda c: c.all_reduce(np.zeros(2), key=""), "key: expected a name"),
        (lambda c: c.broadcast(np.zeros(2), root=3), r"root: expected a rank 0\.\.2 of the group, got 3"),
        (lambda c: c.broadcast(np.zeros(2), root=True), "root: expected a rank"),
        (lambda c: c.broadcast(read_only(), root=1), "read-only"),
        (lambda c: c.reduce(np.zeros(2), root=1, out=np.zeros(2)), "out: expected None on rank 0"),
        (lambda c: c.gather(np.zeros(2), root=1, out=np.zeros((3, 2))), "out: expected None on rank 0"),
        (lambda c: c.scatter(np.zeros((2, 2))), r"x: expected shape \(3, \.\.\.\), one entry per rank, got \(2, 2\)"),
        (lambda c: c.scatter(np.zeros((3, 2)), root=1), "x: expected None on rank 0"),
        (lambda c: c.scatter(root=1), "out: expected an array on every rank but root 1"),
        (lambda c: c.all_gather(np.zeros(2), out=np.zeros((3, 2), "f4")), r"out: expected float64\[3, 2\]"),
        (lambda c: c.all_gather_v(np.array(1.0)), "at least one dimension"),
        (lambda c: c.all_gather_v(np.zeros(2), algorithm="tree"), "algorithm: all_gather has"),
        (lambda c: c.reduce_scatter(np.array(1.0)), "at least one dimension"),
        (lambda c: c.all_to_all(np.zeros(4)), r"x: expected shape \(3, "),
        (lambda c: c.all_to_all_v(np.zeros(4), [1, 2]), "counts: expected 3 integers of 0 or more"),
        (lambda c: c.all_to_all_v(np.zeros(4), [1, 2, 2]), "counts that add up to the 4 rows of x, got a sum of 5"),
        (lambda c: c.all_to_all_v(np.zeros(4), "123"), "counts: expected 3 integers, got str"),
        (lambda c: c.scatter_object([1, 2]), "values: expected a sequence of 3 values"),
        (lambda c: c.scatter_object([1, 2, 3], root=1), "values: expected None on rank 0"),
        (lambda c: c.all_gather_object({1, object()}), "value: a value of type .*object.* cannot be sent"),
        (lambda c: c.split("red"), "color: expected an integer or None, got 'red'"),
        (lambda c: c.split(0, "first"), "key: expected an integer"),
        (lambda c: c.split(1 << 70), "color: expected an integer of at most 64 bits"),
        (lambda c: c.subgroup((0, 3)), r"ranks: expected a rank 0\.\.2"),
        (lambda c: c.subgroup((0, 0)), "each once"),
        (lambda c: c.subgroup(()), "at least one rank"),
    ],
)
async def test_wrong_arguments_are_named(open_ranks: OpenRanks, call: Call, message: str) -> None:
    async with open_ranks(3) as ranks:
        with pytest.raises(UsageError, match=message):
            call(ranks.communicators[0])


async def test_subclasses_of_arrays_are_used_as_plain_memory(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        matrices = [np.ones((2, 3)).view(np.matrix) for _ in range(2)]
        await on_all(ranks, lambda c: c.all_reduce(matrices[c.rank]))
        np.testing.assert_array_equal(matrices, np.full((2, 2, 3), 2.0))
        out = np.zeros((2, 3)).view(np.matrix)
        await asyncio.gather(ranks.communicators[0].send(matrices[0], 1), ranks.communicators[1].recv(0, out=out))
        np.testing.assert_array_equal(out, matrices[0])


async def test_overlapping_memory_is_refused(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        x = np.zeros((2, 4))
        with pytest.raises(UsageError, match="other memory than x"):
            await ranks.communicators[0].all_to_all(x, out=x)
        with pytest.raises(UsageError, match="other memory than x"):
            await ranks.communicators[0].reduce_scatter(x, out=x[:1])


async def test_a_refused_call_takes_its_place_in_the_order(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        waiting = asyncio.ensure_future(one.all_reduce(np.zeros(2)))
        with pytest.raises(UsageError):
            await zero.all_reduce(np.zeros(2), "total")  # type: ignore[call-overload]
        with pytest.raises(PeerCancelled, match="rank 1: all_reduce #1: the call was refused on rank 0: op: expected"):
            await waiting
        results = await on_all(ranks, lambda c: c.all_reduce(np.ones(2)))
        assert [float(result[0]) for result in results] == [2.0, 2.0]


async def test_a_group_of_one_returns_what_it_gets(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks:
        alone = ranks.communicators[0]
        x = np.arange(4.0)
        np.testing.assert_array_equal(await alone.all_reduce(x, "mean"), np.arange(4.0))
        np.testing.assert_array_equal(await alone.all_gather(x), np.arange(4.0)[None])
        assert await alone.all_gather_object("x") == ["x"]
        await alone.calibrate()
        assert alone.traffic.payload_bytes == 0


async def test_splitting_twice_makes_groups_that_do_not_meet(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        ones, others = await on_all(ranks, lambda c: c.split(0)), await on_all(ranks, lambda c: c.split(0))
        assert ones[0].group == ones[1].group != others[0].group == others[1].group
        assert ones[0].name == "of ranks 0,1"
        waiting = ones[0].all_reduce(np.ones(1))
        results = await asyncio.gather(others[0].all_reduce(np.full(1, 5.0)), others[1].all_reduce(np.full(1, 5.0)))
        assert float(results[0][0]) == 10.0
        both = await asyncio.gather(waiting, ones[1].all_reduce(np.ones(1)))
        assert float(both[0][0]) == 2.0


async def test_subgroups_of_subgroups_keep_world_ranks(open_ranks: OpenRanks) -> None:
    async with open_ranks(4) as ranks:
        inner = [c.subgroup((3, 1, 2)) for c in ranks.communicators]
        assert inner[0] is None
        pair = [group.subgroup((2, 0), name="pair") for group in inner[1:] if group is not None]
        assert [None if group is None else (group.ranks, group.rank) for group in pair] == [
            None,
            ((2, 3), 0),
            ((2, 3), 1),
        ]
        assert pair[1] is not None
        assert pair[1].name == "pair"


async def test_subgroups_with_keys_meet_by_key_in_whatever_order_they_are_asked_for(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        one, other = ranks.communicators
        mine = {key: one.subgroup((0, 1), key=key) for key in ("a", "b")}
        theirs = {key: other.subgroup((0, 1), key=key) for key in ("b", "a")}
        unkeyed = one.subgroup((0, 1))
        assert unkeyed is not None
        numbers = {key: {group.group for group in (mine[key], theirs[key]) if group is not None} for key in mine}
        assert [len(both) for both in numbers.values()] == [1, 1]
        assert len(numbers["a"] | numbers["b"] | {unkeyed.group}) == 3


async def test_who_asks_again_for_a_key_gets_the_same_communicator(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        one = ranks.communicators[0]
        assert one.subgroup((0, 1), key="a") is one.subgroup([0, 1], key="a")
        assert one.subgroup((0, 1), key="a") is not one.subgroup((1, 0), key="a")
        assert one.subgroup((1,), key="a") is None
        with pytest.raises(UsageError, match="key: expected a name"):
            one.subgroup((0, 1), key="")


async def test_a_group_that_is_given_up_ends_what_waits_and_refuses_the_rest(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        pairs = [c.subgroup((0, 1)) for c in ranks.communicators[:2]]
        assert pairs[0] is not None
        assert pairs[1] is not None
        waiting = [
            asyncio.ensure_future(work)
            for work in (pairs[0].all_reduce(np.ones(3)), pairs[0].recv(1), pairs[0].recv(), pairs[0].barrier(key="b"))
        ]
        await asyncio.sleep(0)
        not_awaited = pairs[0].all_reduce(np.ones(3))
        pairs[0].give_up(2, "rank 2 failed")
        for work in (*waiting, not_awaited):
            with pytest.raises(PeerCancelled, match="given up, because rank 2 failed") as caught:
                await work
            assert caught.value.rank == 2
        with pytest.raises(PeerCancelled, match=r"group of ranks 0,1 was given up, because rank 2 failed"):
            await pairs[0].all_reduce(np.ones(3))
        with pytest.raises(PeerCancelled, match="was given up"):
            await pairs[0].send(np.ones(3), 1)
        with pytest.raises(PeerCancelled, match="was given up"):
            await pairs[0].recv(1)
        with pytest.raises(PeerCancelled, match="rank 0 failed in it: rank 2 failed"):
            await pairs[1].all_reduce(np.ones(3))
        results = await on_all(ranks, lambda c: c.all_reduce(np.ones(2)))
        assert [float(result[0]) for result in results] == [3.0] * 3


def test_who_waits_for_a_group_that_was_given_up_elsewhere_learns_of_it(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(2) as ranks:
            pairs = [c.subgroup((0, 1)) for c in ranks.communicators]
            here, there = pairs
            assert here is not None
            assert there is not None
            await asyncio.gather(here.all_reduce(np.ones(3)), there.all_reduce(np.ones(3)))
            await asyncio.gather(here.send(np.ones(3), 1), there.recv(0))
            here.give_up(0, "rank 0 has had enough")
            calls = (
                there.all_reduce(np.ones(3)),
                there.barrier(key="b"),
                there.recv(0),
                there.send(np.ones(1 << 20), 0),
            )
            for error in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20):
                assert isinstance(error, PeerCancelled), error
                assert "rank 0 failed in it: the group was given up there, because rank 0 has had enough" in str(error)
                assert error.rank == 0
            results = await on_all(ranks, lambda c: c.all_reduce(np.ones(2)))
            assert [float(result[0]) for result in results] == [2.0] * 2

    run_virtual(main())


@pytest.mark.parametrize("size", [2, 3, 4, 8])
async def test_traffic_counters_match_the_theory_exactly(open_ranks: OpenRanks, size: int) -> None:
    async with open_ranks(size) as ranks:
        count = 840
        await on_all(ranks, lambda c: c.all_reduce(np.ones(count), algorithm="ring"))
        await on_all(ranks, lambda c: c.reduce_scatter(np.ones(count), algorithm="pairwise"))
        await on_all(ranks, lambda c: c.all_gather(np.ones(count), algorithm="ring"))
        await on_all(ranks, lambda c: c.all_to_all(np.ones((size, count)), algorithm="pairwise"))
        await on_all(ranks, lambda c: c.broadcast(np.ones(count), algorithm="tree"))
        for communicator in ranks.communicators:
            traffic = communicator.traffic
            ring = traffic.of("all_reduce", "ring")
            assert ring.payload_bytes * size == 2 * (size - 1) * count * 8
            assert (ring.calls, ring.messages, ring.steps) == (1, 2 * (size - 1), 2 * (size - 1))
            assert traffic.of("reduce_scatter").payload_bytes * size == (size - 1) * count * 8
            assert traffic.of("all_gather").payload_bytes == (size - 1) * count * 8
            assert traffic.of("all_to_all").payload_bytes == (size - 1) * count * 8
            assert traffic.of("broadcast", "chain").calls == 0
            assert traffic.payload_bytes == sum(entry.payload_bytes for entry in traffic.operations)
            assert ring.seconds > 0.0
        sent = sum(c.traffic.of("broadcast").payload_bytes for c in ranks.communicators)
        assert sent == (size - 1) * count * 8
        on_lanes = sum(links.bytes_sent for links in ranks.links)
        assert on_lanes >= sum(c.traffic.payload_bytes + 40 * c.traffic.messages for c in ranks.communicators)


async def test_hierarchical_all_reduce_sends_little_between_hosts(open_ranks: OpenRanks) -> None:
    async with open_ranks(4, hosts=("a", "a", "b", "b")) as ranks:
        results = await on_all(ranks, lambda c: c.all_reduce(np.full(100, c.rank + 1.0), algorithm="hierarchical"))
        assert all(float(result[7]) == 10.0 for result in results)
        assert [c.traffic.payload_bytes for c in ranks.communicators] == [1200] * 4


async def test_a_pin_decides_the_algorithm(open_ranks: OpenRanks) -> None:
    async with open_ranks(3, pin="all_reduce:0-1k@tree,1k-inf@ring") as ranks:
        await on_all(ranks, lambda c: c.all_reduce(np.ones(10)))
        await on_all(ranks, lambda c: c.all_reduce(np.ones(1000)))
        assert [entry.algorithm for entry in ranks.communicators[1].traffic.operations] == ["ring", "tree"]
        assert "tree*" in ranks.communicators[0].algorithm_table()


async def test_calibrating_agrees_on_the_figures_of_rank_0(open_ranks: OpenRanks) -> None:
    async with open_ranks(4, hosts=("a", "a", "b", "b")) as ranks:
        before = ranks.communicators[0].algorithm_table()
        await on_all(ranks, lambda c: c.calibrate())
        tables = {communicator.algorithm_table() for communicator in ranks.communicators}
        assert len(tables) == 1
        assert tables != {before}
        results = await on_all(ranks, lambda c: c.all_reduce(np.ones(5000)))
        assert all(float(result[0]) == 4.0 for result in results)


async def test_small_messages_that_were_held_up_make_no_absurd_bandwidth(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:

        def calibrated(communicator: Communicator) -> Coroutine[Any, Any, None]:
            small = range(0, 800, 100)  # 100 s each; large messages come behind them
            held_up = chain(small, count(801.0, 0.001))
            return calibrate(engine_of(communicator), clock=lambda: next(held_up))

        await on_all(ranks, calibrated)
        for communicator in ranks.communicators:
            assert 1e6 < communicator.bandwidth < 1e12


async def test_infinities_and_nans_are_results_like_others(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        arrays = [np.array([np.inf, np.nan, 6e4, -np.inf], np.float16) for _ in range(2)]
        arrays[1][3] = np.inf
        results = await on_all(ranks, lambda c: c.all_reduce(arrays[c.rank]))
        assert results[0].tobytes() == results[1].tobytes()
        np.testing.assert_array_equal(results[0], np.array([np.inf, np.nan, np.inf, np.nan], np.float16))


async def test_the_mean_of_many_bfloat16_values_divides_exactly(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        results = await on_all(ranks, lambda c: c.all_reduce(np.full(5, 3.0, ml_dtypes.bfloat16), "mean"))
        assert all(result.dtype == ml_dtypes.bfloat16 for result in results)
        assert all(float(result[0]) == 3.0 for result in results)


async def test_an_all_reduce_needs_little_memory_besides(open_ranks: OpenRanks) -> None:
    import tracemalloc

    async with open_ranks(2) as ranks:
        arrays = [np.ones(4 << 20, np.float32) for _ in range(2)]
        tracemalloc.start()
        try:
            await on_all(ranks, lambda c: c.all_reduce(arrays[c.rank], algorithm="ring"))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 * (8 << 20)


async def test_the_timeout_of_a_group_is_its_own_unless_it_asks_to_share_it(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        world = ranks.communicators[0]
        shared, own = world.subgroup((0, 1), has_own_timeout=False), world.subgroup((0, 1))
        assert shared is not None
        assert own is not None
        inner = own.subgroup((0,))
        assert inner is not None
        before = world.timeout
        own.timeout = 7.0
        assert (world.timeout, shared.timeout, own.timeout, inner.timeout) == (before, before, 7.0, before)
        world.timeout = 9.0
        assert (world.timeout, shared.timeout, own.timeout, inner.timeout) == (9.0, 9.0, 7.0, before)
        made = await asyncio.gather(*(communicator.split(0) for communicator in ranks.communicators))
        assert made[0] is not None
        made[0].timeout = 4.0
        assert world.timeout == 9.0
