"""Survivors of a group agree, and make a group without the ranks that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.recovery import Agreed
from asyncpar.errors import OperationMismatch, PeerLost, PeerTimeout, StaleGeneration, UsageError, WorldRevoked
from asyncpar.testing import local_world, run_virtual
from tests.collective_engines import engine_of
from tests.collectives.conftest import OpenRanks, Ranks


async def sums(groups: Sequence[Communicator]) -> list[float]:
    async with asyncio.timeout(20):
        return [float(x[-1]) for x in await asyncio.gather(*(group.all_reduce(np.ones(100)) for group in groups))]


async def connect_all(ranks: Ranks) -> None:
    """Bring all links up."""
    size = len(ranks.communicators)
    await asyncio.gather(*(comm.all_to_all(np.zeros(size), algorithm="pairwise") for comm in ranks.communicators))


async def shrunk(comms: Sequence[Communicator]) -> list[Communicator]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*(comm.shrink() for comm in comms))


# -- agree -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_and_of_all_flags(open_ranks: OpenRanks, size: int) -> None:
    async def main() -> None:
        async with open_ranks(size) as ranks:
            for turn in range(3):
                flags = [0b1111 ^ (1 << comm.rank) | turn << 8 for comm in ranks.communicators]
                agreed = await asyncio.gather(
                    *(comm.agree(flag) for comm, flag in zip(ranks.communicators, flags, strict=True))
                )
                expected = flags[0]
                for flag in flags:
                    expected &= flag
                assert agreed == [Agreed(expected, ())] * size

    run_virtual(main())


def test_the_lost_are_named_in_the_numbering_of_the_group_and_revocation_does_not_matter(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(4) as ranks:
            await connect_all(ranks)
            groups = [ranks.communicators[rank].subgroup((3, 2, 0)) for rank in (3, 2, 0)]
            ranks.kill(2)
            three, _, zero = groups
            assert three is not None
            assert zero is not None
            three.revoke("enough")
            assert list(await asyncio.gather(three.agree(-1), zero.agree(6))) == [Agreed(6, (1,))] * 2
            assert three.lost == zero.lost == (1,)
            assert ranks.communicators[0].lost == (2,)

    run_virtual(main())


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_dies_amid_it_ends_nothing(open_ranks: OpenRanks, victim: int, delay: float) -> None:
    async def main() -> None:
        async with open_ranks(4) as ranks:
            await connect_all(ranks)
            calls = [asyncio.ensure_future(comm.agree(~(1 << comm.rank))) for comm in ranks.communicators[:3]]
            await asyncio.sleep(delay)
            if victim != 3:
                late = asyncio.ensure_future(ranks.communicators[3].agree(~8))
                calls.append(late)
            ranks.kill(victim)
            async with asyncio.timeout(10):
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
            agreed = {outcome for rank, outcome in enumerate(outcomes) if rank != victim}
            assert len(agreed) == 1, outcomes
            (outcome,) = agreed
            assert isinstance(outcome, Agreed)
            assert outcome.lost in ((), (victim,))

    run_virtual(main())


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_call_is_a_timeout_on_all(open_ranks: OpenRanks, absent: int) -> None:
    async def main() -> None:
        async with open_ranks(3, timeout=4.0) as ranks:
            began = asyncio.get_running_loop().time()
            calls = [ranks.communicators[rank].agree(1) for rank in range(3) if rank != absent]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, PeerTimeout)
                assert error.rank == absent
                assert f"agree #1: rank {absent}: it has not called it within 4.0 s" in str(error)
            assert asyncio.get_running_loop().time() - began < 6.0
            with pytest.raises(PeerTimeout):
                await ranks.communicators[absent].agree(1)
            assert await asyncio.gather(*(comm.agree(7) for comm in ranks.communicators)) == [Agreed(7, ())] * 3

    run_virtual(main())


def test_different_calls_do_not_meet(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(2) as ranks:
            zero, one = ranks.communicators
            for error in await asyncio.gather(zero.agree(1), one.shrink(), return_exceptions=True):
                assert isinstance(error, OperationMismatch)
                assert "rank 1 calls shrink where rank 0 calls agree" in str(error)

    run_virtual(main())


def test_a_call_that_is_cancelled_has_given_its_flag(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            zero, *others = ranks.communicators
            cancelled = asyncio.ensure_future(zero.agree(2))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            assert await asyncio.gather(*(comm.agree(-1) for comm in others)) == [Agreed(2, ())] * 2

    run_virtual(main())


@pytest.mark.parametrize("flag", [2**63, -(2**63) - 1, 1.0, "1", None])
async def test_a_flag_that_is_no_64_bit_integer_is_refused(open_ranks: OpenRanks, flag: object) -> None:
    async with open_ranks(1) as ranks:
        with pytest.raises(UsageError, match="flag"):
            await ranks.communicators[0].agree(flag)  # type: ignore[arg-type]


def test_a_rank_that_the_others_have_declared_lost_is_notified(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            await connect_all(ranks)
            ranks.links[0].report_lost(2, "suspected")
            await asyncio.sleep(0.01)
            groups = await shrunk(ranks.communicators[:2])
            assert [group.ranks for group in groups] == [(0, 1)] * 2
            with pytest.raises(PeerLost, match="has declared this rank, 2, lost"):
                await ranks.communicators[2].shrink()

    run_virtual(main())


# -- shrink ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("revoked", [False, True])
@pytest.mark.parametrize("victims", [(0,), (1, 3), (0, 1, 2, 3)])
def test_the_survivors_get_a_group_in_their_order(
    open_ranks: OpenRanks, victims: tuple[int, ...], revoked: bool
) -> None:
    async def main() -> None:
        async with open_ranks(5) as ranks:
            await connect_all(ranks)
            left = tuple(rank for rank in range(5) if rank not in victims)
            for victim in victims:
                ranks.kill(victim)
            await asyncio.sleep(0.01)
            survivors = [ranks.communicators[rank] for rank in left]
            if revoked:
                survivors[-1].revoke("enough")
            groups = await shrunk(survivors)
            assert [group.ranks for group in groups] == [left] * len(left)
            assert len({group.group for group in groups}) == 1
            assert await sums(groups) == [float(len(left))] * len(left)

    run_virtual(main())


@pytest.mark.parametrize("steps", range(0, 40, 3))
def test_further_ranks_die_while_it_runs(open_ranks: OpenRanks, steps: int) -> None:
    """After so many turns of the loop one dies that leads, later another one: all that are left get one group."""

    async def main() -> None:
        async with open_ranks(5) as ranks:
            await connect_all(ranks)
            ranks.kill(4)
            await asyncio.sleep(0.001)
            calls = [asyncio.ensure_future(comm.shrink()) for comm in ranks.communicators[:4]]
            for victim in (0, 2):
                for _ in range(steps):
                    await asyncio.sleep(0)
                ranks.kill(victim)
            async with asyncio.timeout(10):
                outcomes = list(await asyncio.gather(calls[1], calls[3]))
            assert outcomes[0].ranks == outcomes[1].ranks
            assert outcomes[0].group == outcomes[1].group
            while set(outcomes[0].ranks) != {1, 3}:  # they died when it was over
                outcomes = await asyncio.gather(*(group.shrink() for group in outcomes))
            assert await sums(outcomes) == [2.0, 2.0]
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    run_virtual(main())


def test_overlapping_groups_shrink_each_for_itself(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(4) as ranks:
            await connect_all(ranks)
            left = [world.subgroup((0, 1, 2)) for world in ranks.communicators]
            right = [world.subgroup((3, 2, 1)) for world in ranks.communicators]
            ranks.kill(2)
            calls = [group.shrink() for rank, group in enumerate(left) if group and rank != 2]
            calls += [group.shrink() for rank, group in enumerate(right) if group and rank != 2]
            zero, one, other_one, three = await asyncio.gather(*calls)
            assert zero.ranks == one.ranks == (0, 1)
            assert other_one.ranks == three.ranks == (3, 1)
            assert await sums([zero, one]) == [2.0] * 2
            assert await sums([other_one, three]) == [2.0] * 2

    run_virtual(main())


def test_a_shrunk_group_outlives_a_later_revocation_and_can_be_revoked_itself(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            await connect_all(ranks)
            ranks.kill(1)
            survivors = [ranks.communicators[0], ranks.communicators[2]]
            groups = await shrunk(survivors)
            survivors[0].revoke("late")
            await asyncio.sleep(0.01)
            assert await sums(groups) == [2.0, 2.0]
            groups[1].revoke("now")
            await asyncio.sleep(0.01)
            with pytest.raises(WorldRevoked, match="now"):
                await groups[0].barrier()
            again = await shrunk(groups)
            assert again[0].ranks == (0, 2)
            assert await sums(again) == [2.0, 2.0]

    run_virtual(main())


def test_it_leaves_nothing_behind(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            groups: list[Communicator] = list(ranks.communicators)
            tables = [len(engine_of(group).table._groups) for group in groups]  # noqa: SLF001  # groups that the table keeps show nowhere else
            for _ in range(5):
                groups = await shrunk(groups)
            groups.clear()
            for _ in range(5):
                await asyncio.sleep(0)
            for comm, before in zip(ranks.communicators, tables, strict=True):
                table = engine_of(comm).table
                assert len(table._groups) == before  # noqa: SLF001  # as above
                assert not table.agreements._open  # noqa: SLF001  # as above

    run_virtual(main())


@pytest.mark.parametrize("transport", ["tcp", "shm", "grpc"])
async def test_on_real_lanes(transport: str) -> None:
    async with local_world(4, transport=transport) as nodes:
        await sums([node.world for node in nodes])
        await nodes[1].stop()
        await asyncio.sleep(0.3)
        survivors: list[Communicator] = [nodes[rank].world for rank in (0, 2, 3)]
        survivors[1].revoke("enough")
        groups = await shrunk(survivors)
        assert [group.ranks for group in groups] == [(0, 2, 3)] * 3
        for _ in range(3):
            assert await sums(groups) == [3.0] * 3
        if transport == "shm":
            assert all((arena := engine_of(group).arena) is not None and arena.is_open for group in groups)


async def test_after_the_node_is_left_a_revoked_group_is_stale(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, _ = ranks.communicators
        child = zero.subgroup((0, 1))
        assert child is not None
        zero.revoke("enough")
        waiting = asyncio.ensure_future(zero.shrink())
        await asyncio.sleep(0.01)
        await ranks.links[0].close()
        with pytest.raises(PeerLost, match="this node is closed"):
            await waiting
        for comm in (zero, child):
            with pytest.raises(StaleGeneration, match="generation 0 of the world, which was revoked and left"):
                await comm.barrier()
            with pytest.raises(StaleGeneration):
                await comm.recv()
            with pytest.raises(StaleGeneration):
                await comm.agree(1)
