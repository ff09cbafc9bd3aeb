"""Joining over real gRPC, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.config.world import Member
from asyncpar.errors import (
    AuthenticationError,
    LaunchError,
    PeerLost,
    PeerTimeout,
    StaleGeneration,
    UsageError,
)
from asyncpar.net.membership.client import JoinRequest, join_world
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.transport.rpc import Credentials, RpcServer
from tests.ports import free_port

CREDENTIALS = Credentials(bytes(range(32)))


@asynccontextmanager
async def rendezvous(*, size: int | None = None, port: int = 0) -> AsyncIterator[tuple[RendezvousService, str]]:
    server = RpcServer(CREDENTIALS, port=port)
    service = RendezvousService(job="job", world_size=size)
    membership_pb2_grpc.add_RendezvousServicer_to_server(service, server.server)  # type: ignore[no-untyped-call]
    await server.start()
    try:
        yield service, server.address
    finally:
        await server.stop(grace=0)


async def until(is_so: Callable[[], bool]) -> None:
    """Let the loop run until ``is_so()``; the test's own timeout bounds it."""
    while not is_so():  # noqa: ASYNC110  # the service counts, it has no event to wait for
        await asyncio.sleep(0)


def request(rank: int, size: int, *, timeout: float = 20.0, settings: str = "", generation: int = 0) -> JoinRequest:
    member = Member(rank=rank, host="here", host_id="here-1", local_rank=rank, address=f"127.0.0.1:{4000 + rank}")
    return JoinRequest(
        member=member, world_size=size, generation=generation, job="job", settings=settings, timeout=timeout
    )


async def test_all_ranks_get_one_world() -> None:
    async with rendezvous(size=3) as (_, address):
        worlds = await asyncio.gather(*(join_world(address, CREDENTIALS, request(rank, 3)) for rank in (2, 0, 1)))
    assert worlds[0] == worlds[1] == worlds[2]
    assert [member.address for member in worlds[0].members] == [f"127.0.0.1:{4000 + rank}" for rank in range(3)]
    assert worlds[0].hosts == ((0, 1, 2),)


async def test_waiting_is_bounded_and_names_who_is_missing() -> None:
    async with rendezvous(size=3) as (_, address):
        with pytest.raises(PeerTimeout, match=r"rank 1 waited 0\.2 s: .*missing ranks 0, 2"):
            await join_world(address, CREDENTIALS, request(1, 3, timeout=0.2))


async def test_a_rank_that_exits_first_ends_the_wait_at_once() -> None:
    async with rendezvous(size=2) as (service, address):
        waiting = asyncio.ensure_future(join_world(address, CREDENTIALS, request(0, 2)))
        await until(lambda: service.waiting == 1)
        service.exited(generation=0, rank=1, how="exited with code 3")
        with pytest.raises(PeerLost, match="rank 1 exited with code 3 before it joined") as caught:
            await waiting
    assert caught.value.rank == 1


async def test_a_duplicate_rank_is_a_usage_error_for_everyone() -> None:
    async with rendezvous(size=3) as (_, address):
        results = await asyncio.gather(
            *(join_world(address, CREDENTIALS, request(0, 3)) for _ in range(2)), return_exceptions=True
        )
    assert [type(result) for result in results] == [UsageError, UsageError]


async def test_an_older_generation_is_stale() -> None:
    async with rendezvous(size=1) as (service, address):
        service.open(generation=1, world_size=1)
        with pytest.raises(StaleGeneration, match="generation 1 is in force"):
            await join_world(address, CREDENTIALS, request(0, 1))


async def test_a_wrong_secret_is_an_authentication_error() -> None:
    async with rendezvous(size=1) as (_, address):
        with pytest.raises(AuthenticationError, match="secret"):
            await join_world(address, Credentials(bytes(32)), request(0, 1))


async def test_a_closed_rendezvous_is_a_launch_error() -> None:
    async with rendezvous(size=2) as (service, address):
        service.close("the job ended")
        with pytest.raises(LaunchError, match="the job ended"):
            await join_world(address, CREDENTIALS, request(0, 2))


async def test_a_cancelled_join_leaves_its_seat() -> None:
    async with rendezvous(size=2) as (service, address):
        waiting = asyncio.ensure_future(join_world(address, CREDENTIALS, request(0, 2)))
        await until(lambda: service.waiting == 1)
        waiting.cancel()
        await asyncio.wait({waiting})
        await until(lambda: service.waiting == 0)
        again, other = await asyncio.gather(
            join_world(address, CREDENTIALS, request(0, 2)), join_world(address, CREDENTIALS, request(1, 2))
        )
    assert again == other


async def test_a_rendezvous_that_is_not_there_yet_is_waited_for() -> None:
    port = free_port()
    joining = asyncio.ensure_future(join_world(f"127.0.0.1:{port}", CREDENTIALS, request(0, 1)))
    await asyncio.sleep(0)
    async with rendezvous(size=1, port=port):
        assert (await joining).size == 1


async def test_a_rendezvous_that_never_comes_is_a_launch_error_in_bounded_time() -> None:
    with pytest.raises(LaunchError, match=r"could not be reached for 0\.3 s"):
        await join_world(f"127.0.0.1:{free_port()}", CREDENTIALS, request(0, 1, timeout=0.3))


@pytest.mark.parametrize(("rank", "size", "timeout"), [(2, 2, 1.0), (0, 0, 1.0), (0, 1, 0.0), (0, 1, float("inf"))])
def test_impossible_requests_are_refused_before_any_call(rank: int, size: int, timeout: float) -> None:
    with pytest.raises(UsageError, match="expected"):
        JoinRequest(member=Member(rank=rank), world_size=size, timeout=timeout)
