"""Every method of every service, whatever is added later, wants the token of the job."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

import asyncpar._proto.asyncpar.v1 as protos
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.net.transport.grpc_stream import FRAMES_METHOD, SERVICE
from asyncpar.net.transport.negotiation import GrpcConnector
from asyncpar.net.transport.rpc import Credentials, RpcServer, open_channel

one_loop = pytest.mark.asyncio(loop_scope="module")
"""One server for all calls."""

CREDENTIALS = Credentials(b"s" * 32)


def declared_methods() -> list[str]:
    """Return the paths of all methods in our protos, and of those that are not declared there."""
    paths = [f"/{SERVICE}/{FRAMES_METHOD}", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]
    for module in pkgutil.iter_modules(protos.__path__):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(f"{protos.__name__}.{module.name}").DESCRIPTOR
            for service in descriptor.services_by_name.values():
                paths += [f"/{service.full_name}/{method.name}" for method in service.methods]
    return sorted(paths)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address() -> AsyncIterator[str]:
    """Serve all our services."""
    server = RpcServer(CREDENTIALS)
    GrpcConnector(credentials=CREDENTIALS).register(server)
    membership_pb2_grpc.add_RendezvousServicer_to_server(  # type: ignore[no-untyped-call]
        membership_pb2_grpc.RendezvousServicer(), server.server
    )
    membership_pb2_grpc.add_FirstHostServicer_to_server(  # type: ignore[no-untyped-call]
        membership_pb2_grpc.FirstHostServicer(), server.server
    )
    await server.start()
    yield server.address
    await server.stop(grace=0)


@pytest_asyncio.fixture(loop_scope="module")
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel that adds no token."""
    async with open_channel(address, None) as opened:
        yield opened


METHODS = declared_methods()
TOKEN, SHOWN = CREDENTIALS.metadata()[0]
OTHER_JOB = Credentials(b"x" * 32).metadata()


def test_all_services_are_tried() -> None:
    assert len(METHODS) >= 6
    assert "/asyncpar.v1.FirstHost/Attend" in METHODS


@one_loop
@pytest.mark.parametrize(
    "metadata",
    [(), OTHER_JOB, ((TOKEN, ""),), ((TOKEN, SHOWN[:-1]),), ((TOKEN, SHOWN.upper()),), ((TOKEN, "s" * 32),)],
    ids=["none", "of another job", "empty", "cut", "in capitals", "the secret itself"],
)
@pytest.mark.parametrize("method", [*METHODS, "/asyncpar.v1.Link/Unknown", "/unknown.Service/Method"])
async def test_a_call_without_the_jobs_token_is_refused(
    channel: grpc.aio.Channel, method: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, method, metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@one_loop
async def test_with_the_token_the_same_calls_get_through_to_the_service(channel: grpc.aio.Channel) -> None:
    """So that the test above is refused for the token and not for something else."""
    assert await call(channel, "/grpc.health.v1.Health/Check", CREDENTIALS.metadata())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, "/unknown.Service/Method", CREDENTIALS.metadata())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def call(channel: grpc.aio.Channel, method: str, metadata: tuple[tuple[str, str], ...]) -> object:
    """Send one empty message and return the answer: on the wire all four shapes of methods look like this."""
    untyped: Any = channel  # the stubs do not know raw bytes
    return await untyped.unary_stream(method)(b"", metadata=metadata).read()
