"""All-reduces that go on without ranks that are late: over lanes, in shared memory, and on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncpar import Deadline, Quorum, Reduced
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.completion.messages import AcceptChosen, Chosen, decode_contributors, encode_contributors
from asyncpar.core.config.names import ReduceOp
from asyncpar.errors import (
    OperationMismatch,
    PeerCancelled,
    PeerError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    UsageError,
    WorldRevoked,
)
from asyncpar.testing import local_world, run_virtual
from asyncpar.testing.collective_worlds import noise, on_all
from tests.collectives.conftest import OpenRanks
from tests.products import sampled

COUNT = 100_003
TRANSPORTS = ("inproc", "tcp", "shm")


async def after(seconds: float, communicator: Communicator, x: Any, **options: Any) -> Reduced:
    await asyncio.sleep(seconds)
    result: Reduced = await communicator.all_reduce(x, **options)
    return result


def assert_alike(results: Sequence[Reduced], contributors: tuple[int, ...]) -> None:
    assert [result.contributors for result in results] == [contributors] * len(results)
    assert len({result.values.tobytes() for result in results}) == 1


@pytest.mark.parametrize(
    ("transport", "op", "until"),
    sampled(TRANSPORTS, ["sum", "mean", "max"], [Quorum(1.0), Quorum(0.5, wait=30.0), Deadline(30.0)]),
)
async def test_with_all_on_time_it_has_the_bits_of_the_plain_one(transport: str, op: ReduceOp, until: Any) -> None:
    async with local_world(3, transport=transport) as nodes:
        worlds = [node.world for node in nodes]
        plain = await on_all(worlds, lambda c: c.all_reduce(noise(c.rank, COUNT), op))
        results = await on_all(worlds, lambda c: c.all_reduce(noise(c.rank, COUNT), op, until=until))
        assert_alike(results, (0, 1, 2))
        assert results[0].values.tobytes() == plain[0].tobytes()
        assert all(result.is_complete and not result.was_late and result.share == 1.0 for result in results)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("slow", range(4))
async def test_a_quorum_goes_on_without_the_slow_rank_which_gets_the_same(transport: str, slow: int) -> None:
    async with local_world(4, transport=transport) as nodes:
        worlds = [node.world for node in nodes]
        gone_on = asyncio.Event()
        quick = [rank for rank in range(4) if rank != slow]

        async def run(communicator: Communicator) -> Reduced:
            x = noise(communicator.rank, COUNT)
            if communicator.rank == slow:
                await gone_on.wait()
                return await communicator.all_reduce(x, "mean", until=Quorum(0.75))
            result = await communicator.all_reduce(x, "mean", until=Quorum(0.75))
            gone_on.set()
            return result

        results = await on_all(worlds, run)
        assert_alike(results, tuple(quick))
        expected = np.mean([noise(rank, COUNT) for rank in quick], axis=0)
        np.testing.assert_allclose(results[0].values, expected, rtol=1e-5, atol=1e-6)
        assert [result.was_late for result in results] == [rank == slow for rank in range(4)]
        assert worlds[slow].late_counts() == (1, 0, 1, 0, 1)
        plain = await on_all(worlds, lambda c: c.all_reduce(np.ones(3)))
        assert all(x.tolist() == [4.0] * 3 for x in plain)


def test_a_deadline_goes_on_with_those_that_are_there() -> None:
    async def main() -> list[Reduced]:
        async with local_world(4) as nodes:
            times = (0.0, 0.1, 5.0, 0.15)
            calls = (
                after(time, node.world, np.full(5, node.rank + 1.0), until=Deadline(0.2))
                for node, time in zip(nodes, times, strict=True)
            )
            return await asyncio.gather(*calls)

    results = run_virtual(main())
    assert_alike(results, (0, 1, 3))
    assert results[2].values.tolist() == [7.0] * 5
    assert results[0].share == 0.75


def test_late_parts_go_to_the_next_one_or_are_dropped() -> None:
    async def run(communicator: Communicator, late: Any) -> list[float]:
        sums = []
        for step in range(4):
            if communicator.rank == 2 and step == 1:
                await asyncio.sleep(10.0)
            x = np.full(3, 10.0**step * (communicator.rank + 1))
            result = await communicator.all_reduce(x, until=Quorum(0.6, wait=1.0), late=late, key="g")
            sums.append(float(result.values[0]))
            await asyncio.sleep(30.0 - asyncio.get_running_loop().time() % 30.0)
        return sums

    async def main(late: str) -> tuple[list[list[float]], Any]:
        async with local_world(3) as nodes:
            found = await asyncio.gather(*(run(node.world, late) for node in nodes))
            return found, nodes[2].world.late_counts("g")

    for late, third, counts in (("drop", 600.0, (4, 3, 1, 0, 1)), ("next", 630.0, (4, 3, 1, 1, 0))):
        found, counted = run_virtual(main(late))
        assert found == [[6.0, 30.0, third, 6000.0]] * 3, late
        assert counted == counts


def test_a_rank_that_is_behind_learns_how_far_and_catches_up() -> None:
    async def run(communicator: Communicator) -> list[tuple[int, ...]]:
        found, behind = list[tuple[int, ...]](), 0
        for step in range(6):
            if behind == 0:
                await asyncio.sleep(10.0 if communicator.rank == 1 and step == 2 else 1.0)
            result = await communicator.all_reduce(np.ones(3), until=Quorum(0.6))
            behind = result.behind
            found.append(result.contributors)
        return found

    async def main() -> list[list[tuple[int, ...]]]:
        async with local_world(3) as nodes:
            return await asyncio.gather(*(run(node.world) for node in nodes))

    found = run_virtual(main())
    assert found[0] == found[1] == found[2]
    assert found[0][2:] == [(0, 2)] * 4


def test_results_for_late_ranks_are_bounded() -> None:
    """Those that go ahead wait, at last, for the rank that is behind."""

    async def run(communicator: Communicator, times: list[float]) -> None:
        if communicator.rank == 1:
            await asyncio.sleep(100.0)
        for _ in range(8):
            await communicator.all_reduce(np.ones(3), until=Deadline(0.5))
            times.append(asyncio.get_running_loop().time())

    async def main() -> list[list[float]]:
        async with local_world(2) as nodes:
            times: list[list[float]] = [[], []]
            begun = asyncio.get_running_loop().time()
            await asyncio.gather(*(run(node.world, each) for node, each in zip(nodes, times, strict=True)))
            return [[time - begun for time in each] for each in times]

    quick, late = run_virtual(main())
    assert quick[3] < 10.0
    assert quick[4] >= 100.0
    assert late[-1] < 200.0


async def test_a_lost_rank_is_not_waited_for(open_ranks: OpenRanks) -> None:
    async with open_ranks(4) as ranks:
        await on_all(ranks.communicators, lambda c: c.all_reduce(np.ones(3)))
        ranks.kill(1)
        for _ in range(3):
            left = [ranks.communicators[rank] for rank in (0, 2, 3)]
            results = await on_all(left, lambda c: c.all_reduce(np.ones(COUNT), until=Quorum(0.75)))
            assert_alike(results, (0, 2, 3))
            assert results[0].values[0] == 3.0


async def test_a_policy_that_no_rank_can_meet_is_an_error_on_every_rank(open_ranks: OpenRanks) -> None:
    async with open_ranks(4) as ranks:
        await on_all(ranks.communicators, lambda c: c.all_reduce(np.ones(3)))
        arrays = [np.full(3, float(rank)) for rank in range(4)]
        running = [
            asyncio.ensure_future(ranks.communicators[rank].all_reduce(arrays[rank], until=Quorum(1.0)))
            for rank in (0, 2, 3)
        ]
        await asyncio.sleep(0)
        ranks.kill(1)
        for error in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(error, PeerLost)
            assert error.rank == 1
            assert "4 of 4 ranks are wanted, and 3 are left" in str(error)
        assert [x[0] for x in arrays] == [0.0, 1.0, 2.0, 3.0]
        left = [ranks.communicators[rank] for rank in (0, 2, 3)]
        results = await on_all(left, lambda c: c.all_reduce(arrays[c.rank], until=Deadline(30.0)))
        assert_alike(results, (0, 2, 3))
        for policy in (Quorum(0.8), Deadline(0.0, at_least=1.0)):  # called when it is known already
            outcomes = await asyncio.gather(
                *(communicator.all_reduce(np.ones(3), until=policy) for communicator in left), return_exceptions=True
            )
            assert [getattr(outcome, "rank", outcome) for outcome in outcomes] == [1, 1, 1]
            assert all(isinstance(outcome, PeerLost) for outcome in outcomes)
        results = await on_all(left, lambda c: c.all_reduce(np.ones(3), until=Quorum(0.75)))
        assert_alike(results, (0, 2, 3))


def test_a_rank_that_waits_for_too_long_says_for_whom() -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            for node in nodes:
                node.world.timeout = 5.0
            running = [
                asyncio.ensure_future(node.world.all_reduce(np.ones(3), until=Quorum(1.0))) for node in nodes[:2]
            ]
            for error in await asyncio.gather(*running, return_exceptions=True):
                assert isinstance(error, PeerTimeout)
                assert error.rank == 2

    run_virtual(main())


def test_a_rank_that_is_cancelled_after_it_was_counted_is_reported_to_the_others() -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            one, two, three = (node.world for node in nodes)

            async def cancelled() -> None:
                async with asyncio.timeout(1.0):
                    await one.all_reduce(np.ones(3), until=Quorum(1.0))

            async def late(communicator: Communicator) -> object:
                await asyncio.sleep(2.0)
                return await communicator.all_reduce(np.ones(3), until=Quorum(1.0))

            outcomes = await asyncio.gather(cancelled(), late(two), late(three), return_exceptions=True)
            assert isinstance(outcomes[0], TimeoutError)
            assert all(isinstance(outcome, PeerCancelled) and outcome.rank == 0 for outcome in outcomes[1:])
            results = await on_all([one, two, three], lambda c: c.all_reduce(np.ones(3), until=Quorum(1.0)))
            assert_alike(results, (0, 1, 2))

    run_virtual(main())


def test_ranks_that_differ_all_raise() -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            one, other = (node.world for node in nodes)
            outcomes = await asyncio.gather(
                one.all_reduce(np.ones(3), until=Quorum(1.0)),
                other.all_reduce(np.ones(4), until=Quorum(1.0)),
                return_exceptions=True,
            )
            assert [type(outcome) for outcome in outcomes] == [OperationMismatch] * 2
            results = await on_all([one, other], lambda c: c.all_reduce(np.ones(3), until=Quorum(1.0)))
            assert_alike(results, (0, 1))

    run_virtual(main())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"until": "most"}, "until"),
        ({"until": Quorum(1.0), "late": "never"}, "late"),
        ({"until": Quorum(1.0), "late": "next", "op": "max"}, "late"),
        ({"until": Quorum(1.0), "op": "median"}, "op"),
        ({"until": Quorum(1.0), "algorithm": "magic"}, "algorithm"),
        ({"until": Quorum(1.0), "stream": 3}, "stream"),
    ],
)
def test_wrong_options_are_refused_and_end_on_the_others(options: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            one, other = (node.world for node in nodes)
            with pytest.raises(UsageError, match=words):
                await one.all_reduce(np.ones(3), **options)
            if words != "stream":
                with pytest.raises(PeerError, match="refused"):
                    await other.all_reduce(np.ones(3), until=Quorum(1.0))

    run_virtual(main())


@pytest.mark.parametrize(
    "make",
    [lambda: Quorum(0.0), lambda: Quorum(1.5), lambda: Quorum(0.5, wait=-1.0), lambda: Deadline(-1.0),
     lambda: Deadline(float("nan")), lambda: Deadline(1.0, at_least=2.0)],
)  # fmt: skip
def test_wrong_policies_are_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


def test_one_rank_is_its_own_quorum() -> None:
    async def main() -> Reduced:
        async with local_world(1) as nodes:
            return await nodes[0].world.all_reduce(np.ones(3), until=Quorum(0.5))

    assert run_virtual(main()).contributors == (0,)


def test_results_go_into_out_and_layouts_are_kept() -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            outs = [np.zeros((4, 3), order="F") for _ in nodes]
            calls = (
                after(
                    5.0 * (node.rank == 1),
                    node.world,
                    np.full((4, 3), node.rank + 1.0),
                    out=outs[node.rank],
                    until=Quorum(0.6),
                )
                for node in nodes
            )
            results = await asyncio.gather(*calls)
            for result, out in zip(results, outs, strict=True):
                assert result.values is out
                assert (out == 4.0).all()

    run_virtual(main())


def test_random_stragglers_never_make_ranks_differ() -> None:
    async def run(communicator: Communicator, seed: int) -> list[tuple[tuple[int, ...], bytes]]:
        rng = np.random.default_rng((seed, communicator.rank))
        found = []
        for step in range(12):
            await asyncio.sleep(float(rng.choice([0.1, 0.1, 0.3])))
            x = noise(communicator.rank + 10 * step, 50)
            result = await communicator.all_reduce(x, "mean", until=Quorum(0.5), late="next")
            found.append((result.contributors, result.values.tobytes()))
        return found

    async def main(seed: int) -> list[Any]:
        async with local_world(5) as nodes:
            return await asyncio.gather(*(run(node.world, seed) for node in nodes))

    for seed in range(8):
        found = run_virtual(main(seed))
        assert all(each == found[0] for each in found), seed
        assert any(len(contributors) < 5 for contributors, _ in found[0])


@pytest.mark.parametrize("ending", ["close", "revoke"])
def test_a_group_that_ends_ends_what_waits_in_it(ending: str) -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            groups = [node.world.subgroup((0, 1)) for node in nodes]
            one, other = (group for group in groups if group is not None)
            waiting = asyncio.ensure_future(one.all_reduce(np.ones(3), until=Quorum(1.0)))
            await asyncio.sleep(1.0)
            getattr(one, ending)()
            with pytest.raises(UsageError if ending == "close" else WorldRevoked):
                await waiting
            with pytest.raises(PeerCancelled if ending == "close" else WorldRevoked):
                await other.all_reduce(np.ones(3), until=Quorum(1.0))

    run_virtual(main())


def test_messages_that_cannot_be_meant_are_refused() -> None:
    good = AcceptChosen((0, 1), (0, 1), Chosen((0, 1), "x"))
    assert decode_contributors(encode_contributors(good), size=2) == good
    wrong = (
        AcceptChosen((0, 2), (0, 1), Chosen((0, 1), "x")),
        AcceptChosen((0, 1), (0, 1), Chosen((0, 5), "x")),
        AcceptChosen((0, 1), (1 << 50, 1), Chosen((0, 1), "x")),
    )
    for payload in (b"", b"abc", *map(encode_contributors, wrong)):
        with pytest.raises(ProtocolError):
            decode_contributors(payload, size=2)
