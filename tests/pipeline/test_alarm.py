"""Ranks that run a block together fail in it together, soon, and with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.errors import PeerCancelled, PeerLost, PeerTimeout, ProtocolError, UsageError, WorldRevoked
from asyncpar.pipeline.alarm import StepAlarm, StepFailed
from asyncpar.pipeline.errors import Mailing
from tests.pipeline.worlds import Ranks, in_virtual_time, outcomes

Body = Callable[[int], Awaitable[Any]]


async def watched(alarm: StepAlarm, body: Awaitable[Any]) -> Any:
    async with alarm.watch():
        return await body


def alarms_of(ranks: Ranks, **options: Any) -> list[StepAlarm]:
    return [StepAlarm(communicator, **options) for communicator in ranks.communicators]


async def step(alarms: list[StepAlarm], body: Body) -> list[Any]:
    """Run ``body`` of each rank in its block, and return what comes of it."""
    return await outcomes([watched(alarm, body(rank)) for rank, alarm in enumerate(alarms)])


async def wait_in(alarm: StepAlarm) -> None:
    async with alarm.watch():
        await never()


async def never() -> None:
    await asyncio.Event().wait()


def now() -> float:
    return asyncio.get_running_loop().time()


def fails_at(culprits: dict[int, float]) -> Body:
    """Rank by rank: fail after so many seconds, or wait for ever."""

    async def body(rank: int) -> None:
        if rank not in culprits:
            await never()
        await asyncio.sleep(culprits[rank])
        raise ValueError(f"fault of {rank}")

    return body


async def test_a_block_in_which_all_come_to_the_end_returns() -> None:
    async with ap.testing.local_world(3) as nodes:
        alarms = [StepAlarm(node.world) for node in nodes]

        async def body(rank: int) -> int:
            return rank

        for _ in range(3):
            assert await step(alarms, body) == [0, 1, 2]


def test_a_failure_ends_the_block_of_all_others_and_names_rank_and_reason() -> None:
    async def main(ranks: Ranks) -> tuple[list[Any], float]:
        return await step(alarms_of(ranks), fails_at({1: 5.0})), now()

    (zero, one, two), ended = in_virtual_time(3, main)
    assert ended == 5.0
    assert isinstance(one, ValueError)
    for error in (zero, two):
        assert isinstance(error, StepFailed)
        assert (error.rank, error.cause) == (1, "ValueError: fault of 1")
    assert str(zero) == "rank 0: step #1 of world alarm has ended: rank 1 failed: ValueError: fault of 1"


def test_two_failures_at_once_are_two_errors_and_the_third_rank_names_one() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        return await step(alarms_of(ranks), fails_at({0: 1.0, 2: 1.0}))

    zero, one, two = in_virtual_time(3, main)
    assert str(zero) == "fault of 0"
    assert str(two) == "fault of 2"
    assert isinstance(one, StepFailed)
    assert one.rank in (0, 2)


def test_a_cancelled_rank_ends_at_once_and_the_others_learn_that_it_was_cancelled() -> None:
    async def main(ranks: Ranks) -> tuple[list[Any], float]:
        alarms = alarms_of(ranks)
        tasks = [asyncio.create_task(watched(alarm, never())) for alarm in alarms]
        await asyncio.sleep(3.0)
        tasks[2].cancel()
        return await outcomes(tasks), now()

    (zero, one, two), ended = in_virtual_time(3, main)
    assert ended == 3.0
    assert isinstance(two, asyncio.CancelledError)
    for error in (zero, one):
        assert isinstance(error, StepFailed)
        assert "rank 2 was cancelled" in str(error)
        assert error.rank == 2


def test_a_cancelled_rank_waits_for_no_peer_that_is_hung() -> None:
    async def main(ranks: Ranks) -> float:
        alarms = alarms_of(ranks)
        first = asyncio.create_task(watched(alarms[0], never()))
        await asyncio.sleep(1.0)  # rank 1 never enters the block: it is stuck somewhere else
        first.cancel()
        await asyncio.wait([first])
        return now()

    assert in_virtual_time(2, main) == 1.0


def test_a_rank_that_is_killed_ends_the_block_of_everyone() -> None:
    async def main(ranks: Ranks) -> tuple[list[Any], float]:
        alarms = alarms_of(ranks)
        tasks = [asyncio.create_task(watched(alarm, never())) for alarm in alarms]
        await asyncio.sleep(2.0)
        ranks.kill(1)
        errors = await outcomes([tasks[0], tasks[2]])
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        return errors, now()

    errors, ended = in_virtual_time(3, main)
    assert ended == 2.0
    for error in errors:
        assert isinstance(error, PeerLost)
        assert error.rank == 1


def test_the_block_after_a_failed_one_works() -> None:
    async def fine(rank: int) -> str:
        await asyncio.sleep(rank)
        return "fine"

    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)
        seen = []
        for culprits in ({0: 1.0}, {0: 0.0, 1: 0.0, 2: 0.0}, {2: 2.0}):
            errors = await step(alarms, fails_at(culprits))
            assert all(isinstance(error, (StepFailed, ValueError)) for error in errors)
            seen.append(await step(alarms, fine))
        return seen

    assert in_virtual_time(3, main) == [["fine"] * 3] * 3


def test_a_failure_in_a_block_that_another_rank_has_not_entered_meets_it_there() -> None:
    async def main(ranks: Ranks) -> tuple[Any, Any, bool]:
        alarms = alarms_of(ranks)
        await step(alarms, lambda _: asyncio.sleep(0))
        with pytest.raises(ValueError, match="fault of 0"):
            await watched(alarms[0], fails_at({0: 0.0})(0))
        await asyncio.sleep(10.0)
        has_run = False

        async def body() -> None:
            nonlocal has_run
            has_run = True

        coroutine = body()
        with pytest.raises(StepFailed, match="step #2 of world alarm has ended: rank 0 failed") as caught:
            await watched(alarms[1], coroutine)
        coroutine.close()
        return caught.value, now(), has_run

    error, ended, has_run = in_virtual_time(2, main)
    assert (error.rank, ended, has_run) == (0, 10.0, False)


def test_nobody_leaves_the_block_while_another_can_still_fail() -> None:
    left: list[int] = []

    async def body(rank: int) -> None:
        if rank == 2:
            await fails_at({2: 50.0})(2)

    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)

        async def run(rank: int) -> None:
            await watched(alarms[rank], body(rank))
            left.append(rank)

        return await outcomes([run(rank) for rank in range(3)])

    zero, one, two = in_virtual_time(3, main)
    assert left == []
    assert isinstance(two, ValueError)
    assert isinstance(zero, StepFailed)
    assert isinstance(one, StepFailed)
    assert zero.cause == one.cause == "ValueError: fault of 2"


def test_an_echo_is_not_taken_for_the_origin() -> None:
    """Rank 1 fails; rank 2 waits for rank 0 only, which is cancelled because of rank 1: both name rank 1."""

    async def main(ranks: Ranks) -> list[Any]:
        world = ranks.communicators
        pairs = [communicator.subgroup([0, 2]) for communicator in world]

        async def body(rank: int) -> None:
            pair = pairs[rank]
            if pair is None:
                await fails_at({1: 1.0})(1)
            elif rank == 2:
                await pair.all_reduce(np.ones(3))
            else:
                await asyncio.gather(pair.all_reduce(np.ones(3)), never())

        return await step(alarms_of(ranks), body)

    zero, one, two = in_virtual_time(3, main)
    assert isinstance(one, ValueError)
    for error in (zero, two):
        assert isinstance(error, StepFailed)
        assert error.rank == 1


def test_an_echo_without_origin_is_reported_after_the_grace() -> None:
    """A rank that leaves an operation alone, but not the block, is no origin."""

    async def main(ranks: Ranks) -> tuple[list[Any], float]:
        async def body(rank: int) -> None:
            if rank == 0:
                await ranks.communicators[0].all_reduce(np.ones(3))
            elif rank == 1:
                call = asyncio.create_task(ranks.communicators[1].all_reduce(np.ones(3)))
                await asyncio.sleep(1.0)
                call.cancel()
                await asyncio.wait([call])
            await never()

        return await step(alarms_of(ranks, grace=4.0), body), now()

    (zero, one, two), ended = in_virtual_time(3, main)
    assert isinstance(zero, PeerCancelled)
    for error in (one, two):
        assert isinstance(error, StepFailed)
    assert zero.rank == 1
    assert ended == 5.0


def test_a_quiet_block_may_take_longer_than_operations_may_wait() -> None:
    async def body(rank: int) -> float:
        await asyncio.sleep(1000.0)
        return now()

    async def main(ranks: Ranks) -> list[Any]:
        return await step(alarms_of(ranks), body)

    assert in_virtual_time(2, main, timeout=30.0) == [1000.0, 1000.0]


def test_a_failure_is_heard_after_a_quiet_time_longer_than_the_timeout() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        return await step(alarms_of(ranks), fails_at({1: 1000.0}))

    zero, _ = in_virtual_time(2, main, timeout=30.0)
    assert isinstance(zero, StepFailed)


def test_a_rank_that_never_comes_to_the_end_is_named_after_the_timeout() -> None:
    async def body(rank: int) -> None:
        if rank == 1:
            await never()

    async def main(ranks: Ranks) -> list[Any]:
        return await step(alarms_of(ranks), body)

    zero, one, two = in_virtual_time(3, main, timeout=30.0)
    for error in (zero, two):
        assert isinstance(error, (PeerTimeout, StepFailed))
        assert error.rank == 1
    assert isinstance(one, StepFailed)
    assert "PeerTimeout" in str(one)


def test_a_rank_that_leaves_the_world_in_good_order_ends_the_block() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)
        await step(alarms, lambda _: asyncio.sleep(0))
        tasks = [asyncio.create_task(watched(alarm, asyncio.sleep(1.0))) for alarm in alarms[:2]]
        await asyncio.sleep(0.5)
        await ranks.links[2].close()
        return await outcomes(tasks)

    for error in in_virtual_time(3, main):
        assert isinstance(error, PeerLost)
        assert error.rank == 2


@pytest.mark.parametrize("close_first", [False, True])
def test_a_rank_that_fails_and_goes_at_once_has_told_why(close_first: bool) -> None:
    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)
        await step(alarms, lambda _: asyncio.sleep(0))

        async def fail_and_go() -> None:
            try:
                await watched(alarms[1], fails_at({1: 1.0})(1))
            finally:
                if close_first:
                    await alarms[1].close()
                await ranks.links[1].close()

        return await outcomes([watched(alarms[0], never()), fail_and_go(), watched(alarms[2], never())])

    zero, one, two = in_virtual_time(3, main)
    assert isinstance(one, ValueError)
    for error in (zero, two):
        assert isinstance(error, StepFailed)
        assert error.cause == "ValueError: fault of 1"


def test_a_loss_that_only_one_rank_has_seen_is_a_loss_to_all() -> None:
    async def body(rank: int) -> None:
        if rank == 1:
            raise PeerLost("rank 7 is lost: it was unplugged", rank=7, cause="it was unplugged")
        await never()

    async def main(ranks: Ranks) -> list[Any]:
        return await step(alarms_of(ranks), body)

    zero, one, two = in_virtual_time(3, main)
    assert one.cause == "it was unplugged"
    for error in (zero, two):
        assert isinstance(error, PeerLost)
        assert error.rank == 7
        assert str(error.cause).endswith("it was unplugged (reported by rank 1)")


def test_what_is_no_mailing_ends_the_block() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)

        async def body(rank: int) -> None:
            if rank == 1:
                alarms[1]._channel.post(Mailing(), [0])  # noqa: SLF001  # posts a mailing that no step would: it names no notice and no word
            await never()

        return await step(alarms, body)

    zero, one = in_virtual_time(2, main)
    assert isinstance(zero, ProtocolError)
    assert isinstance(one, StepFailed)
    assert "ProtocolError: the channel of an alarm received" in str(one)


def test_closing_waits_for_no_peer_that_is_hung() -> None:
    async def main(ranks: Ranks) -> float:
        alarm = alarms_of(ranks)[0]
        ranks.links[1].link(0)  # rank 1 makes no communicator calls at all
        with pytest.raises(ValueError, match="fault"):
            await watched(alarm, fails_at({0: 1.0})(0))
        await alarm.close()
        await alarm.close()
        return now()

    assert in_virtual_time(2, main) <= 3.0


def test_alarms_may_be_nested_and_an_inner_failure_keeps_its_reason() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        outer = alarms_of(ranks)
        pairs = [communicator.subgroup([0, 1]) for communicator in ranks.communicators]
        inner = [None if pair is None else StepAlarm(pair) for pair in pairs]

        async def body(rank: int) -> None:
            alarm = inner[rank]
            if alarm is None:
                await never()
            else:
                await watched(alarm, fails_at({1: 1.0})(rank))

        return await step(outer, body)

    zero, one, two = in_virtual_time(3, main)
    assert isinstance(one, ValueError)
    for error in (zero, two):
        assert isinstance(error, StepFailed)
        assert error.rank == 1
        assert error.cause == "ValueError: fault of 1"


def test_a_cancelled_block_stays_cancelled_when_another_rank_fails_too() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)
        tasks = [asyncio.create_task(watched(alarm, fails_at({0: 1.0})(rank))) for rank, alarm in enumerate(alarms)]

        def cancel_both() -> None:
            tasks[1].cancel()

        asyncio.get_running_loop().call_later(1.0, cancel_both)
        return await outcomes(tasks)

    zero, one = in_virtual_time(2, main)
    assert isinstance(zero, ValueError)
    assert isinstance(one, (asyncio.CancelledError, StepFailed))


def test_a_cancellation_is_not_lost_behind_an_echo() -> None:
    async def body() -> None:
        try:
            await never()
        except asyncio.CancelledError:
            raise PeerCancelled("an operation has failed at the same time") from None

    async def main(ranks: Ranks) -> tuple[list[Any], float]:
        alarms = alarms_of(ranks)
        tasks = [asyncio.create_task(watched(alarms[0], body())), asyncio.create_task(watched(alarms[1], never()))]
        await asyncio.sleep(1.0)
        tasks[0].cancel()
        return await outcomes(tasks), now()

    (zero, one), ended = in_virtual_time(2, main)
    assert isinstance(zero, asyncio.CancelledError)
    assert isinstance(one, StepFailed)
    assert one.cause == "it was cancelled"
    assert ended == 1.0


def test_a_group_that_was_given_up_is_an_error_each_time() -> None:
    async def main(ranks: Ranks) -> None:
        alarm = StepAlarm(ranks.communicators[0])
        alarm._group.give_up(1, "it is of no use")  # noqa: SLF001  # the alarm works on a group of its own, which it hands to nobody
        for _ in range(2):
            with pytest.raises(PeerCancelled, match="given up, because it is of no use"):
                async with alarm.watch():
                    pytest.fail("it was entered")

    in_virtual_time(2, main)


def test_a_deadline_around_the_block_still_works() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)

        async def impatient() -> None:
            async with asyncio.timeout(1.0):
                await watched(alarms[0], never())

        return await outcomes([impatient(), watched(alarms[1], never())])

    zero, one = in_virtual_time(2, main)
    assert type(zero) is TimeoutError
    assert isinstance(one, StepFailed)


# -- exchanges of ranks in a block ------------------------------------------------------------------------------------


def test_ranks_exchange_values_within_a_block() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)

        async def body(rank: int) -> Any:
            await asyncio.sleep(rank)
            first = await alarms[rank].exchange("rank", rank, [0, 1, 2])
            pair = await alarms[rank].exchange("pair", [rank, "x"], [2, 0]) if rank != 1 else None
            return first, pair

        return await step(alarms, body)

    pair = [[2, "x"], [0, "x"]]
    assert in_virtual_time(3, main) == [([0, 1, 2], pair), ([0, 1, 2], None), ([0, 1, 2], pair)]


def test_words_of_a_failed_block_are_not_heard_in_the_next() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)

        async def failing(rank: int) -> None:
            if rank == 2:
                await fails_at({2: 1.0})(2)
            await alarms[rank].exchange("topic", f"old {rank}", [0, 1, 2])

        async def fine(rank: int) -> Any:
            return await alarms[rank].exchange("topic", f"new {rank}", [0, 1, 2])

        for _ in range(3):
            await step(alarms, failing)
        assert len(alarms[0]._words) <= 1  # noqa: SLF001  # old words that stay show nowhere but in memory
        return await step(alarms, fine)

    assert in_virtual_time(3, main) == [["new 0", "new 1", "new 2"]] * 3


def test_a_word_of_a_rank_that_is_ahead_is_kept_for_its_block() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)

        async def run(rank: int) -> Any:
            try:
                async with alarms[rank].watch():
                    if rank == 0:
                        raise ValueError("fault")
                    await never()
            except (ValueError, StepFailed):
                await asyncio.sleep(5.0 * rank)
            async with alarms[rank].watch():
                return await alarms[rank].exchange("topic", rank, [0, 1])

        return await outcomes([run(0), run(1)])

    assert in_virtual_time(2, main) == [[0, 1], [0, 1]]


def test_a_rank_that_says_nothing_is_named_after_the_timeout() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        alarms = alarms_of(ranks)

        async def body(rank: int) -> Any:
            if rank == 1:
                await never()
            return await alarms[rank].exchange("topic", rank, [0, 1, 2])

        return await step(alarms, body)

    zero, one, two = in_virtual_time(3, main, timeout=30.0)
    for error in (zero, two):
        assert isinstance(error, (PeerTimeout, StepFailed))
        assert error.rank == 1
    assert isinstance(one, StepFailed)


@pytest.mark.parametrize("moment", [0.5, 1.5, 20.0])
def test_a_rank_that_leaves_in_good_order_ends_the_exchange(moment: float) -> None:
    async def main(ranks: Ranks) -> tuple[list[Any], float]:
        alarms = alarms_of(ranks)
        await step(alarms, lambda _: asyncio.sleep(0))
        tasks = [asyncio.create_task(watched(alarm, alarm.exchange("topic", 0, [0, 1, 2]))) for alarm in alarms[:2]]
        await asyncio.sleep(moment)
        await ranks.links[2].close()
        return await outcomes(tasks), now()

    errors, ended = in_virtual_time(3, main)
    assert ended <= max(1.0, moment)
    for error in errors:
        assert isinstance(error, PeerLost)
        assert error.rank == 2


async def test_an_exchange_outside_a_block_or_with_strangers_is_refused() -> None:
    async with ap.testing.local_world(1) as (node,):
        alarm = StepAlarm(node.world)
        with pytest.raises(UsageError, match="expected to be used within a block that it watches"):
            await alarm.exchange("topic", 1, [0])
        async with alarm.watch():
            with pytest.raises(UsageError, match=r"ranks: expected some of \(0,\), got \(0, 1\)"):
                await alarm.exchange("topic", 1, [0, 1])


async def test_a_world_of_one_needs_no_others() -> None:
    async with ap.testing.local_world(1) as (node,):
        alarm = StepAlarm(node.world)
        async with alarm.watch():
            pass
        with pytest.raises(KeyError):
            async with alarm.watch():
                raise KeyError("x")


async def test_blocks_of_one_alarm_do_not_nest() -> None:
    async with ap.testing.local_world(1) as (node,):
        alarm = StepAlarm(node.world)
        with pytest.raises(UsageError, match="one block at a time"):
            async with alarm.watch(), alarm.watch():
                pytest.fail("it was entered twice")
        async with alarm.watch():
            pass


async def test_a_negative_grace_is_refused() -> None:
    async with ap.testing.local_world(1) as (node,):
        with pytest.raises(UsageError, match="grace: expected 0 or more seconds, got -1"):
            StepAlarm(node.world, grace=-1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_over_real_sockets_and_shared_memory_it_is_the_same(transport: str) -> None:
    async with ap.testing.local_world(3, transport=transport) as nodes:
        alarms = [StepAlarm(node.world) for node in nodes]

        async def body(rank: int) -> str:
            x = np.ones(1000, np.float32)
            await nodes[rank].world.all_reduce(x)
            return str(x[0])

        async def failing(rank: int) -> None:
            await body(rank)
            if rank == 1:
                raise ValueError("fault of 1")
            await nodes[rank].world.recv((rank + 1) % 3)

        for _ in range(3):
            assert await step(alarms, body) == ["3.0"] * 3
            zero, one, two = await step(alarms, failing)
            assert isinstance(one, ValueError)
            assert (zero.cause, two.cause) == ("ValueError: fault of 1", "ValueError: fault of 1")
        await asyncio.gather(*(alarm.close() for alarm in alarms))


@pytest.mark.parametrize("is_under_way", [True, False])
def test_a_revoked_group_ends_the_block_on_all_ranks_and_nothing_listens_any_more(is_under_way: bool) -> None:
    """A reception that began anew after each error would never let the loop rest."""

    async def main(ranks: Ranks) -> tuple[list[Any], float]:
        alarms = alarms_of(ranks)
        await step(alarms, lambda _: asyncio.sleep(0))
        if is_under_way:
            asyncio.get_running_loop().call_later(1.0, ranks.communicators[1].revoke, "enough")
        else:
            ranks.communicators[1].revoke("enough")
            await asyncio.sleep(1.0)
        errors = await outcomes([wait_in(alarm) for alarm in alarms])
        ended = now()
        for alarm in alarms:
            with pytest.raises(WorldRevoked):
                async with alarm.watch():
                    pass
            await alarm.close()
        return errors, ended

    errors, ended = in_virtual_time(3, main)
    assert ended < 1.5
    for error in errors:
        assert isinstance(error, WorldRevoked)
        assert error.revoked_by == 1
