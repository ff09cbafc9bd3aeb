"""Credentials of others: wrong, of another job, recorded and played again, or shown under another rank's name."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyncpar._proto.asyncpar.v1 import link_pb2, link_pb2_grpc
from asyncpar.core.config.world import Member, World
from asyncpar.errors import AuthenticationError
from asyncpar.net.transport.grpc_stream import StreamEnded, call_frames, shake_hands
from asyncpar.net.transport.links import Links
from asyncpar.net.transport.machine import Accept, Negotiator, Proposal, Refuse
from asyncpar.net.transport.negotiation import GrpcConnector
from asyncpar.net.transport.rpc import Credentials, RpcServer, open_channel
from asyncpar.net.wire.frame import FrameKind, Key
from asyncpar.net.wire.handshake import NONCE_BYTES, WIRE_VERSION, Handshake, LinkTerms
from tests.hostile.doors import OVER, Door, open_door, read_all, say
from tests.hostile.victim import frame
from tests.net.transport.pairs import SECRET, TERMS

KINDS = ("tcp", "unix")
CHALLENGE_BYTES = 64


async def record(door: Door) -> tuple[bytes, bytes]:
    """Come in, and return both messages with which that was possible."""
    loop = asyncio.get_running_loop()
    handshake = Handshake.dial(TERMS, secret=SECRET, nonce=b"n" * NONCE_BYTES)
    with door.knock() as peer:
        await loop.sock_sendall(peer, handshake.opening)
        place = handshake.buffer()
        place[:] = await loop.sock_recv(peer, CHALLENGE_BYTES)
        proof = handshake.advance(CHALLENGE_BYTES)
        await loop.sock_sendall(peer, proof)
        (await door.lanes.get()).abort(OVER)
    return handshake.opening, proof


async def play(door: Door, *messages: bytes) -> bytes:
    """Say ``messages`` and return all that ``door`` answers until it closes."""
    with door.knock() as stranger:
        await say(stranger, b"".join(messages))
        return await read_all(stranger)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_recorded_handshake_opens_nothing_even_while_its_agreement_lasts(kind: str) -> None:
    async with open_door(kind) as door:
        hello, proof = await record(door)
        answer = await play(door, hello, proof, frame(FrameKind.EAGER, Key(7, 1, 0)))
        assert len(answer) == CHALLENGE_BYTES, "a fresh challenge, which the recorded proof does not answer"
        assert door.lanes.empty()
        assert "could not prove" in str(door.refused[-1])
        await door.let_in()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_recorded_handshake_gets_no_byte_once_its_agreement_is_used_up(kind: str) -> None:
    agreed = {TERMS.token: TERMS}
    async with open_door(kind, find_terms=agreed.get) as door:
        hello, proof = await record(door)
        agreed.clear()
        assert await play(door, hello, proof) == b""
        assert "used before, expired, or of another node" in str(door.refused[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("secret", "terms"),
    [
        (b"o" * 32, TERMS),
        (SECRET, replace(TERMS, token=b"u" * 16)),
        (SECRET, replace(TERMS, listener=5)),
        (SECRET, replace(TERMS, generation=9)),
    ],
    ids=["another job", "another agreement", "another node", "another generation"],
)
async def test_a_recorded_handshake_gets_no_byte_from_another_listener(
    kind: str, secret: bytes, terms: LinkTerms
) -> None:
    async with open_door(kind) as door:
        hello, proof = await record(door)
    async with open_door(
        kind, secret=secret, find_terms=lambda token: terms if token == terms.token else None
    ) as other:
        assert await play(other, hello, proof) == b""
        assert other.lanes.empty()
        assert isinstance(other.refused[0], AuthenticationError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("secret", [b"o" * 32, SECRET[:-1] + b"t", bytes(32), SECRET + b"s"])
async def test_a_wrong_secret_gets_no_byte(kind: str, secret: bytes) -> None:
    async with open_door(kind) as door:
        assert await play(door, Handshake.dial(TERMS, secret=secret, nonce=b"n" * NONCE_BYTES).opening) == b""
        assert "could not prove" in str(door.refused[0])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rank_that_shows_the_agreement_of_another_is_refused(kind: str) -> None:
    """The token of rank 1 in the hands of rank 2, which holds the secret, too."""
    async with open_door(kind) as door:
        stolen = replace(TERMS, dialer=2)
        assert await play(door, Handshake.dial(stolen, secret=SECRET, nonce=b"n" * NONCE_BYTES).opening) == b""
        assert "rank 1 dialing rank 0" in str(door.refused[0])
        assert "rank 2 dialing rank 0" in str(door.refused[0])


# -- over gRPC -------------------------------------------------------------------------------------------------------

OWN, OTHER = Credentials(b"s" * 32), Credentials(b"o" * 32)
WRONG: dict[str, tuple[tuple[str, Any], ...]] = {
    "none": (),
    "of another job": OTHER.metadata(),
    "cut": tuple((key, value[:-1]) for key, value in OWN.metadata()),
    "empty": (("asyncpar-token", ""),),
    "the secret itself": (("asyncpar-token", OWN.secret.hex()),),
    "binary": (("asyncpar-token-bin", bytes.fromhex(OWN.metadata()[0][1])),),
    "twice, the wrong one last": (*OWN.metadata(), *OTHER.metadata()),
}


@pytest.mark.parametrize("metadata", WRONG.values(), ids=WRONG.keys())
async def test_no_call_is_answered_without_the_token_of_the_job(metadata: tuple[tuple[str, Any], ...]) -> None:
    server = RpcServer(OWN)
    connector = GrpcConnector(credentials=OWN, transport="grpc")
    connector.register(server)
    await server.start()
    channel = open_channel(server.address, None)
    health = health_pb2_grpc.HealthStub(channel)
    open_link: Any = link_pb2_grpc.LinkStub(channel).Open  # type: ignore[no-untyped-call]
    handshake = Handshake.dial(TERMS, secret=SECRET, nonce=b"n" * NONCE_BYTES)
    try:
        for call in (
            health.Check(health_pb2.HealthCheckRequest(), metadata=metadata),
            open_link(link_pb2.OpenRequest(), metadata=metadata),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for turns in range(40):  # the refusal arrives before, during or after the first write
            frames = call_frames(channel, metadata)
            for _ in range(turns):
                await asyncio.sleep(0)
            with pytest.raises(StreamEnded, match="UNAUTHENTICATED"):
                await shake_hands(frames, handshake)
        watch = health.Watch(health_pb2.HealthCheckRequest(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(watch))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        await channel.close(None)
        await connector.stop()
        await server.stop(grace=0)


def test_proposals_of_ranks_that_do_not_exist_or_are_oneself_are_refused() -> None:
    negotiator = Negotiator(job="job", generation=3, rank=1, size=4, lanes=("tcp",))
    fair = Proposal(job="job", generation=3, dialer=0, listener=1, lanes=("tcp",))
    assert isinstance(negotiator.answer(fair, token=b"t" * 16, is_up=False, lost=None), Accept)
    for unfair in (
        replace(fair, dialer=1),
        replace(fair, dialer=4),
        replace(fair, dialer=-1),
        replace(fair, dialer=2**32 - 1),
        replace(fair, listener=2),
        replace(fair, job="other"),
        replace(fair, generation=2),
        replace(fair, lanes=()),
        replace(fair, lanes=("\0", "tcp" * 1000)),
    ):
        assert isinstance(negotiator.answer(unfair, token=b"t" * 16, is_up=False, lost=None), Refuse)
    greedy = replace(fair, connections=2**31)
    answer = negotiator.answer(greedy, token=b"t" * 16, is_up=False, lost=None)
    assert isinstance(answer, Accept)
    assert answer.terms.connections == 1


async def test_links_of_ranks_that_do_not_exist_are_refused_over_the_wire() -> None:
    server = RpcServer(OWN)
    connector = GrpcConnector(credentials=OWN, transport="grpc")
    connector.register(server)
    await server.start()
    await connector.start()
    world = World(members=(Member(rank=0, address=server.address), Member(rank=1, address="127.0.0.1:1")))
    channel = open_channel(server.address, OWN)
    open_link: Any = link_pb2_grpc.LinkStub(channel).Open  # type: ignore[no-untyped-call]
    try:
        async with Links(world=world, rank=0, connector=connector) as links:
            connector.join(links)
            for dialer, listener in ((0, 0), (2, 0), (2**32 - 1, 0), (1, 1)):
                request = link_pb2.OpenRequest(
                    wire_version=WIRE_VERSION,
                    job=world.job,
                    generation=0,
                    from_rank=dialer,
                    to_rank=listener,
                    lanes=["grpc"],
                    connections=2**32 - 1,
                )
                reply = await open_link(request)
                assert reply.HasField("refused")
    finally:
        await channel.close(None)
        await connector.stop()
        await server.stop(grace=0)
