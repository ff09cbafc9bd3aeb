"""Calls of a party that has the secret of a running elastic job and is out of date, to one of its ports."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from asyncpar import __version__
from asyncpar._proto.asyncpar.v1 import (
    actors_pb2,
    actors_pb2_grpc,
    group_pb2,
    group_pb2_grpc,
    link_pb2,
    link_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    snapshots_pb2,
    snapshots_pb2_grpc,
)
from asyncpar.core.addresses import split_address
from asyncpar.hosts import consensus_messages as consensus
from asyncpar.hosts.codec import encode_entry, encode_group, encode_message
from asyncpar.hosts.consensus_messages import Entry, Term
from asyncpar.hosts.group import GroupNode, GroupState
from asyncpar.net.transport.grpc_stream import FRAMES_METHOD, SERVICE
from asyncpar.net.transport.rpc import Credentials, open_channel
from asyncpar.net.wire.handshake import NONCE_BYTES, TOKEN_BYTES, WIRE_VERSION, Handshake, LinkTerms

PATIENCE = 30.0
FAR = 1_000_000
PINS = 40


@dataclass
class StaleCaller:
    """Says everything that it can to the gRPC server at ``address``; ``outcomes`` are how the calls ended."""

    address: str
    credentials: Credentials
    generation: int
    """The current generation of the job, of which the caller is none."""
    outcomes: dict[str, list[str]] = field(default_factory=dict)

    async def run(self) -> None:
        """Call all services."""
        async with open_channel(self.address, self.credentials) as channel:
            await self._links(channel)
            await self._frames(channel)
            await self._snapshots(channel)
            await self._rendezvous(channel)
            await self._group(channel)
            stub = actors_pb2_grpc.ActorsStub(channel)  # type: ignore[no-untyped-call]  # generated
            await self._note("ask", stub.Ask(actors_pb2.ActorCall(actor="former", endpoint="step")))

    async def _note(self, what: str, call: Awaitable[Any]) -> Any:
        """Wait for a call, and note its outcome: its answer's kind, or its status."""
        found = None
        try:
            async with asyncio.timeout(PATIENCE):
                found = await call
            kind = _kind(found)
        except grpc.aio.AioRpcError as error:
            kind = error.code().name
        self.outcomes.setdefault(what, []).append(kind)
        return found

    async def _links(self, channel: Any) -> None:
        stub = link_pb2_grpc.LinkStub(channel)  # type: ignore[no-untyped-call]  # generated
        stranger = link_pb2.OpenRequest(wire_version=WIRE_VERSION, job="another", lanes=["tcp", "grpc"])
        probe = await self._note("probe", stub.Open(stranger))
        if probe is None:
            return
        job = probe.refused.message.split("belongs to job '")[-1].split("'")[0]
        for generation in {*range(self.generation), self.generation + 1, FAR}:
            for dialer in range(3):
                for listener in range(2):
                    request = link_pb2.OpenRequest(
                        wire_version=WIRE_VERSION,
                        job=job,
                        generation=generation,
                        from_rank=dialer,
                        to_rank=listener,
                        lanes=["tcp", "grpc", "shm"],
                    )
                    await self._note("stale link", stub.Open(request))
        token = secrets.token_bytes(TOKEN_BYTES)
        await self._note("withdraw", stub.Withdraw(link_pb2.WithdrawRequest(token=token, cause="I am gone")))

    async def _frames(self, channel: Any) -> None:
        call = channel.stream_stream(f"/{SERVICE}/{FRAMES_METHOD}")(_once(opening_of(self.credentials.secret)))
        await self._note("frames", _ended(call))

    async def _snapshots(self, channel: Any) -> None:
        stub = snapshots_pb2_grpc.SnapshotsStub(channel)  # type: ignore[no-untyped-call]  # generated
        if await self._note("position", stub.Position(snapshots_pb2.PositionRequest())) is None:
            return
        await self._note("unpin", stub.Unpin(snapshots_pb2.UnpinRequest(pin=FAR)))
        for _ in range(PINS):  # and never comes again
            await self._note("pin", stub.Pin(snapshots_pb2.PinRequest(step=0)))
        late = asyncio.create_task(_swallowed(stub.Pin(snapshots_pb2.PinRequest(step=FAR))))
        block = channel.unary_unary(
            "/asyncpar.v1.Snapshots/Block", request_serializer=snapshots_pb2.BlockRequest.SerializeToString
        )
        await self._note("block", block(snapshots_pb2.BlockRequest(pin=FAR, name="w", number=0)))
        late.cancel()
        await asyncio.wait({late})

    async def _rendezvous(self, channel: Any) -> None:
        stub = membership_pb2_grpc.RendezvousStub(channel)  # type: ignore[no-untyped-call]  # generated
        member = membership_pb2.Member(rank=0, host="former", host_id="former", local_rank=0, address="127.0.0.1:1")
        request = membership_pb2.JoinRequest(
            job="agents", generation=0, world_size=2, member=member, timeout_seconds=0.2, session="former"
        )
        await self._note("join", stub.Join(request))

    async def _group(self, channel: Any) -> None:
        stub = group_pb2_grpc.GroupStub(channel)  # type: ignore[no-untyped-call]  # generated
        host = "only"
        node = GroupNode(node=f"{host}#old", name=host, address="127.0.0.1:1")
        old = Entry(
            generation=FAR, voters=(node.node,), nodes=(node.node,), content=encode_group(GroupState(nodes=(node,)))
        )
        for known in (b"", b"\xc1", encode_entry(old)):
            request = group_pb2.EnterRequest(
                version=__version__, node=node.node, name=host, address=node.address, known=known
            )
            await self._note("enter", stub.Enter(request))
        for message in (consensus.Prepare(FAR, Term(FAR, node.node)), consensus.Learn(FAR, old)):
            frame = group_pb2.GroupFrame(
                sender=node.node, sender_address=node.address, receiver=node.node, content=encode_message(message)
            )
            await self._note("exchange", _ended(stub.Exchange(_once(frame), metadata=self.credentials.metadata())))


def _kind(answer: Any) -> str:
    """Return what kind of answer it is, where there are several."""
    if isinstance(answer, link_pb2.OpenReply | membership_pb2.JoinReply):
        return str(answer.WhichOneof("outcome"))
    return "refusal" if isinstance(answer, group_pb2.EnterReply) and answer.refusal else "ok"


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message


async def _ended(call: Any) -> None:
    async for _ in call:
        pass


async def _swallowed(call: Awaitable[Any]) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call


def opening_of(secret: bytes) -> bytes:
    """The first message of a dialer that knows the secret, and an agreement that is over."""
    terms = LinkTerms(job="job", generation=0, dialer=1, listener=0, token=secrets.token_bytes(TOKEN_BYTES))
    return Handshake.dial(terms, secret=secret, nonce=secrets.token_bytes(NONCE_BYTES)).opening


async def knock(address: str, secret: bytes) -> bytes:
    """Return what a port answers to such a first message, up to its end: lanes close without a byte."""
    reader, writer = await asyncio.open_connection(*split_address(address))
    try:
        writer.write(opening_of(secret))
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
