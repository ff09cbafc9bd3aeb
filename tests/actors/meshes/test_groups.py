"""Collectives inside the actors of a mesh."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.actors.meshes.values import MeshError


class Member(ap.Actor):
    """Reduces with others of its mesh on request."""

    @ap.endpoint
    async def total(self, axis: str | None, value: float) -> float:
        x = np.full(3, value * 10**self.rank)
        await self.group(axis).all_reduce(x)
        return float(x[0])

    @ap.endpoint
    async def where(self, axis: str | None) -> tuple[int, list[int], str]:
        group = self.group(axis)
        assert group is self.group(axis)
        return group.rank, list(group.ranks), group.name


@pytest.mark.promise("mesh-group")
@pytest.mark.parametrize("transport", ["inproc", "tcp", "grpc"])
async def test_actors_reduce_along_the_axes_of_their_mesh(transport: str) -> None:
    async with ap.testing.local_world(4, transport=transport) as nodes:
        members = await nodes[0].nodes.reshape(dp=2, tp=2).spawn(Member)
        assert list((await members.total("tp", 1.0)).values()) == [11, 11, 1100, 1100]
        assert list((await members.total("dp", 1.0)).values()) == [101, 1010, 101, 1010]
        assert list((await members.total(None, 1.0)).values()) == [1111] * 4


async def test_the_rank_in_a_group_is_the_place_along_its_axis() -> None:
    async with ap.testing.local_world(4) as nodes:
        members = await nodes[0].nodes.reshape(dp=2, tp=2).spawn(Member, name="m")
        values = await members.where("dp")
        assert [value[:2] for value in values.values()] == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]
        assert values.at(dp=0, tp=0)[2] == "dp of mesh m@0.1"


async def test_meshes_over_the_same_ranks_do_not_meet_in_any_order_of_ranks() -> None:
    async with ap.testing.local_world(2) as nodes:
        one, other = [await node.nodes.spawn(Member) for node in nodes]
        calls = [(one, 0, 1.0), (other, 0, 5.0), (other, 1, 5.0), (one, 1, 1.0)]
        totals = await asyncio.gather(*(mesh.at(rank=rank).total("rank", value) for mesh, rank, value in calls))
        assert totals == [11, 55, 55, 11]


async def test_an_axis_that_the_mesh_does_not_have_is_refused_where_it_is_asked_for() -> None:
    async with ap.testing.local_world(2) as nodes:
        members = await nodes[0].nodes.spawn(Member, name="m")
        with pytest.raises(MeshError) as caught:
            await members.where("world")
        error = caught.value.exceptions[1]
        assert isinstance(error, ap.RemoteError)
        expected = "group: expected an axis of mesh m@0.1: 'rank', or nothing for all; got 'world'"
        assert (error.rank, error.type_name, error.message) == (1, "asyncpar.errors.UsageError", expected)


async def test_an_actor_of_its_own_has_no_group() -> None:
    async with ap.testing.local_world(2) as nodes:
        member = await nodes[0].spawn(Member, name="m")
        with pytest.raises(ap.RemoteError, match=r"group: <Member 'm' on rank 0> is not on a mesh; nodes.spawn"):
            await member.where("rank")


async def test_a_group_can_be_used_from_on_start_on() -> None:
    async with ap.testing.local_world(2) as nodes:
        starters = await nodes[0].nodes.spawn(Starter)
        assert list((await starters.total()).values()) == [3, 3]


class Starter(ap.Actor):
    """Reduces before it is asked anything."""

    def __init__(self, absent: int = -1) -> None:
        self.absent = absent

    async def on_start(self) -> None:
        if self.rank == self.absent:
            raise ValueError("absent")
        self.sum = await self.group().all_reduce(np.full(1, self.rank + 1))

    @ap.endpoint
    async def total(self) -> int:
        return int(self.sum[0])


async def test_an_actor_that_fails_in_the_middle_ends_the_collective_on_the_others() -> None:
    async with ap.testing.local_world(2) as nodes:
        quitters = await nodes[0].nodes.spawn(Quitter)
        with pytest.raises(MeshError) as caught:
            await quitters.reduce(quits=1)
        errors = caught.value.exceptions
        assert [(error.rank, error.type_name) for error in errors if isinstance(error, ap.RemoteError)] == [
            (0, "asyncpar.errors.PeerCancelled"),
            (1, "ValueError"),
        ]
        assert list((await quitters.reduce(quits=-1)).values()) == [2.0, 2.0]


class Quitter(ap.Actor):
    """Gives up a collective that it has called, on request."""

    @ap.endpoint
    async def reduce(self, quits: int) -> float:
        x = np.ones(1)
        reducing = self.group().all_reduce(x)
        if self.rank == quits:
            reducing.close()
            raise ValueError("no more")
        await reducing
        return float(x[0])


@pytest.mark.promise("mesh-group-end")
def test_a_collective_that_waits_for_an_actor_that_failed_elsewhere_ends_soon() -> None:
    async def main() -> None:
        async with ap.testing.local_world(4) as nodes:
            absentees = await nodes[0].nodes.reshape(dp=2, tp=2).spawn(Absentee)
            started = asyncio.get_running_loop().time()
            with pytest.raises(MeshError) as caught:
                await absentees.reduce(absent=3)
            assert asyncio.get_running_loop().time() - started < 2.0
            assert caught.value.values == {}
            errors = [error for error in caught.value.exceptions if isinstance(error, ap.RemoteError)]
            cancelled = "asyncpar.errors.PeerCancelled"
            assert [(error.rank, error.type_name) for error in errors] == [
                (0, cancelled),
                (1, cancelled),
                (2, cancelled),
                (3, "ValueError"),
            ]
            assert "given up, because rank 3 failed: rank 3: ValueError: absent" in errors[1].message
            assert list((await absentees.reduce(absent=-1)).values()) == [4.0] * 4

    ap.testing.run_virtual(main())


def test_work_without_collectives_goes_on_when_others_fail() -> None:
    async def main() -> None:
        async with ap.testing.local_world(2) as nodes:
            absentees = await nodes[0].nodes.spawn(Absentee)
            with pytest.raises(MeshError) as caught:
                await absentees.work(absent=0, seconds=100.0)
            assert caught.value.values.by_rank() == {1: 100.0}

    ap.testing.run_virtual(main())


def test_a_spawn_whose_actors_wait_for_one_that_does_not_start_ends_soon() -> None:
    async def main() -> None:
        async with ap.testing.local_world(4) as nodes:
            started = asyncio.get_running_loop().time()
            with pytest.raises(MeshError, match="spawn failed on 4 of 4 ranks"):
                await nodes[0].nodes.spawn(Starter, absent=2)
            assert asyncio.get_running_loop().time() - started < 2.0

    ap.testing.run_virtual(main())


class Absentee(ap.Actor):
    """Stays away from what all do, on request."""

    @ap.endpoint
    async def reduce(self, absent: int) -> float:
        x = np.ones(1)
        if self.rank == absent:
            raise ValueError("absent")
        await self.group("tp").all_reduce(x)
        await self.group("dp").all_reduce(x)
        return float(x[0])

    @ap.endpoint
    async def work(self, absent: int, seconds: float) -> float:
        if self.rank == absent:
            raise ValueError("absent")
        await asyncio.sleep(seconds)
        return seconds


@pytest.mark.promise("mesh-group-end")
async def test_values_of_a_call_that_failed_never_come_up_in_a_later_one() -> None:
    async with ap.testing.local_world(2) as nodes:
        senders = await nodes[0].nodes.spawn(Sender)
        with pytest.raises(MeshError) as caught:  # rank 0 has sent its value, and waits for who takes it
            await senders.share(1.0, absent=1)
        assert caught.value.values.by_rank() == {}
        assert list((await senders.share(2.0, absent=-1)).values()) == [2.0, 2.0]


async def test_a_group_that_was_kept_over_a_failure_says_that_it_was_given_up() -> None:
    async with ap.testing.local_world(2) as nodes:
        senders = await nodes[0].nodes.spawn(Sender)
        await senders.keep()
        with pytest.raises(MeshError):
            await senders.share(1.0, absent=1)
        with pytest.raises(MeshError) as caught:
            await senders.share_kept()
        for error in caught.value.exceptions:
            assert isinstance(error, ap.RemoteError)
            assert error.type_name == "asyncpar.errors.PeerCancelled"
            assert "was given up, because rank 1 failed: rank 1: ValueError: absent; ask for the group" in error.message


async def test_groups_of_actors_that_were_not_called_outlive_a_failure() -> None:
    async with ap.testing.local_world(4) as nodes:
        senders = await nodes[0].nodes.reshape(dp=2, tp=2).spawn(Sender)
        await senders.keep(axis="tp")
        with pytest.raises(MeshError):
            await senders.slice(dp=0).share(1.0, absent=0)
        assert list((await senders.slice(dp=1).share_kept()).values()) == [7.0, 7.0]
        assert list((await senders.share(2.0, absent=-1)).values()) == [2.0] * 4


class Sender(ap.Actor):
    """Gives what the first of its group has to all."""

    @ap.endpoint
    async def share(self, value: float, absent: int) -> float:
        if self.rank == absent:
            raise ValueError("absent")
        x = np.full(1, value if self.rank == 0 else -1.0)
        await self.group().broadcast(x, root=0)
        return float(x[0])

    @ap.endpoint
    async def keep(self, axis: str | None = None) -> None:
        self.kept = self.group(axis)
        self.group()

    @ap.endpoint
    async def share_kept(self) -> float:
        x = np.full(1, 7.0 if self.kept.rank == 0 else -1.0)
        await self.kept.broadcast(x, root=0)
        return float(x[0])
