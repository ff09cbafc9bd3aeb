"""Operations that wait for too long say for whom, and what that rank does instead.  All on virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.long_waits import LongWaits
from asyncpar.collectives.protocol import Status
from asyncpar.errors import PeerCancelled, PeerTimeout, UsageError
from asyncpar.net.wire.frame import Key
from asyncpar.testing import run_virtual
from tests.collectives.conftest import OpenRanks
from tests.soak import chosen


def test_an_operation_without_progress_times_out_and_names_the_missing_rank(open_ranks: OpenRanks) -> None:
    async def main() -> tuple[PeerTimeout, float]:
        async with open_ranks(2, timeout=30.0) as ranks:
            with pytest.raises(PeerTimeout) as caught:
                await ranks.communicators[0].all_reduce(np.zeros(1))
            return caught.value, asyncio.get_running_loop().time()

    error, time = run_virtual(main())
    assert isinstance(error, TimeoutError)
    assert (error.rank, error.host, error.operation) == (1, "localhost", "all_reduce #1")
    assert str(error).startswith("rank 0: all_reduce #1 waited 30.0 s for rank 1 (last heard ")
    assert time == pytest.approx(30.0)


def test_the_message_names_where_the_missing_rank_is_instead(open_ranks: OpenRanks) -> None:
    async def main() -> list[BaseException]:
        async with open_ranks(3, timeout=10.0) as ranks:
            zero, one, two = ranks.communicators
            calls = [
                zero.all_reduce(np.zeros(1), algorithm="ring", key="bucket/7"),
                one.all_reduce(np.zeros(1), algorithm="ring", key="bucket/7"),
                two.all_reduce(np.zeros(1), algorithm="ring", key="bucket/8"),
            ]
            return await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[return-value]

    errors = run_virtual(main())
    texts = [str(error) for error in errors]
    assert 'all_reduce #1 "bucket/7" waited 10.0 s for rank 2' in texts[0]
    assert 'in op #1 "bucket/8" (all_reduce)' in texts[0]
    assert all(isinstance(error, PeerTimeout | PeerCancelled) for error in errors)


def test_a_rank_that_waits_itself_points_to_the_one_it_waits_for(open_ranks: OpenRanks) -> None:
    async def main() -> list[BaseException]:
        async with open_ranks(3, timeout=10.0) as ranks:
            calls = [c.broadcast(np.zeros(1), algorithm="chain") for c in ranks.communicators[1:]]
            return await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[return-value]

    errors = run_virtual(main())
    assert "waited 10.0 s for rank 0" in str(errors[0])
    assert any("for rank 1" in str(error) and "waiting for rank 0" in str(error) for error in errors) or any(
        "failed in it: PeerTimeout: rank 1: broadcast #1 waited 10.0 s for rank 0" in str(error) for error in errors
    )


def test_progress_keeps_a_slow_operation_alive(open_ranks: OpenRanks) -> None:
    async def main() -> float:
        async with open_ranks(2, timeout=10.0) as ranks:
            zero, one = ranks.communicators

            async def trickle() -> None:
                for i in range(5):
                    await asyncio.sleep(9)
                    await zero.send(np.array([float(i)]), 1)

            async def collect() -> float:
                return sum([float((await one.recv(0))[0]) for _ in range(5)])

            return (await asyncio.gather(trickle(), collect()))[1]

    assert run_virtual(main()) == 10.0


def test_without_a_timeout_an_operation_waits_for_ever(open_ranks: OpenRanks) -> None:
    async def main() -> float:
        async with open_ranks(2, timeout=None) as ranks:
            zero, one = ranks.communicators

            async def late() -> Any:
                await asyncio.sleep(10_000)
                return await one.all_reduce(np.ones(1))

            return float((await asyncio.gather(zero.all_reduce(np.ones(1)), late()))[0][0])

    assert run_virtual(main()) == 2.0


def test_the_timeout_can_be_set_and_subgroups_begin_with_it(open_ranks: OpenRanks) -> None:
    async def main() -> float:
        async with open_ranks(2) as ranks:
            world = ranks.communicators[0]
            assert world.timeout == 300.0
            world.timeout = 0.25
            group = world.subgroup((0, 1))
            assert group is not None
            with pytest.raises(PeerTimeout, match=r"waited 0\.2 s for rank 1|waited 0\.3 s for rank 1"):
                await group.barrier()
            with pytest.raises(UsageError, match="timeout: expected a positive number"):
                world.timeout = 0
            return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(0.25)


def test_the_others_are_notified_when_one_rank_gives_up(open_ranks: OpenRanks) -> None:
    async def main() -> BaseException:
        async with open_ranks(3, timeout=5.0) as ranks:
            with pytest.raises(PeerTimeout):
                await ranks.communicators[0].barrier()
            with pytest.raises(PeerCancelled) as caught:
                await ranks.communicators[1].barrier()
            return caught.value

    assert "rank 0 failed in it: PeerTimeout: rank 0: barrier #1 waited 5.0 s for rank" in str(run_virtual(main()))


def test_a_receive_says_where_its_source_is(open_ranks: OpenRanks) -> None:
    async def main() -> str:
        async with open_ranks(2, timeout=20.0) as ranks:
            zero, one = ranks.communicators
            elsewhere = asyncio.ensure_future(zero.barrier(key="other"))
            with pytest.raises(PeerTimeout) as caught:
                await one.recv(0, tag=3)
            elsewhere.cancel()
            await asyncio.wait({elsewhere})
            return str(caught.value)

    text = run_virtual(main())
    assert text.startswith("rank 1: recv from rank 0 (tag 3) waited 20.0 s for rank 0 (last heard ")
    assert 'in op #1 "other" (barrier)' in text


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("differs", ["ranks", "key"])
def test_ranks_that_made_different_groups_learn_what_the_others_wait_for(
    open_ranks: OpenRanks, differs: str, key: str | None
) -> None:
    """They cannot be told from ranks that come late before the time is up."""

    async def main() -> list[BaseException]:
        async with open_ranks(3, timeout=10.0) as ranks:
            calls = []
            for communicator in ranks.communicators:
                is_odd = communicator.rank == 1
                members = (0, 1) if differs == "ranks" and is_odd else (0, 1, 2)
                group = communicator.subgroup(members, key="other" if differs == "key" and is_odd else key)
                assert group is not None
                calls.append(group.all_reduce(np.zeros(1), algorithm="ring"))
            return await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[return-value]

    errors = run_virtual(main())
    assert all(isinstance(error, PeerTimeout | PeerCancelled) for error in errors)
    named = "of group of ranks 0,1," if differs == "ranks" else "of group of ranks 0,1,2,"
    for error in (errors[0], errors[2]):
        assert f"in op #1 (all_reduce) {named} waiting for rank 0, and has made no such group" in str(error)
    assert "rank 1: all_reduce #1 waited 10.0 s for rank 0 (last heard" in str(errors[1])
    assert "in op #1 (all_reduce) of group of ranks 0,1,2, waiting for rank" in str(errors[1])


def test_many_operations_that_wait_cost_each_other_nothing(
    open_ranks: OpenRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is asked about and answered; an answer must not be told to all others at once."""
    count, looks = chosen(100, soak=300), 0
    status = LongWaits._status  # noqa: SLF001  # counts how often a rank looks up a status: the number of looks is no statistic

    def counted(waits: LongWaits, key: Key, asker: int) -> Status:
        nonlocal looks
        looks += 1
        return status(waits, key, asker)

    monkeypatch.setattr(LongWaits, "_status", counted)  # what an answer costs

    async def run() -> None:
        async with open_ranks(2) as ranks:
            started: list[asyncio.Future[Any]] = []

            async def use(world: Communicator) -> None:
                for turn in (world.rank, 1 - world.rank):  # so all wait for each other
                    calls = [world.all_reduce(np.ones(1), key=f"{turn}/{index}") for index in range(count)]
                    started.extend(asyncio.ensure_future(call) for call in calls)
                    await asyncio.sleep(3.0)

            await asyncio.gather(*(use(world) for world in ranks.communicators))
            await asyncio.gather(*started)

    run_virtual(run())
    assert count < looks < 40 * count
