"""A listener that answers what it should not: the link is lost, and says why."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from google.protobuf.message import DecodeError

from asyncpar._proto.asyncpar.v1 import link_pb2, link_pb2_grpc
from asyncpar.core.config.world import Member, World
from asyncpar.errors import PeerLost
from asyncpar.net.transport.links import Links
from asyncpar.net.transport.negotiation import GrpcConnector
from asyncpar.net.transport.rpc import Credentials, RpcServer
from asyncpar.net.wire.frame import Key
from asyncpar.net.wire.handshake import WIRE_VERSION
from tests.hostile.inputs import bit_flips
from tests.soak import chosen

CREDENTIALS = Credentials(b"s" * 32)
TOKEN = b"t" * 16
EACH = chosen(7, soak=1)
"""Of so many bits of an answer one is changed."""
MOST = chosen(8, soak=1000)
"""Most answers that a listener gives: each takes servers and a link."""
_Accepted = partial(link_pb2.OpenReply.Accepted, wire_version=WIRE_VERSION)
_Refused = link_pb2.OpenReply.Refused


class Liar(link_pb2_grpc.LinkServicer):
    """Accepts a link in its own way."""

    def __init__(self, reply: link_pb2.OpenReply) -> None:
        self._reply = reply

    async def Open(self, request: object, context: object) -> link_pb2.OpenReply:
        return self._reply


async def loss_of(reply: link_pb2.OpenReply) -> PeerLost:
    """Return how a link to a listener ends that answers ``reply``."""
    server = RpcServer(CREDENTIALS)
    link_pb2_grpc.add_LinkServicer_to_server(Liar(reply), server.server)  # type: ignore[no-untyped-call]
    await server.start()
    own = RpcServer(CREDENTIALS)
    connector = GrpcConnector(credentials=CREDENTIALS, connections=2)
    connector.register(own)
    await own.start()
    await connector.start()
    world = World(members=(Member(rank=0, address=own.address), Member(rank=1, address=server.address)))
    try:
        async with Links(world=world, rank=0, connector=connector) as links:
            connector.join(links)
            sending = links.link(1).send(Key(1, 0, 0), 0, memoryview(b"x"))
            assert sending is not None
            async with asyncio.timeout(30):
                with pytest.raises(PeerLost) as caught:
                    await sending.done
            return caught.value
    finally:
        await connector.stop()
        await own.stop(grace=0)
        await server.stop(grace=0)


@pytest.mark.parametrize(
    ("accepted", "why"),
    [
        (_Accepted(), "it accepted, but no lane"),
        (_Accepted(lanes=["tcp"], token=b"short", addresses={"tcp": "1"}), "it accepted, but no lane"),
        (_Accepted(lanes=["tcp"], token=TOKEN * 100, addresses={"tcp": "1"}), "it accepted, but no lane"),
        (_Accepted(lanes=["carrier pigeon"] * 1000, token=TOKEN), "it accepted, but no lane"),
        (_Accepted(lanes=["tcp"], token=TOKEN, addresses={"tcp": "65536"}), "it accepted, but no lane"),
        (_Accepted(lanes=["tcp"], token=TOKEN, addresses={"tcp": str(2**32 - 1)}), "it accepted, but no lane"),
        (_Accepted(lanes=["tcp"] * 10_000, token=TOKEN, addresses={"tcp": "1"}), "no TCP connection to"),
        (_Accepted(lanes=["tcp"], token=TOKEN, addresses={"tcp": "0"}, connections=2**32 - 1), "no TCP connection to"),
        (_Accepted(lanes=["shm"], token=TOKEN, addresses={"shm": "x" * 1000}), "no Unix-socket connection"),
        (_Accepted(lanes=["shm"], token=TOKEN, addresses={"shm": "\0\0"}), "no Unix-socket connection"),
        (_Accepted(lanes=["shm"], token=TOKEN), "no Unix-socket connection"),
        (_Accepted(lanes=["grpc"], token=TOKEN), "stream broke: UNIMPLEMENTED"),
    ],
)
async def test_an_acceptance_that_cannot_be_meant_is_a_loss_that_says_why(
    accepted: link_pb2.OpenReply.Accepted, why: str
) -> None:
    assert why in str(await loss_of(link_pb2.OpenReply(accepted=accepted)))


async def test_a_refusal_for_an_unknown_reason_is_a_loss() -> None:
    refused = _Refused(message="\0" * 1000)
    assert "lost" in str(await loss_of(link_pb2.OpenReply(refused=refused)))


async def test_an_answer_with_any_bit_changed_is_a_loss() -> None:
    valid = link_pb2.OpenReply(
        accepted=_Accepted(lanes=["tcp"], token=TOKEN, addresses={"tcp": "1"})
    ).SerializeToString()
    seen: set[bytes] = set()
    for changed in bit_flips(valid, each=EACH):
        reply = link_pb2.OpenReply()
        try:
            reply.ParseFromString(changed)
        except DecodeError:
            continue  # of which gRPC makes an INTERNAL status
        accepted = reply.accepted.SerializeToString(deterministic=True)
        if reply.WhichOneof("outcome") != "accepted" or accepted in seen or len(seen) >= MOST:
            continue
        seen.add(accepted)
        await loss_of(reply)
    assert len(seen) > MOST // 2
