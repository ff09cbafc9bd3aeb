"""Conformance of communicators: order, keys, messages, sub-groups, and disagreement of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import Name
from asyncpar.errors import OperationMismatch, PeerCancelled, UsageError
from asyncpar.testing.collective_worlds import CommunicatorSuite, errors_on_all, on_all, ranked, values


class OrderingSuite(CommunicatorSuite):
    """Promises of all operations."""

    async def test_operations_keep_the_order_in_which_they_are_called(self) -> None:
        async with self.connect(3) as communicators:

            async def run(communicator: Communicator) -> tuple[float, float]:
                first = communicator.all_reduce(np.array([1.0]))
                second = communicator.all_reduce(np.array([10.0]))
                later = await second
                return float((await first)[0]), float(later[0])

            assert await on_all(communicators, run) == [(3.0, 30.0)] * len(communicators)

    async def test_several_operations_are_in_flight_at_once(self) -> None:
        async with self.connect(4) as communicators:

            async def run(communicator: Communicator) -> list[float]:
                calls = [communicator.all_reduce(np.full(50_000, float(i))) for i in range(6)]
                return [float(result[-1]) for result in await asyncio.gather(*calls)]

            assert await on_all(communicators, run) == [[4.0 * i for i in range(6)]] * len(communicators)

    async def test_keys_match_operations_issued_in_any_order(self) -> None:
        async with self.connect(3) as communicators:

            async def run(communicator: Communicator) -> dict[str, list[float]]:
                names = ["a", "b", "c"] * 2
                names = names[communicator.rank :] + names[: communicator.rank]
                numbers = {"a": 1.0, "b": 10.0, "c": 100.0}
                calls = [communicator.all_reduce(np.array([numbers[name]]), key=name) for name in names]
                results: dict[str, list[float]] = {"a": [], "b": [], "c": []}
                for name, result in zip(names, await asyncio.gather(*calls), strict=True):
                    results[name].append(float(result[0]))
                return results

            expected = {"a": [3.0] * 2, "b": [30.0] * 2, "c": [300.0] * 2}
            assert await on_all(communicators, run) == [expected] * len(communicators)

    async def test_messages_arrive_in_order_by_source_and_tag(self) -> None:
        async with self.connect(3) as communicators:

            async def run(communicator: Communicator) -> list[float]:
                if communicator.rank:
                    for i in range(3):
                        for tag in (0, 7):
                            await communicator.send(np.array([100.0 * communicator.rank + 10 * i + tag]), 0, tag=tag)
                    return []
                calls = [(source, tag) for tag in (7, 0) for source in (2, 1) for _ in range(3)]
                return [float((await communicator.recv(source, tag=tag))[0]) for source, tag in calls]

            expected = [100.0 * source + 10 * i + tag for tag in (7, 0) for source in (2, 1) for i in range(3)]
            for rank, result in ranked(communicators, await on_all(communicators, run)):
                assert result == (expected if rank == 0 else [])

    async def test_a_large_message_waits_for_its_receiver(self) -> None:
        async with self.connect(2) as communicators:

            async def run(communicator: Communicator) -> float:
                if communicator.rank == 0:
                    await communicator.send(values(0, 2_000_000), 1)
                    return 0.0
                out = np.empty(2_000_000)
                assert await communicator.recv(0, out=out) is out
                return float(np.abs(out - values(0, 2_000_000)).max())

            assert await on_all(communicators, run) == [0.0] * len(communicators)

    async def test_messages_of_any_source_are_all_received(self) -> None:
        async with self.connect(4) as communicators:

            async def run(communicator: Communicator) -> dict[int, list[float]]:
                received: dict[int, list[float]] = {1: [], 2: [], 3: []}
                if communicator.rank:
                    for i in range(3):
                        await communicator.send(np.array([float(i)]), 0)
                    return received
                for _ in range(9):
                    source, array = await communicator.recv_any()
                    received[source].append(float(array[0]))
                return received

            for rank, result in ranked(communicators, await on_all(communicators, run)):
                assert all(got == ([0, 1, 2] if rank == 0 else []) for got in result.values())

    async def test_split_makes_groups_by_color_in_the_order_of_keys(self) -> None:
        async with self.connect(5) as communicators:

            async def run(communicator: Communicator) -> tuple[tuple[int, ...], float]:
                color = None if communicator.rank == 4 else communicator.rank % 2
                group = await communicator.split(color, -communicator.rank)
                if group is None:
                    return (), 0.0
                return group.ranks, float((await group.all_reduce(np.array([float(communicator.rank)])))[0])

            expected = [((2, 0), 2.0), ((3, 1), 4.0), ((2, 0), 2.0), ((3, 1), 4.0), ((), 0.0)]
            for rank, result in ranked(communicators, await on_all(communicators, run)):
                assert result == expected[rank]

    async def test_subgroups_work_side_by_side_with_their_parent(self) -> None:
        async with self.connect(4) as communicators:

            async def run(communicator: Communicator) -> list[float]:
                x = np.array([float(communicator.rank)])
                calls = [communicator.all_reduce(x.copy())]
                for ranks in ((0, 1), (2, 3), (1, 2, 3)):
                    group = communicator.subgroup(ranks)
                    if group is not None:
                        calls.append(group.all_reduce(x.copy()))
                return [float(result[0]) for result in await asyncio.gather(*calls)]

            expected = [[6, 1], [6, 1, 6], [6, 5, 6], [6, 5, 6]]
            for rank, result in ranked(communicators, await on_all(communicators, run)):
                assert result == expected[rank]

    async def test_different_operations_are_an_error_on_both_ranks_that_names_both(self) -> None:
        async with self.connect(2) as communicators:

            async def run(communicator: Communicator) -> object:
                x = np.zeros(8, np.float32)
                return await (communicator.all_reduce(x) if communicator.rank == 0 else communicator.broadcast(x))

            for error in await errors_on_all(communicators, run):
                assert isinstance(error, OperationMismatch)
                assert "rank 0 calls all_reduce(float32[8], sum)" in str(error)
                assert "rank 1 calls broadcast(float32[8], root=0)" in str(error)

    async def test_after_a_mismatch_the_group_stays_usable(self) -> None:
        async with self.connect(3) as communicators:
            shapes = (4, 4, 5)
            await errors_on_all(communicators, lambda c: c.all_reduce(np.zeros(shapes[c.rank])))
            for result in await on_all(communicators, lambda c: c.all_reduce(np.ones(6))):
                np.testing.assert_array_equal(result, 3.0)

    async def test_cancelling_on_one_rank_ends_the_operation_on_all(self) -> None:
        async with self.connect(3) as communicators:

            async def run(communicator: Communicator) -> str:
                x = np.ones(200_000)  # so long that no rank completes it before rank 0 has done more than begin
                if communicator.rank == 0:
                    try:
                        async with asyncio.timeout(0):
                            await communicator.all_reduce(x)
                    except TimeoutError:
                        return "timeout"
                try:
                    await communicator.all_reduce(x)
                except PeerCancelled as error:
                    return f"cancelled by {error.rank}"
                return "through"

            for rank, result in ranked(communicators, await on_all(communicators, run)):
                assert result == ("cancelled by 0" if rank else "timeout")
            await on_all(communicators, lambda c: c.barrier())

    async def test_wrong_arguments_are_refused_before_anything_is_sent(self) -> None:
        async with self.connect(2) as communicators:
            x = np.zeros(4)
            wrong: tuple[Callable[[Communicator], object], ...] = (
                lambda c: c.all_reduce([1.0]),  # type: ignore[call-overload]
                lambda c: c.all_reduce(x, Name("average")),
                lambda c: c.all_reduce(x, algorithm=Name("star")),
                lambda c: c.all_reduce(np.zeros(4, object)),
                lambda c: c.all_reduce(np.zeros(4, int), "mean"),
                lambda c: c.all_reduce(x, "bxor"),
                lambda c: c.broadcast(x, root=2),
                lambda c: c.all_gather(x, out=np.zeros(8)),
                lambda c: c.all_to_all(np.zeros((3, 2))),
                lambda c: c.send(x, c.rank),
            )
            for call in wrong:
                for communicator in communicators:
                    try:
                        call(communicator)
                    except UsageError:
                        continue
                    raise AssertionError("expected a UsageError")
            for result in await on_all(communicators, lambda c: c.all_reduce(np.ones(4))):
                np.testing.assert_array_equal(result, 2.0)
