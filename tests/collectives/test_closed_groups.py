"""Groups that are closed, or that nobody has any more, give back their memory; ranks that wait for them learn it."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.protocol import Abort, Probe, Status, decode_control, encode_control
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.net.wire.frame import FrameHeader, FrameKind, Key
from asyncpar.testing import local_world, run_virtual
from tests.collective_engines import engine_of
from tests.collectives.conftest import OpenRanks
from tests.soak import chosen

SMALL = 400 << 10
"""Bytes; 2,000 groups took 16 MB of a world that forgot none."""


def _made(world: Communicator, ranks: tuple[int, ...] = (0, 1)) -> Communicator:
    group = world.subgroup(ranks)
    assert group is not None
    return group


def test_operations_of_a_closed_group_end_here_and_on_the_others(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(2) as ranks:
            groups = [_made(world) for world in ranks.communicators]
            zero, one = (asyncio.ensure_future(groups[0].all_reduce(np.ones(3))) for _ in range(2))
            other = asyncio.ensure_future(groups[1].recv(0))
            await asyncio.sleep(0.01)
            groups[0].close()
            groups[0].close()
            for pending in (zero, one):
                with pytest.raises(UsageError, match="was closed on this rank"):
                    await pending
            with pytest.raises(UsageError, match="it was closed on this rank; make another one"):
                await groups[0].barrier()
            calls = [groups[1].all_reduce(np.ones(3)), groups[1].all_reduce(np.ones(3)), groups[1].barrier(), other]
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, PeerCancelled)
                assert "rank 0 failed in it: the group was closed there" in str(outcome)
            groups[1].close()
            sums = await asyncio.gather(*(world.all_reduce(np.ones(1)) for world in ranks.communicators))
            assert [float(x[0]) for x in sums] == [2.0, 2.0]

    run_virtual(main())


@pytest.mark.parametrize("key", [None, "k"])
def test_who_asks_a_rank_that_has_closed_a_group_learns_what_was_over_and_what_was_not(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be behind in an operation that others have completed, and ask one of them that closed its group."""

    async def main() -> None:
        async with local_world(2) as nodes:
            groups = [_made(node.world) for node in nodes]
            await asyncio.gather(*(group.all_reduce(np.ones(3), key=key) for group in groups))
            table, engine = engine_of(groups[1]).table, engine_of(groups[1])
            answers: asyncio.Queue[tuple[FrameKind, bytes]] = asyncio.Queue()
            control = table.control

            def record(rank: int, header: FrameHeader, payload: bytes) -> None:
                answers.put_nowait((header.kind, bytes(payload)))
                control(rank, header, payload)

            monkeypatch.setattr(table, "control", record)
            past = next(iter(engine.group.history))
            description = engine.group.history[past]
            groups[0].close()
            for sequence in (past, past + 1):
                table.links.control(
                    0, FrameKind.PROBE, Key(engine.group.number, sequence, 0), encode_control(Probe(description))
                )
            kind, status = await answers.get()
            assert kind is FrameKind.STATUS
            assert decode_control(status, Status).text == "it is through with that operation"
            kind, abort = await answers.get()
            assert kind is FrameKind.ABORT
            assert decode_control(abort, Abort).text == "the group was closed there"

    run_virtual(main())


async def test_the_world_is_closed_with_its_node_only(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks:
        with pytest.raises(UsageError, match="the world is closed with its node"):
            ranks.communicators[0].close()


async def test_a_group_lives_while_a_call_of_it_does(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:

        async def run(world: Communicator) -> float:
            call = _made(world).all_reduce(np.ones(1))
            gc.collect()
            await asyncio.sleep(0.01 * world.rank)
            return float((await call)[0])

        assert await asyncio.gather(*(run(world) for world in ranks.communicators)) == [2.0, 2.0]


async def test_a_keyed_group_that_was_closed_is_made_anew_and_leaves_nothing(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:

        async def run(world: Communicator) -> list[float]:
            sums = []
            for turn in range(3):
                group = world.subgroup((0, 1), key="again")
                assert group is not None
                assert world.subgroup((0, 1), key="again") is group
                sums.append(float((await group.all_reduce(np.full(1, float(turn))))[0]))
                group.close()
                assert not world._keyed  # nothing of it can be seen otherwise  # noqa: SLF001  # groups kept for their keys show nowhere but in memory
            return sums

        assert await asyncio.gather(*(run(world) for world in ranks.communicators)) == [[0.0, 2.0, 4.0]] * 2


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(("transport", "count"), [("inproc", chosen(50, soak=2000)), ("shm", chosen(50, soak=300))])
async def test_memory_stays_the_same_over_many_groups(transport: str, count: int, closes: bool) -> None:
    async def use(world: Communicator, rounds: int) -> None:
        for _ in range(rounds):
            group = _made(world)
            await group.all_reduce(np.ones(3))
            if closes:
                group.close()
            del group
            await asyncio.sleep(0)

    async def settled() -> tuple[int, list[int]]:
        await asyncio.sleep(0.01)
        gc.collect()
        await asyncio.sleep(0.01)
        return tracemalloc.get_traced_memory()[0], [len(engine_of(node.world).table._groups) for node in nodes]  # noqa: SLF001  # groups that the table keeps show nowhere but in memory

    async with local_world(2, transport=transport) as nodes, asyncio.timeout(50):
        await asyncio.gather(*(use(node.world, 50) for node in nodes))
        tracemalloc.start()
        try:
            before, groups = await settled()
            await asyncio.gather(*(use(node.world, count) for node in nodes))
            after, groups_then = await settled()
        finally:
            tracemalloc.stop()
        assert groups_then == groups
        assert after - before < SMALL + 160 * 2 * count  # numbers of closed groups, of which 4096 are kept
        if transport == "shm":
            groups_now = [_made(node.world) for node in nodes]
            await asyncio.gather(*(group.all_reduce(np.ones(3), algorithm="arena") for group in groups_now))
            assert all((arena := engine_of(group).arena) is not None and arena.is_open for group in groups_now)


@pytest.mark.parametrize("transport", ["shm", "inproc", "tcp"])
def test_nothing_of_a_world_that_is_over_stays_in_memory(transport: str) -> None:
    async def run() -> list[weakref.ref[object]]:
        async with local_world(3, transport=transport) as nodes:
            groups = [_made(node.world, (0, 1, 2)) for node in nodes]
            for communicators in ([node.world for node in nodes], groups):
                await asyncio.gather(*(communicator.all_reduce(np.ones(200_000)) for communicator in communicators))
            return [weakref.ref(each) for node in nodes for each in (node.world, engine_of(node.world).table)]

    left = asyncio.run(run())
    gc.collect()
    assert [reference() for reference in left] == [None] * 6
