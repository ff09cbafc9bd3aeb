"""Recorded bytes of a raw lane open nothing, on real sockets."""

from __future__ import annotations

import asyncio
import logging

import pytest

from asyncpar._proto.asyncpar.v1 import link_pb2, link_pb2_grpc
from asyncpar.net.transport.rpc import open_channel
from asyncpar.net.wire.handshake import WIRE_VERSION, Handshake, LinkTerms
from tests.net.transport.worlds import CREDENTIALS, Rank, open_world

CHALLENGE_BYTES = 64


async def agree(rank: Rank) -> tuple[int, LinkTerms]:
    """As rank 1, agree on a TCP lane with ``rank``; return its port and the terms."""
    async with open_channel(rank.server.address, CREDENTIALS) as channel:
        stub = link_pb2_grpc.LinkStub(channel)  # type: ignore[no-untyped-call]
        request = link_pb2.OpenRequest(wire_version=WIRE_VERSION, job="local", from_rank=1, to_rank=0, lanes=["tcp"])
        accepted = (await stub.Open(request)).accepted
    terms = LinkTerms(job="local", generation=0, dialer=1, listener=0, token=accepted.token)
    return int(accepted.addresses["tcp"]), terms


async def shake(port: int, terms: LinkTerms) -> tuple[bytes, asyncio.StreamWriter]:
    """Shake hands over a plain socket; return all bytes that were sent."""
    handshake = Handshake.dial(terms, secret=CREDENTIALS.secret, nonce=b"n" * 32)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = handshake.opening
    writer.write(sent)
    while not handshake.is_complete:
        place = handshake.buffer()
        place[:] = await reader.readexactly(len(place))
        answer = handshake.advance(len(place))
        writer.write(answer)
        sent += answer
    return sent, writer


async def answer_to(port: int, opening: bytes) -> int:
    """Send ``opening`` and return how many bytes come back before the connection is closed upon it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(opening)
    count = 0
    try:
        async with asyncio.timeout(30):
            while chunk := await reader.read(1000):
                count += len(chunk)
    except ConnectionResetError:
        return count
    finally:
        writer.transport.abort()
    return count


async def test_a_recorded_handshake_opens_nothing_before_or_after_its_lane_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_world("tcp", "tcp") as ranks:
        for rank in ranks:
            rank.join()
        port, terms = await agree(ranks[0])
        sent, writer = await shake(port, terms)
        while not ranks[0].links.is_up(1):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)
        with caplog.at_level(logging.WARNING):
            assert await answer_to(port, sent) == 0
        assert ranks[0].links.is_up(1), "the lane that was there lives on"
        writer.transport.abort()
    assert "the token of the link is unknown here: used before, expired" in caplog.text


async def test_a_recorded_proof_does_not_answer_another_challenge() -> None:
    """The first connection was cut after its proof was overheard, and the agreement is still open."""
    async with open_world("tcp", "tcp") as ranks:
        for rank in ranks:
            rank.join()
        port, terms = await agree(ranks[0])
        handshake = Handshake.dial(terms, secret=CREDENTIALS.secret, nonce=b"n" * 32)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(handshake.opening)
        handshake.buffer()[:] = await reader.readexactly(CHALLENGE_BYTES)
        proof = handshake.advance(CHALLENGE_BYTES)
        writer.transport.abort()
        assert await answer_to(port, handshake.opening + proof) == CHALLENGE_BYTES
        assert not ranks[0].links.is_up(1)


async def test_the_handshake_of_another_job_is_turned_away_without_an_answer() -> None:
    async with open_world("tcp", "tcp") as ranks:
        for rank in ranks:
            rank.join()
        port, terms = await agree(ranks[0])
        stranger = Handshake.dial(terms, secret=b"x" * 32, nonce=b"n" * 32)
        assert await answer_to(port, stranger.opening) == 0
        assert not ranks[0].links.is_up(1)
