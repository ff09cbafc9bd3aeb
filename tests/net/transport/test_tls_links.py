"""Links between ranks with certificates: what is encrypted, and who may link as whom."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from asyncpar._proto.asyncpar.v1 import link_pb2, link_pb2_grpc
from asyncpar.errors import AuthenticationError
from asyncpar.net.security.identity import PeerIdentity, rank_role
from asyncpar.net.security.issuing import Authority
from asyncpar.net.transport.grpc_stream import ClientStream, StreamEnded, call_frames, shake_hands
from asyncpar.net.transport.rpc import Credentials, open_channel
from asyncpar.net.transport.tls_probe import check_tls
from asyncpar.net.wire.handshake import WIRE_VERSION, Handshake, LinkTerms
from tests.net.security.parties import JOB, authority_now, certify
from tests.net.transport.worlds import exchange, loss, open_world

SECRET = b"s" * 32


@pytest.fixture
def authority() -> Authority:
    return authority_now()


@pytest.fixture
def credentials(tmp_path: Path, authority: Authority) -> list[Credentials]:
    """Return those of ranks 0 to 3."""
    return [Credentials(SECRET, certify(authority, rank_role(rank), tmp_path / str(rank))) for rank in range(4)]


async def speak(stream: ClientStream, handshake: Handshake) -> None:
    """Shake hands and wait for what comes of it."""
    await shake_hands(stream, handshake)
    await stream.read()


async def test_what_leaves_a_host_takes_the_encrypted_lane_and_what_stays_the_fastest(
    credentials: list[Credentials],
) -> None:
    async with open_world(None, None, None, hosts="aba", credentials=credentials, job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        kinds = [ranks[0].links.lane_kind(rank) for rank in (1, 2)]
        await exchange(ranks[0].links, ranks[1].links)
        await exchange(ranks[2].links, ranks[0].links)
        await exchange(ranks[2].links, ranks[1].links, length=3_000_000)
        assert [ranks[0].links.lane_kind(rank) for rank in (1, 2)] == kinds == ["grpc", "shm"]
        assert ranks[2].links.lane_kind(1) == "grpc"


async def test_a_pinned_tcp_lane_is_the_users_decision(credentials: list[Credentials]) -> None:
    async with open_world("tcp", "tcp", hosts="ab", credentials=credentials, job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        await exchange(ranks[0].links, ranks[1].links)
        assert ranks[0].links.lane_kind(1) == "tcp"


async def test_a_rank_of_another_host_is_not_given_a_lane_in_the_clear(credentials: list[Credentials]) -> None:
    async with open_world(None, None, hosts="ab", credentials=credentials, job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        request = link_pb2.OpenRequest(wire_version=WIRE_VERSION, job=JOB, from_rank=1, to_rank=0, lanes=["tcp"])
        channel = open_channel(ranks[0].server.address, credentials[1], peer=rank_role(0))
        reply = await link_pb2_grpc.LinkStub(channel).Open(request)  # type: ignore[no-untyped-call]
        await channel.close(None)
        assert reply.refused.reason == link_pb2.OpenReply.Refused.NO_COMMON_LANE


async def test_a_rank_cannot_open_a_link_as_another(
    credentials: list[Credentials], caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(None, None, None, credentials=credentials, job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        request = link_pb2.OpenRequest(wire_version=WIRE_VERSION, job=JOB, from_rank=1, to_rank=0, lanes=["tcp"])
        channel = open_channel(ranks[0].server.address, credentials[2], peer=rank_role(0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link_pb2_grpc.LinkStub(channel).Open(request)  # type: ignore[no-untyped-call]
        await channel.close(None)
    refusal = "it calls as rank 1 of job 'demo', but its certificate is for rank 2 of job 'demo'"
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, refusal)
    assert refusal in caplog.text


async def test_a_rank_cannot_take_up_the_agreement_of_another(credentials: list[Credentials]) -> None:
    async with open_world("grpc", "grpc", "grpc", credentials=credentials, job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        request = link_pb2.OpenRequest(wire_version=WIRE_VERSION, job=JOB, from_rank=1, to_rank=0, lanes=["grpc"])
        channels = [open_channel(ranks[0].server.address, credentials[rank], peer=rank_role(0)) for rank in (1, 2)]
        reply = await link_pb2_grpc.LinkStub(channels[0]).Open(request)  # type: ignore[no-untyped-call]
        terms = LinkTerms(job=JOB, generation=0, dialer=1, listener=0, token=reply.accepted.token)
        stream = call_frames(channels[1], ())
        with pytest.raises(StreamEnded, match="PERMISSION_DENIED"):
            await speak(stream, Handshake.dial(terms, secret=SECRET, nonce=b"n" * 32))
        for channel in channels:
            await channel.close(None)
        assert ranks[0].links.lost == {}
        assert not ranks[0].links.is_up(1)


async def test_a_rank_cannot_withdraw_the_agreement_of_another(
    credentials: list[Credentials], caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world("grpc", "grpc", "grpc", credentials=credentials, job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        request = link_pb2.OpenRequest(wire_version=WIRE_VERSION, job=JOB, from_rank=1, to_rank=0, lanes=["grpc"])
        stubs = []
        async with AsyncExitStack() as stack:
            for caller in (1, 2):
                channel = open_channel(ranks[0].server.address, credentials[caller], peer=rank_role(0))
                await stack.enter_async_context(channel)
                stubs.append(link_pb2_grpc.LinkStub(channel))  # type: ignore[no-untyped-call]
            reply = await stubs[0].Open(request)
            withdrawal = link_pb2.WithdrawRequest(token=reply.accepted.token, cause="no way")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stubs[1].Withdraw(withdrawal)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert ranks[0].links.lost == {}
            await stubs[0].Withdraw(withdrawal)
        assert ranks[0].links.lost[1].cause == "it cannot connect to rank 0: no way"
    assert "it calls as rank 1 of job 'demo', but its certificate is for rank 2 of job 'demo'" in caplog.text


async def test_an_impostor_at_a_ranks_address_is_named_at_once(
    credentials: list[Credentials],
) -> None:
    """Rank 1's place is served with the certificate of rank 3."""
    mixed = [credentials[0], credentials[3]]
    async with open_world(None, None, credentials=mixed, job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        async with asyncio.timeout(30):
            error = await loss(ranks[0].links, 1)
    assert "shows the certificate of rank 3 of job 'demo', not of rank 1 of job 'demo'" in str(error)
    assert isinstance(error.__cause__, AuthenticationError)


@pytest.mark.parametrize("dialer", [0, 1])
async def test_ranks_with_certificates_of_two_runs_get_the_reason(
    credentials: list[Credentials], tmp_path: Path, dialer: int
) -> None:
    other = Credentials(SECRET, certify(authority_now(), rank_role(1), tmp_path / "other"))
    async with open_world(None, None, credentials=[credentials[0], other], job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        async with asyncio.timeout(30):
            error = await loss(ranks[dialer].links, 1 - dialer)
    assert "all hosts need certificates of the same `asyncpar certs init`" in str(error)


@pytest.mark.parametrize("bare", [0, 1])
async def test_a_rank_without_certificates_among_others_gets_a_reason(
    credentials: list[Credentials], bare: int
) -> None:
    mixed = [Credentials(SECRET) if rank == bare else credentials[rank] for rank in range(2)]
    async with open_world(None, None, credentials=mixed, job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        async with asyncio.timeout(30):
            error = await loss(ranks[0].links, 1)
    assert "give all hosts --certs" in str(error)


async def test_a_certificate_of_another_job_is_refused_even_from_the_same_authority(
    authority: Authority, credentials: list[Credentials], tmp_path: Path
) -> None:
    shown = certify(authority, rank_role(1), tmp_path / "stranger", job="other")
    stranger = Credentials(SECRET, replace(shown, identity=PeerIdentity(JOB, rank_role(1))))
    async with open_world(None, credentials=credentials, job=JOB) as (one,):
        one.join()
        channel = open_channel(one.server.address, stranger, peer=rank_role(0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link_pb2_grpc.LinkStub(channel).Open(link_pb2.OpenRequest(job=JOB, from_rank=1))  # type: ignore[no-untyped-call]
        await channel.close(None)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "its certificate is for rank 1 of job 'other'" in str(caught.value.details())


async def test_ranks_whose_certificates_have_other_numbers_expect_those_of_each_other(
    credentials: list[Credentials],
) -> None:
    """As in an elastic job: ranks 0 and 1 of this world have the certificates of the slots 3 and 1."""
    world = [credentials[slot].in_world([3, 1]) for slot in (3, 1)]
    async with open_world(None, None, hosts="ab", credentials=world, job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        await exchange(ranks[0].links, ranks[1].links)
        assert ranks[0].links.lane_kind(1) == "grpc"


async def test_a_rank_with_the_certificate_of_another_slot_gets_no_link(credentials: list[Credentials]) -> None:
    world = [credentials[3].in_world([3, 1]), credentials[2].in_world([3, 1])]
    async with open_world(None, None, hosts="ab", credentials=world, job=JOB) as ranks:
        for rank in ranks:
            rank.join()
        request = link_pb2.OpenRequest(wire_version=WIRE_VERSION, job=JOB, from_rank=1, to_rank=0, lanes=["grpc"])
        channel = open_channel(ranks[0].server.address, world[1], peer=world[1].role_of(0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link_pb2_grpc.LinkStub(channel).Open(request)  # type: ignore[no-untyped-call]
        await channel.close(None)
        with pytest.raises(AuthenticationError, match="shows the certificate of rank 2 of job 'demo', not of rank 1"):
            await check_tls(ranks[1].server.address, world[0], world[0].role_of(1))
    assert caught.value.details() == "it calls as rank 1 of job 'demo', but its certificate is for rank 2 of job 'demo'"
    assert world[0].role_of(2).label == "rank--1", "of a rank that is not in the world nobody has a certificate"
