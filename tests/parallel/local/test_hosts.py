"""Between hosts few bytes, inside a host all ranks equal."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, PeerCancelled, PeerError, UsageError
from asyncpar.gradsync import GradientSynchronizer, HostGroups
from asyncpar.gradsync.plan import HasParameters
from asyncpar.gradsync.statistics import StepOutcome
from asyncpar.node import Node
from asyncpar.parallel.local import DiLoCo, HostSynchronizer, LocalSGD
from asyncpar.testing.world import local_world
from tests.parallel.local.replicas import INT8, Replica, make_synchronizer, on_all

HOSTS = ("a", "a", "b", "b", "b")


class Place:
    """One rank of two hosts: gradients inside, rounds between."""

    def __init__(self, node: Node, *, every: int = 3) -> None:
        groups = HostGroups.of(node.world, node.membership.hosts)
        self.groups = groups
        self.replica = Replica(node.rank, dtype="float32")
        self.inside = make_synchronizer(groups.inside, name="gradients")
        self.between: GradientSynchronizer | None = None
        if groups.between is not None:
            self.between = make_synchronizer(groups.between, compression=INT8)
        self.rounds = DiLoCo(self.replica.parameters, HostSynchronizer(groups.inside, self.between), every=every)

    async def train(self) -> bool:
        self.replica.compute()
        async with self.inside.step(self.replica.parameters):
            pass
        self.replica.descend()
        return await self.rounds.step()


async def test_groups_are_the_host_and_its_first_ranks() -> None:
    async with local_world(5, hosts=HOSTS) as nodes:
        groups = [HostGroups.of(node.world, node.membership.hosts) for node in nodes]
    assert [one.inside.ranks for one in groups] == [(0, 1), (0, 1), (2, 3, 4), (2, 3, 4), (2, 3, 4)]
    assert [None if one.between is None else one.between.ranks for one in groups] == [(0, 2), None, (0, 2), None, None]


async def test_ranks_are_equal_inside_hosts_always_and_between_them_after_rounds() -> None:
    async def main(node: Node) -> list[bytes]:
        place, seen = Place(node), []
        for step in range(6):
            assert await place.train() is (step % 3 == 2)
            seen.append(place.replica.bits())
        return seen

    async with local_world(5, hosts=HOSTS) as nodes:
        results = await on_all(nodes, main)
    for step, bits in enumerate(zip(*results, strict=True)):
        assert len({bits[0], bits[1]}) == len({bits[2], bits[3], bits[4]}) == 1
        assert len(set(bits)) == (1 if step % 3 == 2 else 2)


async def test_only_first_ranks_send_between_hosts_and_only_in_rounds() -> None:
    async def main(node: Node) -> tuple[int, int] | None:
        place = Place(node, every=4)
        for _ in range(8):
            await place.train()
        await place.rounds.finish()
        if place.between is None:
            assert place.rounds.state().synchronizer == {}
            return None
        statistics = place.between.get_sync_stats()
        return statistics.total_sync_operations, statistics.bytes_on_wire

    async with local_world(5, hosts=HOSTS) as nodes:
        first, second, *_ = results = await on_all(nodes, main)
    assert second is None
    for result in (first, results[2]):
        assert result is not None
        assert result[0] == 2
        assert 2 * 1231 <= result[1] < 2 * 1400


async def test_a_host_that_is_not_finite_fails_the_round_everywhere_and_nothing_moves() -> None:
    async def main(node: Node) -> str:
        place = Place(node, every=1)
        if node.rank > 1:
            place.replica.parameters[0].value[0, 0] = np.inf
        before = place.replica.bits()
        with pytest.raises((NonFiniteValue, PeerError)) as caught:
            await place.rounds.step()
        assert place.replica.bits() == before
        place.rounds.reset()
        assert await place.train()
        return type(caught.value).__name__

    async with local_world(5, hosts=HOSTS) as nodes:
        names = await on_all(nodes, main)
    assert names == ["NonFiniteValue", "PeerCancelled", "NonFiniteValue", "PeerCancelled", "PeerCancelled"]


async def test_a_lost_rank_of_one_host_leaves_its_host_as_it_was() -> None:
    async with local_world(5, hosts=HOSTS) as nodes:
        places = [Place(node, every=1) for node in nodes]
        for place in places:
            place.replica.train()
        before = [place.replica.bits() for place in places]
        waiting = [asyncio.ensure_future(place.rounds.step()) for place in places[:4]]
        await nodes[4].stop()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, PeerError) for error in errors[2:]), errors
    assert [place.replica.bits() for place in places[2:]] == before[2:]


async def test_hosts_and_synchronizers_that_do_not_fit_are_refused() -> None:
    async with local_world(2) as nodes:
        world = nodes[0].world
        with pytest.raises(UsageError, match=r"hosts: expected each of 2 ranks once, got \[0\]"):
            HostGroups.of(world, [[0]])
        with pytest.raises(
            UsageError, match="expected a synchronizer on the first rank of the host, got None on rank 0"
        ):
            HostSynchronizer(world, None)
        with pytest.raises(UsageError, match="expected None on other ranks, got"):
            HostSynchronizer(nodes[1].world, make_synchronizer(nodes[1].world))


async def test_one_rank_per_host_is_training_between_ranks() -> None:
    async def main(node: Node) -> bytes:
        groups = HostGroups.of(node.world, node.membership.hosts)
        assert groups.between is not None
        replica = Replica(node.rank)
        synchronizer = HostSynchronizer(groups.inside, make_synchronizer(groups.between))
        hosts = LocalSGD(replica.parameters, synchronizer, every=2)
        replica.train(2)
        await hosts.step()
        await hosts.step()
        return replica.bits()

    async def plain(node: Node) -> bytes:
        replica = Replica(node.rank)
        rounds = LocalSGD(replica.parameters, make_synchronizer(node.world), every=2)
        replica.train(2)
        await rounds.step()
        await rounds.step()
        return replica.bits()

    async with local_world(2, hosts=("a", "b")) as nodes:
        assert await on_all(nodes, main) == await on_all(nodes, plain)


class Between:
    """A synchronizer between hosts that fails with ``error``, until the error is removed."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    async def synchronize_gradients(self, model_shards: HasParameters) -> StepOutcome:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return StepOutcome()

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("error", "text"),
    [(OSError("the disk is full"), "OSError: the disk is full"), (asyncio.CancelledError(), "CancelledError, before")],
)
@pytest.mark.parametrize("transport", ["inproc", "shm"])
async def test_a_first_rank_that_fails_tells_its_host_why_and_the_next_round_works(
    transport: Any, error: BaseException, text: str
) -> None:
    async def main(node: Node) -> list[str]:
        replica, between = Replica(node.rank), Between(error) if node.rank == 0 else None
        synchronizer = HostSynchronizer(node.world, between)
        shards: Any = SimpleNamespace(parameters=lambda: replica.parameters)
        causes = []
        for _ in range(20):
            replica.compute()
            try:
                await synchronizer.synchronize_gradients(shards)
            except PeerCancelled as failure:
                causes.append(f"rank {failure.rank}: {failure.cause}")
            except type(error):
                causes.append("its own")
        if between is not None:
            between.error = None
        replica.compute()
        await synchronizer.synchronize_gradients(shards)
        digests = await node.world.all_gather(np.frombuffer(replica.parameters[0].grad.tobytes(), np.uint8))
        assert (digests == digests[0]).all()
        return causes

    async with local_world(3, transport=transport) as nodes, asyncio.timeout(30):
        own, *others = await on_all(nodes, main)
    assert own == ["its own"] * 20
    assert all(cause.startswith(f"rank 0: {text}") for causes in others for cause in causes), others
    assert [len(causes) for causes in others] == [20, 20]
