"""A rank that is gone ends every operation of its groups, and is named."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncpar.errors import PeerLost, PeerTimeout
from asyncpar.net.transport.links import LEFT
from asyncpar.runner import is_left_behind
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.collectives.conftest import OpenRanks, Ranks


async def connect_all(ranks: Ranks) -> None:
    """Bring all links up."""
    size = len(ranks.communicators)
    await asyncio.gather(*(c.all_to_all(np.zeros(size), algorithm="pairwise") for c in ranks.communicators))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [1, 3_000_000])
async def test_every_survivor_names_rank_host_operation_and_cause(open_ranks: OpenRanks, count: int) -> None:
    async with open_ranks(4, hosts=("a", "a", "b", "b")) as ranks:
        await connect_all(ranks)
        survivors = [rank for rank in range(4) if rank != 2]
        tasks = [asyncio.ensure_future(ranks.communicators[rank].all_reduce(np.zeros(count))) for rank in survivors]
        await settle()
        ranks.kill(2)
        for rank, error in zip(survivors, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
            assert isinstance(error, PeerLost)
            assert (error.rank, error.host, error.operation) == (2, "b", "all_reduce #2")
            assert error.cause is not None
            assert error.cause.startswith("the peer closed its end")
            assert str(error) == f"rank {rank}: all_reduce #2: rank 2 on b is lost: {error.cause}"


async def test_all_pending_operations_fail_and_new_ones_fail_at_once(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        await connect_all(ranks)
        zero = ranks.communicators[0]
        tasks = [
            asyncio.ensure_future(call)
            for call in (zero.barrier(), zero.all_gather(np.zeros(2)), zero.recv(1), zero.recv(), zero.barrier(key="k"))
        ]
        await settle()
        ranks.kill(1)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, PeerLost)
            assert error.rank == 1
        for call in (zero.barrier(), zero.send(np.zeros(1), 1), zero.recv(1), zero.recv()):
            with pytest.raises(PeerLost, match="rank 1"):
                await call


async def test_groups_without_the_lost_rank_go_on(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        await connect_all(ranks)
        pair = [ranks.communicators[rank].subgroup((0, 2)) for rank in (0, 2)]
        calls = [asyncio.ensure_future(one.all_reduce(np.ones(200_000))) for one in pair if one is not None]
        ranks.kill(1)
        for result in await asyncio.gather(*calls):
            assert float(result[-1]) == 2.0


async def test_a_rank_nobody_is_linked_to_yet_is_found_lost(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        ranks.fabric.leave(1)
        with pytest.raises(PeerLost, match=r"rank 0: barrier #1: rank 1 on localhost is lost: it left the process"):
            await ranks.communicators[0].barrier()


async def test_a_rank_that_left_in_good_order_does_not_disturb_what_needs_it_no_more(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        await connect_all(ranks)
        zero, *others = ranks.communicators
        waiting = [asyncio.ensure_future(c.broadcast(np.zeros(1), algorithm="chain")) for c in others]
        await settle()
        await zero.broadcast(np.ones(1), algorithm="chain")
        await ranks.links[0].close()
        for result in await asyncio.gather(*waiting):
            assert float(result[0]) == 1.0
        with pytest.raises(PeerLost, match="rank 0 on localhost is lost: it left the world"):
            await others[0].barrier()


async def test_an_operation_that_needs_a_rank_that_left_names_it_everywhere(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        await connect_all(ranks)
        waiting = [asyncio.ensure_future(c.broadcast(np.zeros(1), algorithm="chain")) for c in ranks.communicators[1:]]
        await settle()
        await ranks.links[0].close()
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, PeerLost)
            assert error.rank == 0
            assert error.cause is not None
            assert error.cause.startswith("it left the world")


@pytest.mark.parametrize(("cause", "reported"), [(LEFT, 0), ("its process ended", 0), ("its process ended", 1)])
async def test_a_rank_that_left_has_left_whichever_rank_says_so(
    open_ranks: OpenRanks, cause: str, reported: int
) -> None:
    """A launcher and a program tell a planned end from a failure by the cause."""
    async with open_ranks(3) as ranks:
        await connect_all(ranks)
        waiting = [asyncio.ensure_future(c.broadcast(np.zeros(1), algorithm="chain")) for c in ranks.communicators[1:]]
        await settle()
        if cause == LEFT:
            ranks.links[1 + reported].report_left(0)
        else:
            ranks.links[1 + reported].report_lost(0, cause)
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, PeerLost)
            causes = {cause} if cause == LEFT else {cause, f"{cause} (reported by rank {1 + reported})"}
            assert error.rank == 0
            assert error.cause in causes
            assert is_left_behind(error) is (cause == LEFT)


async def test_what_a_rank_sent_before_it_left_can_still_be_received(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        await connect_all(ranks)
        await zero.send(np.ones(3), 1)
        await ranks.links[0].close()
        np.testing.assert_array_equal(await one.recv(0), 1.0)
        with pytest.raises(PeerLost, match="it left the world"):
            await one.recv(0)


async def test_closing_the_own_node_ends_what_waits(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        await connect_all(ranks)
        zero = ranks.communicators[0]
        waiting = [asyncio.ensure_future(call) for call in (zero.barrier(), zero.recv(), zero.recv(2))]
        await settle()
        await ranks.links[0].close()
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, PeerLost)
            assert error.cause == "closed"
        with pytest.raises(PeerLost, match="this node is closed"):
            await zero.barrier()
        with pytest.raises(PeerLost, match="this node is closed"):
            await zero.recv()


@pytest.mark.parametrize("key", [None, "k"])
def test_a_link_that_two_ranks_lose_ends_the_operation_on_all(key: str | None) -> None:
    """Nobody else sees it: rank 1 would wait for ranks that have left."""

    async def main() -> None:
        async with local_world(3) as nodes:
            calls = [
                asyncio.ensure_future(node.world.all_reduce(np.ones(100_000), algorithm="ring", key=key))
                for node in nodes[:2]
            ]
            await asyncio.sleep(0.01)
            nodes[0].links._give_up(2, nodes[0].links._lost_error(2, "its link is damaged"))  # noqa: SLF001  # gives a rank up on one other rank only, for a cause that no test can bring about at this time
            async with asyncio.timeout(1):
                errors = await asyncio.gather(*calls, return_exceptions=True)
            for error in errors:
                assert isinstance(error, PeerLost)
                assert error.rank == 2
                assert "its link is damaged" in str(error)

    run_virtual(main())


# -- who is to blame ---------------------------------------------------------------------------------------------------


async def link_to(ranks: Ranks, one: int, *others: int) -> None:
    """Bring links of rank ``one`` up."""
    for other in others:
        await asyncio.gather(
            ranks.communicators[one].send(np.ones(1), other, tag=9), ranks.communicators[other].recv(one, tag=9)
        )


def blamed(error: object, rank: int, *texts: str) -> bool:
    assert isinstance(error, PeerLost), repr(error)
    assert error.rank == rank, error
    assert all(text in str(error) for text in texts), error
    return True


def test_a_rank_that_leaves_because_of_a_lost_one_is_not_blamed(open_ranks: OpenRanks) -> None:
    """Rank 2 has no link to the lost rank: it hears of it, and of the end of rank 0, from rank 0 alone."""

    async def main() -> None:
        async with open_ranks(3) as ranks:
            await link_to(ranks, 0, 1, 2)
            waiting = asyncio.ensure_future(ranks.communicators[2].recv(0))
            await settle()
            ranks.kill(1)
            await settle()
            ranks.links[0].leave_because(ranks.links[0].lost[1])
            await ranks.links[0].close()
            (error,) = await asyncio.gather(waiting, return_exceptions=True)
            assert blamed(error, 1, "rank 2: recv", "then rank 0 left")
            (error,) = await asyncio.gather(ranks.communicators[2].recv(0), return_exceptions=True)
            assert blamed(error, 1)

    run_virtual(main())


def test_a_rank_that_leaves_because_it_waited_in_vain_names_whom(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            await connect_all(ranks)
            waiting = [asyncio.ensure_future(ranks.communicators[rank].recv(0)) for rank in (1, 2)]
            await settle()
            ranks.links[0].leave_because(PeerTimeout("nothing came", rank=1, cause="it did not do its part in time"))
            await ranks.links[0].close()
            own, other = await asyncio.gather(*waiting, return_exceptions=True)
            assert blamed(other, 1, "rank 1 on localhost", "it did not do its part in time; then rank 0 left")
            assert blamed(own, 0, "it left the world because of this rank, 1: it did not do its part in time")

    run_virtual(main())


def test_a_rank_that_cannot_be_reached_is_not_blamed_if_the_reason_comes_soon_after(open_ranks: OpenRanks) -> None:
    """It has left, and no link to it is up: its reason is heard from the launcher, a moment later."""

    async def main() -> None:
        async with open_ranks(3) as ranks:
            await ranks.links[0].close()
            ranks.fabric.leave(0)
            waiting = asyncio.ensure_future(ranks.communicators[2].recv(0))
            await asyncio.sleep(0.1)
            ranks.links[2].end_job(1, "killed by SIGKILL")
            (error,) = await asyncio.gather(waiting, return_exceptions=True)
            assert blamed(error, 1, "killed by SIGKILL")
            (error,) = await asyncio.gather(ranks.communicators[2].recv(0), return_exceptions=True)
            assert blamed(error, 1, "killed by SIGKILL; then rank 0 left")

    run_virtual(main())


def test_a_rank_seen_to_leave_without_a_link_is_not_blamed_if_the_reason_comes_soon_after(
    open_ranks: OpenRanks,
) -> None:
    """As in the arena, which knows that a rank has left but not why."""

    async def main() -> None:
        async with open_ranks(3) as ranks:
            waiting = asyncio.ensure_future(ranks.communicators[2].all_reduce(np.ones(1)))
            await settle()
            ranks.links[2].observe_left(0)
            await asyncio.sleep(0.1)
            ranks.links[2].observe_end(1, "its process ended")
            (error,) = await asyncio.gather(waiting, return_exceptions=True)
            assert blamed(error, 1, "its process ended")

    run_virtual(main())


def test_a_link_that_is_made_after_a_loss_carries_the_news(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            ranks.links[0].observe_end(1, "its process ended")
            waiting = asyncio.ensure_future(ranks.communicators[2].recv(0))
            await settle()
            await ranks.links[0].close()
            (error,) = await asyncio.gather(waiting, return_exceptions=True)
            assert blamed(error, 1, "its process ended (reported by rank 0); then rank 0 left")

    run_virtual(main())


def test_of_several_lost_ranks_the_first_is_blamed(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(4) as ranks:
            ranks.links[0].observe_end(2, "its process ended")
            ranks.links[0].observe_end(1, "its process ended")
            one = ranks.communicators[0]
            calls = (one.barrier(), one.recv(), one.all_reduce(np.ones(10_000)), one.recv(1))
            *errors, own = await asyncio.gather(*calls, return_exceptions=True)
            assert all(blamed(error, 2) for error in errors)
            assert blamed(own, 1)

    run_virtual(main())
