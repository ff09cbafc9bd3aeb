"""Local training over in-process worlds: replicas meet as promised, or an error leaves them as they were."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, PeerError, UsageError
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.nn import Array
from asyncpar.node import Node
from asyncpar.parallel.local import DiLoCo, LocalSGD, LocalState
from asyncpar.testing.world import local_world
from tests.parallel.local.replicas import (
    INT8,
    NO_COMPRESSION,
    Replica,
    make_synchronizer,
    on_all,
    on_all_failing,
)


async def synchronous(size: int, steps: int) -> list[Array]:
    """Train with the mean of all gradients in every step."""
    replicas = [Replica(rank) for rank in range(size)]
    for _ in range(steps):
        for replica in replicas:
            replica.compute()
        for same in zip(*(replica.parameters for replica in replicas), strict=True):
            mean = np.mean([parameter.grad for parameter in same], axis=0)
            for parameter in same:
                parameter.grad[...] = mean
        for replica in replicas:
            replica.descend()
    return replicas[0].values()


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_meeting_after_every_step_of_plain_descent_is_synchronous_training(size: int) -> None:
    async def main(node: Node) -> list[Array]:
        replica = Replica(node.rank)
        rounds = LocalSGD(replica.parameters, make_synchronizer(node.world), every=1)
        for _ in range(7):
            replica.train()
            assert await rounds.step()
        return replica.values()

    async with local_world(size) as nodes:
        results = await on_all(nodes, main)
    for values in results:
        for got, expected in zip(values, await synchronous(size, 7), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("compression", [NO_COMPRESSION, INT8], ids=["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_replicas_are_equal_to_the_last_bit_after_each_round(
    compression: GradientCompressionConfig, dtype: str
) -> None:
    async def main(node: Node) -> list[bytes]:
        replica, seen = Replica(node.rank, dtype=dtype), []
        synchronizer = make_synchronizer(node.world, compression=compression)
        rounds = DiLoCo(replica.parameters, synchronizer, every=3)
        for step in range(9):
            replica.train()
            if await rounds.step():
                assert step % 3 == 2
                seen.append(replica.bits())
        assert (rounds.rounds, rounds.steps) == (3, 0)
        return seen

    async with local_world(3) as nodes:
        first, *others = await on_all(nodes, main)
    assert len(set(first)) == 3
    assert all(other == first for other in others)


async def test_replicas_go_their_own_ways_between_rounds() -> None:
    async def main(node: Node) -> bytes:
        replica = Replica(node.rank)
        rounds = LocalSGD(replica.parameters, make_synchronizer(node.world), every=5)
        replica.train()
        assert not await rounds.step()
        return replica.bits()

    async with local_world(2) as nodes:
        first, second = await on_all(nodes, main)
    assert first != second


@pytest.mark.parametrize("every", [1, 4, 10])
async def test_bytes_are_sent_in_one_of_every_h_steps(every: int) -> None:
    async def main(node: Node) -> tuple[int, int, int]:
        replica = Replica(node.rank)
        synchronizer = make_synchronizer(node.world)
        rounds = LocalSGD(replica.parameters, synchronizer, every=every)
        for _ in range(20):
            replica.train()
            await rounds.step()
        statistics = synchronizer.get_sync_stats()
        nbytes = sum(parameter.value.nbytes for parameter in replica.parameters)
        assert await rounds.finish() is False
        return statistics.total_sync_operations, statistics.bytes_uncompressed, nbytes

    async with local_world(2) as nodes:
        for operations, sent, nbytes in await on_all(nodes, main):
            assert operations == 20 // every
            assert 0 < sent / operations - nbytes < 200


async def test_the_last_round_is_ended_by_finish() -> None:
    async def main(node: Node) -> bytes:
        replica = Replica(node.rank)
        rounds = DiLoCo(replica.parameters, make_synchronizer(node.world), every=4)
        for _ in range(6):
            replica.train()
            await rounds.step()
        assert (rounds.rounds, rounds.steps) == (1, 2)
        assert await rounds.finish()
        assert not await rounds.finish()
        assert rounds.rounds == 2
        return replica.bits()

    async with local_world(2) as nodes:
        first, second = await on_all(nodes, main)
    assert first == second


async def go_on(node: Node, *, steps: int, saved: tuple[list[Array], LocalState] | None) -> tuple[Replica, DiLoCo]:
    """Train for ``steps``, from the start or from what was saved."""
    replica = Replica(node.rank, dtype="float32")
    rounds = DiLoCo(replica.parameters, make_synchronizer(node.world, compression=INT8), every=3)
    if saved is not None:
        for parameter, value in zip(replica.parameters, saved[0], strict=True):
            parameter.value[...] = value
        rounds.restore(saved[1])
    for _ in range(steps):
        replica.train()
        await rounds.step()
    return replica, rounds


async def test_a_saved_run_goes_on_identically() -> None:
    async def whole(node: Node) -> bytes:
        replica, rounds = await go_on(node, steps=11, saved=None)
        assert (rounds.rounds, rounds.steps) == (3, 2)
        return replica.bits()

    async def first_part(node: Node) -> tuple[list[Array], LocalState]:
        replica, rounds = await go_on(node, steps=5, saved=None)
        return replica.values(), rounds.state()

    async with local_world(2) as nodes:
        expected = await on_all(nodes, whole)
    async with local_world(2) as nodes:
        saved = await on_all(nodes, first_part)
    assert any(residual.any() for residual in saved[0][1].synchronizer.values())
    async with local_world(2) as nodes:
        parts = [go_on(node, steps=6, saved=saved[node.rank]) for node in nodes]
        results = await asyncio.gather(*parts)
    assert [replica.bits() for replica, _ in results] == expected
    assert [(rounds.rounds, rounds.steps) for _, rounds in results] == [(3, 2), (3, 2)]


async def test_states_of_longer_rounds_are_refused() -> None:
    async with local_world(1) as (node,):
        replica = Replica(0)
        rounds = LocalSGD(replica.parameters, make_synchronizer(node.world), every=5)
        for _ in range(4):
            await rounds.step()
        shorter = LocalSGD(replica.parameters, make_synchronizer(node.world, name="shorter"), every=3)
        with pytest.raises(UsageError, match="state: expected less than 3 steps since the last round, got 4"):
            shorter.restore(rounds.state())
        with pytest.raises(UsageError, match="every: expected 1 step or more, got 0"):
            LocalSGD(replica.parameters, make_synchronizer(node.world, name="none"), every=0)


async def test_a_rank_that_is_not_finite_fails_the_round_everywhere_and_nothing_moves() -> None:
    async def main(node: Node) -> None:
        replica = Replica(node.rank)
        rounds = LocalSGD(replica.parameters, make_synchronizer(node.world), every=2)
        replica.train(2)
        if node.rank == 1:
            replica.parameters[0].value[3, 4] = np.nan
        before = replica.bits()
        assert not await rounds.step()
        with pytest.raises(NonFiniteValue):
            await rounds.step()
        assert replica.bits() == before
        assert (rounds.rounds, rounds.steps) == (0, 1)
        rounds.reset()
        assert rounds.steps == 0
        replica.train(2)
        await rounds.step()
        assert await rounds.step()
        assert np.isfinite(replica.parameters[0].value).all()

    async with local_world(2) as nodes:
        await on_all(nodes, main)


async def test_a_rank_that_gives_up_a_round_lets_all_repeat_it() -> None:
    async def main(node: Node) -> tuple[bytes, bytes]:
        replica = Replica(node.rank)
        rounds = LocalSGD(replica.parameters, make_synchronizer(node.world), every=1)
        replica.train()
        before = replica.bits()
        with pytest.raises((TimeoutError, PeerError)):
            async with asyncio.timeout(0 if node.rank == 1 else None):
                await rounds.step()
        assert replica.bits() == before
        assert await rounds.step()
        return before, replica.bits()

    async with local_world(3) as nodes:
        results = await on_all(nodes, main)
    assert len({before for before, _ in results}) == 3
    assert len({after for _, after in results}) == 1


async def test_a_lost_rank_leaves_the_parameters_of_the_others() -> None:
    async with local_world(3) as nodes:
        replicas = [Replica(node.rank) for node in nodes]
        every = [
            LocalSGD(replica.parameters, make_synchronizer(node.world), every=1)
            for node, replica in zip(nodes, replicas, strict=True)
        ]
        for replica in replicas:
            replica.train()
        before = [replica.bits() for replica in replicas]
        waiting = [asyncio.ensure_future(rounds.step()) for rounds in every[:2]]
        await nodes[2].stop()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, PeerError) for error in errors), errors
    assert [replica.bits() for replica in replicas] == before


@pytest.mark.parametrize(
    ("every", "rate", "moved", "message"),
    [
        (3, 0.7, 0.0, "rank 1 has a round of 3 of 3 steps"),
        (2, 0.5, 0.0, "rank 1 has a round of 2 of 2 steps from .* at rate 0.5"),
        (2, 0.7, 1e-9, "rank 1 has a round of 2 of 2 steps from"),
    ],
    ids=["length", "rate", "start"],
)
async def test_ranks_that_differ_learn_it_before_they_meet(every: int, rate: float, moved: float, message: str) -> None:
    async def main(node: Node) -> None:
        replica, is_odd = Replica(node.rank), node.rank == 1
        replica.parameters[0].value[0, 0] += moved * is_odd
        rounds = DiLoCo(
            replica.parameters,
            make_synchronizer(node.world),
            every=every if is_odd else 2,
            outer_learning_rate=rate if is_odd else 0.7,
        )
        for _ in range(every if is_odd else 2):
            replica.train()
            before = replica.bits()
            await rounds.step()
        assert replica.bits() == before

    async with local_world(3) as nodes:
        errors = await on_all_failing(nodes, main)
    assert all(isinstance(error, UsageError) for error in errors), errors
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(UsageError, match=message):
        raise errors[0]  # type: ignore[misc]


async def test_large_models_are_moved_off_the_loop_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(node: Node) -> bytes:
        replica = Replica(node.rank)
        rounds = DiLoCo(replica.parameters, make_synchronizer(node.world), every=2)
        for _ in range(4):
            replica.train()
            await rounds.step()
        return replica.bits()

    async with local_world(2) as nodes:
        inline = await on_all(nodes, main)
        monkeypatch.setattr("asyncpar.core.concurrency.tasks.INLINE_BYTES", 0)
        assert await on_all(nodes, main) == inline
