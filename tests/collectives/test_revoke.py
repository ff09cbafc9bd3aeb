"""Revoking a group ends its operations and those of its sub-groups on every rank, whatever they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncpar.agreement.exchanges import Ballot, compare
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.revocation import decode_revocation, encode_revocation, notified_by, revocation_of
from asyncpar.errors import PeerLost, ProtocolError, UsageError, WorldRevoked
from asyncpar.net.arena.channel import Turn
from asyncpar.testing import local_world, run_virtual
from tests.collective_engines import engine_of
from tests.collectives.conftest import OpenRanks
from tests.products import in_turn

Call = Callable[[Communicator], Coroutine[Any, Any, Any]]

OPERATIONS: dict[str, Call] = {
    "small all_reduce": lambda comm: comm.all_reduce(np.zeros(3)),
    "large all_reduce": lambda comm: comm.all_reduce(np.zeros(1 << 20)),
    "keyed": lambda comm: comm.all_reduce(np.zeros(3), key="k"),
    "coalesced": lambda comm: comm.all_reduce_many([np.zeros(3), np.zeros((4, 5))]),
    "all_gather": lambda comm: comm.all_gather(np.zeros(3)),
    "all_gather_v": lambda comm: comm.all_gather_v(np.zeros(comm.rank + 1)),
    "reduce_scatter": lambda comm: comm.reduce_scatter(np.zeros(30)),
    "broadcast": lambda comm: comm.broadcast(np.zeros(3), root=2),
    "reduce": lambda comm: comm.reduce(np.zeros(3), root=0),
    "all_to_all": lambda comm: comm.all_to_all(np.zeros((comm.size, 4))),
    "barrier": lambda comm: comm.barrier(),
    "object": lambda comm: comm.all_gather_object({"a": 1}),
    "split": lambda comm: comm.split(0),
    "recv": lambda comm: comm.recv(2),
    "recv from any": lambda comm: comm.recv(tag=3),
    "large send": lambda comm: comm.send(np.zeros(1 << 20), 2, tag=4),
    "comparison": lambda comm: compare(comm, ["a"], key="c"),
    "ballot": lambda comm: Ballot(comm, count=1, key="b").cast(np.zeros(1, np.bool_)),
}


def check(error: object, *, by: int = 2, rank: int = 2) -> None:
    assert isinstance(error, WorldRevoked), repr(error)
    assert (error.revoked_by, error.rank, error.generation) == (by, rank, 0)
    assert error.cause == "enough"


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm", "grpc"])
async def test_every_operation_ends_on_every_rank(transport: str) -> None:
    async with local_world(3, transport=transport) as nodes, asyncio.timeout(30):
        for name, call in OPERATIONS.items():
            groups = [node.world.subgroup(range(3), name=name) for node in nodes]
            zero, one, two = (group for group in groups if group is not None)
            child = zero.subgroup((0, 1))
            assert child is not None
            waiting = [asyncio.ensure_future(call(comm)) for comm in (zero, one)]
            of_child = asyncio.ensure_future(child.barrier())
            await asyncio.sleep(0.01)
            two.revoke("enough")
            for task in (*waiting, of_child):
                check((await asyncio.gather(task, return_exceptions=True))[0])
            for comm, late in ((zero, call), (one, call), (two, Communicator.barrier), (child, Communicator.barrier)):
                assert comm.is_revoked
                with pytest.raises(WorldRevoked, match="rank 2 has revoked group"):
                    await late(comm)
        sums = await asyncio.gather(*(node.world.all_reduce(np.ones(2)) for node in nodes))
        assert [float(x[0]) for x in sums] == [3.0] * 3


@pytest.mark.parametrize("transport", ["inproc", "shm"])
async def test_operations_that_were_called_and_not_awaited_end_too(transport: str) -> None:
    async with local_world(2, transport=transport) as nodes, asyncio.timeout(30):
        await asyncio.gather(*(node.world.all_reduce(np.ones(2)) for node in nodes))
        zero, one = (node.world for node in nodes)
        calls = [zero.all_reduce(np.ones(2)), zero.all_reduce(np.ones(1 << 18)), zero.recv(1)]
        one.revoke("enough")
        for call in reversed(calls):  # the first waits for the news
            with pytest.raises(WorldRevoked):
                await call


def test_groups_that_are_made_later_of_a_revoked_one_are_revoked(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            zero, one, two = ranks.communicators
            child = zero.subgroup((0, 1))
            assert child is not None
            one.revoke("enough")
            await asyncio.sleep(0.01)
            assert two.is_revoked
            late = zero.subgroup((0, 2))
            grandchild = child.subgroup((1, 0))
            for group in (late, grandchild):
                assert group is not None
                with pytest.raises(WorldRevoked):
                    await group.barrier()

    run_virtual(main())


def test_a_sub_group_is_revoked_alone_and_its_members_need_not_have_made_it_yet(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            zero, one, two = ranks.communicators
            group = zero.subgroup((0, 1))
            assert group is not None
            group.revoke("enough")
            await asyncio.sleep(0.01)
            theirs = one.subgroup((0, 1))
            assert theirs is not None
            with pytest.raises(WorldRevoked) as caught:
                await theirs.barrier()
            check(caught.value, by=0, rank=0)
            await asyncio.gather(*(world.barrier() for world in (zero, one, two)))

    run_virtual(main())


def test_overlapping_groups_go_on(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(4) as ranks:
            left = [world.subgroup((0, 1, 2)) for world in ranks.communicators]
            right = [world.subgroup((1, 2, 3)) for world in ranks.communicators]
            sums = [asyncio.ensure_future(group.all_reduce(np.ones(200_000))) for group in right[1:3] if group]
            await asyncio.sleep(0.01)
            assert left[0] is not None
            left[0].revoke("enough")
            await asyncio.sleep(0.01)
            assert [group.is_revoked for group in left if group] == [True] * 3
            assert right[3] is not None
            await right[3].all_reduce(np.ones(200_000))
            for result in await asyncio.gather(*sums):
                assert float(result[-1]) == 3.0

    run_virtual(main())


def test_it_is_idempotent_and_the_first_reason_stays(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            zero, one, _ = ranks.communicators
            zero.revoke("enough")
            zero.revoke("again")
            await asyncio.sleep(0.01)
            one.revoke("late")
            await asyncio.sleep(0.01)
            for comm in ranks.communicators:
                with pytest.raises(WorldRevoked, match="enough") as caught:
                    await comm.barrier()
                check(caught.value, by=0, rank=0)

    run_virtual(main())


def test_the_rank_that_the_reason_names_is_blamed(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            zero, _, two = ranks.communicators
            zero.revoke(PeerLost("rank 1 is lost", rank=1, cause="its process ended"))
            await asyncio.sleep(0.01)
            with pytest.raises(WorldRevoked, match="rank 1: its process ended") as caught:
                await two.barrier()
            assert (caught.value.rank, caught.value.revoked_by) == (1, 0)

    run_virtual(main())


@pytest.mark.parametrize(("size", "notified"), in_turn([4, 36], [1, 2]))
def test_the_news_reaches_all_although_the_rank_that_revokes_dies_amid_it(
    open_ranks: OpenRanks, monkeypatch: pytest.MonkeyPatch, size: int, notified: int
) -> None:
    """It notifies ``notified`` ranks, and is gone; another one is dead already."""

    async def main() -> None:
        async with open_ranks(size) as ranks:
            zero = ranks.communicators[0]
            waiting = [asyncio.ensure_future(comm.recv()) for comm in ranks.communicators[2:]]
            await asyncio.sleep(0.01)
            ranks.fabric.leave(1)
            links, count = ranks.links[0], 0
            send = links.control

            def control(to: int, *frame: Any) -> None:
                nonlocal count
                count += 1
                if count <= notified + 1:  # the first is for the dead rank
                    send(to, *frame)

            monkeypatch.setattr(links, "control", control)
            zero.revoke("enough")
            ranks.kill(0)
            async with asyncio.timeout(5):
                errors = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(error, WorldRevoked | PeerLost) for error in errors), errors
            await asyncio.sleep(0.5)
            assert all(comm.is_revoked for comm in ranks.communicators[2:])

    run_virtual(main())


def test_revoked_groups_keep_nothing_that_comes_for_them(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(2) as ranks:
            zero, one = ranks.communicators
            await asyncio.gather(*(comm.barrier() for comm in ranks.communicators))
            early = asyncio.ensure_future(one.all_reduce(np.ones(4)))
            sent = asyncio.ensure_future(one.send(np.ones(4), 0))
            await asyncio.sleep(0.01)
            zero.revoke("enough")
            await asyncio.sleep(0.01)
            await asyncio.gather(early, sent, return_exceptions=True)
            for links in ranks.links:
                inbox = links.link(1 - links.rank)._inbox  # noqa: SLF001  # what a link holds shows nowhere else
                assert inbox.early_bytes == 0
                assert not inbox._posted  # noqa: SLF001
            for comm in ranks.communicators:
                assert not engine_of(comm).group.pending()

    run_virtual(main())


async def test_a_call_on_another_loop_is_refused(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks:

        async def elsewhere() -> None:
            ranks.communicators[0].revoke("enough")

        with pytest.raises(UsageError, match="revoke"):
            await asyncio.to_thread(asyncio.run, elsewhere())


# -- whom a rank notifies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 32, 33, 40, 100])
def test_news_reaches_all_that_live_while_fewer_are_dead_than_each_notifies(size: int) -> None:
    ranks = tuple(range(5, 5 + size))
    neighbours = {rank: notified_by(rank, ranks) for rank in ranks}
    dead_at_most = min(len(each) for each in neighbours.values()) - 1
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(ranks)
        dead = set(order[: max(dead_at_most, 0)].tolist())
        reached, front = set(), [int(order[-1])]
        while front:
            rank = front.pop()
            if rank not in reached and rank not in dead:
                reached.add(rank)
                front += neighbours[rank]
        assert reached == set(ranks) - dead


def test_a_revocation_that_does_not_fit_its_frame_is_refused() -> None:
    revocation = revocation_of("x" * 5000, number=7, ranks=(0, 1), name="g", generation=3, me=1)
    payload = encode_revocation(revocation)
    assert decode_revocation(payload, number=7, generation=3, size=2) == revocation
    for number, generation, size in ((8, 3, 2), (7, 4, 2), (7, 3, 1)):
        with pytest.raises(ProtocolError, match="REVOKE"):
            decode_revocation(payload, number=number, generation=generation, size=size)
    with pytest.raises(ProtocolError, match="REVOKE"):
        decode_revocation(b"nonsense", number=7, generation=3, size=2)


async def test_a_slow_reader_of_a_revoked_ranks_memory_sees_that_it_was_abandoned() -> None:
    """Rank 1 may still be in the middle of the array of rank 0, which writes into it when its operation has ended."""
    async with local_world(2, transport="shm") as nodes, asyncio.timeout(30):
        zero, one = (node.world for node in nodes)
        arrays = [comm.empty(1 << 18, np.float64) for comm in (zero, one)]
        await asyncio.gather(
            *(comm.all_reduce(x, algorithm="arena") for comm, x in zip((zero, one), arrays, strict=True))
        )
        waiting = asyncio.ensure_future(zero.all_reduce(arrays[0], algorithm="arena"))
        await asyncio.sleep(0.01)
        arena = engine_of(one).arena
        assert arena is not None
        channel = arena.run_queue.channel
        assert channel is not None
        turn = Turn(channel, 2)
        turn.places_read = (0,)
        assert turn.is_intact()
        zero.revoke("enough")
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], WorldRevoked)
        assert not turn.is_intact()


@pytest.mark.parametrize("call", [Communicator.barrier, lambda comm: comm.recv(2)], ids=["barrier", "recv"])
def test_a_rank_that_the_news_has_not_reached_is_notified_when_it_asks(
    open_ranks: OpenRanks, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    async def main() -> None:
        async with open_ranks(3, timeout=20.0) as ranks:
            await asyncio.gather(*(comm.barrier() for comm in ranks.communicators))
            waiting = asyncio.ensure_future(call(ranks.communicators[0]))
            await asyncio.sleep(0.01)
            sent: list[int] = []
            with monkeypatch.context() as patch:
                for links in ranks.links:
                    patch.setattr(links, "control", lambda to, *_: sent.append(to))
                ranks.communicators[2].revoke("enough")
            assert sent == [0, 1]
            await asyncio.wait({waiting}, timeout=3)
            check(waiting.exception())
            await asyncio.sleep(0.01)
            assert ranks.communicators[1].is_revoked

    run_virtual(main())
