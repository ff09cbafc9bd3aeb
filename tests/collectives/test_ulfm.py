"""The semantics that the API tests of ULFM ask for, beyond revocation, shrinking and agreement as such.

After the list of tests of ulfm-testing (icldisco): insulation of groups, receives from any rank, sends to the dead,
failures before and in the middle of every collective, shrinking in a row, and agreement as a substitute for a barrier.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.recovery import Agreed
from asyncpar.errors import PeerError, PeerLost, WorldRevoked
from asyncpar.testing import local_world, run_virtual
from tests.collectives.conftest import OpenRanks
from tests.collectives.test_recovery import connect_all, sums
from tests.collectives.test_revoke import OPERATIONS
from tests.soak import chosen


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("recv", "large send")])
def test_a_loss_before_an_operation_is_an_error_and_recovery_leads_on(open_ranks: OpenRanks, name: str) -> None:
    """Rank 1 dies; each survivor gets an error at once or after the revocation of another, and all recover."""

    async def main() -> None:
        async with open_ranks(4) as ranks:
            await connect_all(ranks)
            ranks.kill(1)

            async def operate(comm: Communicator) -> None:
                async with asyncio.timeout(30):
                    await OPERATIONS[name](comm)
                    await comm.barrier()

            async def run(comm: Communicator) -> Communicator:
                with pytest.raises((PeerLost, WorldRevoked)) as caught:
                    await operate(comm)
                assert caught.value.rank == 1
                comm.revoke(caught.value)
                return await comm.shrink()

            groups = await asyncio.gather(*(run(ranks.communicators[rank]) for rank in (0, 2, 3)))
            assert [group.ranks for group in groups] == [(0, 2, 3)] * 3
            assert await sums(groups) == [3.0] * 3

    run_virtual(main())


def test_groups_without_a_lost_rank_are_insulated(open_ranks: OpenRanks) -> None:
    """Insulate: a loss in one half is no matter of operations of the other half, before, under way and after."""

    async def main() -> None:
        async with open_ranks(4) as ranks:
            await connect_all(ranks)
            halves = [world.subgroup((0, 1) if world.rank < 2 else (2, 3)) for world in ranks.communicators]
            zero, one, two, _ = (half for half in halves if half is not None)
            waiting = asyncio.ensure_future(zero.all_reduce(np.ones(200_000)))
            await asyncio.sleep(0.01)
            ranks.kill(3)
            await asyncio.sleep(0.01)
            await one.all_reduce(np.ones(200_000))
            assert float((await waiting)[-1]) == 2.0
            with pytest.raises(PeerLost):
                await two.barrier()
            two.revoke("its half is broken")
            await asyncio.sleep(0.01)
            assert await sums([zero, one]) == [2.0] * 2
            assert not zero.is_revoked

    run_virtual(main())


def test_a_receive_from_any_rank_fails_with_a_loss_and_works_in_the_group_of_the_survivors(
    open_ranks: OpenRanks,
) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            await connect_all(ranks)
            zero, _, two = ranks.communicators
            receiving = asyncio.ensure_future(zero.recv(tag=5))
            await asyncio.sleep(0.01)
            ranks.kill(1)
            with pytest.raises(PeerLost) as caught:
                await receiving
            assert caught.value.rank == 1
            new_zero, new_two = await asyncio.gather(zero.shrink(), two.shrink())
            receiving = asyncio.ensure_future(new_zero.recv(tag=5))
            await new_two.send(np.full(3, 7.0), 0, tag=5)
            np.testing.assert_array_equal(await receiving, 7.0)

    run_virtual(main())


def test_messages_of_a_revoked_group_do_not_reach_the_next(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(2) as ranks:
            await connect_all(ranks)
            zero, one = ranks.communicators
            await one.send(np.full(3, 1.0), 0, tag=5)
            one.revoke("enough")
            await asyncio.sleep(0.01)
            new_zero, new_one = await asyncio.gather(zero.shrink(), one.shrink())
            receiving = asyncio.ensure_future(new_zero.recv(1, tag=5))
            await asyncio.sleep(0.01)
            assert not receiving.done()
            await new_one.send(np.full(3, 2.0), 0, tag=5)
            np.testing.assert_array_equal(await receiving, 2.0)

    run_virtual(main())


def test_a_send_to_a_dead_rank_fails_and_others_of_the_same_group_go_on(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            await connect_all(ranks)
            zero, _, two = ranks.communicators
            ranks.kill(1)
            await asyncio.sleep(0.01)
            with pytest.raises(PeerLost):
                await zero.send(np.ones(1 << 20), 1)
            receiving = asyncio.ensure_future(two.recv(0))
            await zero.send(np.ones(3), 2)
            assert float((await receiving)[0]) == 1.0

    run_virtual(main())


def test_agreement_shows_whether_an_operation_ended_well_everywhere(open_ranks: OpenRanks) -> None:
    """A broadcast whose root dies may succeed on some; agree makes all act alike."""

    async def main() -> None:
        async with open_ranks(4) as ranks:
            await connect_all(ranks)
            calls = [comm.broadcast(np.zeros(1000), algorithm="chain") for comm in ranks.communicators[1:]]
            tasks = [asyncio.ensure_future(call) for call in calls]
            sending = asyncio.ensure_future(ranks.communicators[0].broadcast(np.ones(1000), algorithm="chain"))
            for _ in range(3):
                await asyncio.sleep(0)
            ranks.kill(0)
            sending.cancel()

            async def vote(comm: Communicator, task: asyncio.Future[Any]) -> tuple[bool, Agreed]:
                await asyncio.wait({task})
                is_well = task.exception() is None
                if not is_well:
                    comm.revoke("the broadcast failed")
                return is_well, await comm.agree(int(is_well))

            votes = await asyncio.gather(*map(vote, ranks.communicators[1:], tasks))
            assert len({agreed for _, agreed in votes}) == 1
            assert votes[0][1].flag == int(all(is_well for is_well, _ in votes))
            await asyncio.gather(sending, return_exceptions=True)

    run_virtual(main())


@pytest.mark.parametrize("seed", range(chosen(5, soak=100)))
def test_one_after_the_other_dies_until_one_is_left(open_ranks: OpenRanks, seed: int) -> None:
    """In each round a rank dies at some time, in an operation, in shrink or in agree; all survivors stay together."""

    async def main() -> None:
        chance = random.Random(seed)
        async with open_ranks(6) as ranks:
            await connect_all(ranks)
            groups: dict[int, Communicator] = dict(enumerate(ranks.communicators))
            order = chance.sample(range(6), 5)

            async def round_of(comm: Communicator) -> tuple[Communicator, Agreed]:
                try:
                    for number in itertools.count():
                        await comm.all_reduce(np.ones(100_000 if number % 3 == 2 else 3))
                        await asyncio.sleep(0.001)
                except PeerError as error:
                    comm.revoke(error)
                smaller = await comm.shrink()
                return smaller, await smaller.agree(-1)

            for victim in order:
                tasks = {rank: asyncio.ensure_future(round_of(comm)) for rank, comm in groups.items()}
                await asyncio.sleep(chance.choice([0.0, 0.0005, 0.003]))
                ranks.kill(victim)
                doomed = tasks.pop(victim)
                del groups[victim]
                async with asyncio.timeout(30):
                    outcomes = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
                doomed.cancel()
                await asyncio.gather(doomed, return_exceptions=True)
                assert {made.ranks for made, _ in outcomes.values()} == {tuple(sorted(groups))}
                assert {agreed for _, agreed in outcomes.values()} == {Agreed(-1, ())}
                groups = {rank: made for rank, (made, _) in outcomes.items()}
            assert [comm.size for comm in groups.values()] == [1]
            (last,) = groups.values()
            assert await last.agree(5) == Agreed(5, ())

    run_virtual(main())


async def test_ranks_of_several_hosts_recover_from_the_middle_of_a_hierarchical_operation() -> None:
    """Each host has shared memory, whose part of the operation ends, too, and which the survivors use again."""

    async def reduce(comm: Communicator) -> float:
        x = np.ones(300_000)
        await comm.all_reduce(x, algorithm="hierarchical")
        return float(x[-1])

    async with local_world(5, transport=None, hosts=("a", "a", "b", "b", "b")) as nodes, asyncio.timeout(30):
        worlds = [node.world for node in nodes]
        assert await asyncio.gather(*map(reduce, worlds)) == [5.0] * 5
        waiting = [asyncio.ensure_future(reduce(comm)) for comm in worlds[:4]]
        await asyncio.sleep(0.05)
        await nodes[4].stop()
        worlds[1].revoke("enough")
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, PeerError)
        await asyncio.sleep(0.3)
        groups = await asyncio.gather(*(comm.shrink() for comm in worlds[:4]))
        assert groups[0].hosts == ((0, 1), (2, 3))
        for _ in range(3):
            assert await asyncio.gather(*map(reduce, groups)) == [4.0] * 4
