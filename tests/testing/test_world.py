"""local_world: many ranks in one process."""

import asyncio

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.net.transport.striped import StripedLane
from asyncpar.testing import TRANSPORTS


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_ranks_of_a_local_world_reduce_together(transport: str, size: int) -> None:
    async with ap.testing.local_world(size, transport=transport) as nodes:
        arrays = [np.full(10_000, node.rank + 1, np.float32) for node in nodes]
        await asyncio.gather(*(node.world.all_reduce(x) for node, x in zip(nodes, arrays, strict=True)))
    for x in arrays:
        np.testing.assert_array_equal(x, size * (size + 1) / 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_frames_take_the_lane_that_was_asked_for(transport: str) -> None:
    async with ap.testing.local_world(2, transport=transport) as nodes:
        await asyncio.gather(*(node.world.barrier() for node in nodes))
        lanes = {node.links.lane_kind(1 - node.rank) for node in nodes}
    assert lanes == {transport}


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_sockets_are_refused_in_virtual_time(transport: str) -> None:
    async def main() -> None:
        async with ap.testing.local_world(2, transport=transport):
            pytest.fail("it was opened")

    with pytest.raises(ap.UsageError, match=f"transport: expected inproc in virtual time, .* got '{transport}'"):
        ap.testing.run_virtual(main())


async def test_hosts_can_be_pretended() -> None:
    async with ap.testing.local_world(4, hosts=["a", "b", "a", "b"]) as nodes:
        assert nodes[0].membership.hosts == ((0, 2), (1, 3))
        assert [member.local_rank for member in nodes[0].membership.members] == [0, 0, 1, 1]


async def test_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    async with ap.testing.local_world(3, transport="tcp") as nodes:
        await asyncio.gather(*(node.world.barrier() for node in nodes))
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size: expected at least 1 rank, got 0"),
        ({"size": 2, "transport": "pigeon"}, "transport: expected one of inproc, shm, tcp, grpc, got 'pigeon'"),
        ({"size": 2, "hosts": ["a"]}, "hosts: expected a name for each of 2 ranks, got 1"),
        (
            {"size": 3, "transport": "shm", "hosts": ["a", "a", "b"]},
            "transport: shm is pinned, which joins ranks of one host, but rank 0 is on a and rank 2 on b; pin tcp",
        ),
    ],
)
async def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ap.UsageError, match=message):
        async with ap.testing.local_world(**arguments):  # type: ignore[arg-type]
            pass


async def test_the_cost_model_reckons_with_the_lane_that_is_pinned() -> None:
    tables = set()
    for transport in TRANSPORTS:
        async with ap.testing.local_world(4, transport=transport) as nodes:
            tables.add(nodes[0].world.algorithm_table())
    assert len(tables) == len(TRANSPORTS)


async def test_a_rank_that_cannot_start_leaves_no_other_behind() -> None:
    before = asyncio.all_tasks()
    with pytest.raises(ap.UsageError, match="pin"):
        async with ap.testing.local_world(3, pin="all_reduce:0-inf@pigeon"):
            pass
    assert asyncio.all_tasks() == before


async def test_links_take_as_many_connections_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCPAR_CONNECTIONS", "3")
    async with ap.testing.local_world(3, transport="tcp") as nodes:
        arrays = [np.arange(1_000_003, dtype=np.float32) % 61 + node.rank for node in nodes]
        await asyncio.gather(*(node.world.all_reduce(x) for node, x in zip(nodes, arrays, strict=True)))
        lanes = [node.links.link((node.rank + 1) % 3).lane for node in nodes]
    for x in arrays:
        np.testing.assert_array_equal(x, 3 * (np.arange(1_000_003) % 61) + 3)
    for lane in lanes:
        assert isinstance(lane, StripedLane)
        assert all(connection.bytes_sent > 100_000 for connection in lane.connections)


async def test_a_wrong_number_of_connections_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCPAR_CONNECTIONS", "many")
    with pytest.raises(ap.UsageError, match=r"ASYNCPAR_CONNECTIONS: expected 1\.\.16, got 'many'"):
        async with ap.testing.local_world(2, transport="tcp"):
            pytest.fail("it was opened")
