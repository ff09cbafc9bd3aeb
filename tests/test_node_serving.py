"""The gRPC server of a node: services of the program on it, and who may call them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

import asyncpar as ap
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.net.membership.credentials import create_secret
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.transport.rpc import Credentials, RpcServer

ECHO = "tests.Echo"
HEALTH = "grpc.health.v1.Health"


async def echo(request: bytes, _context: object) -> bytes:
    return request


def add_echo(server: grpc.aio.Server, name: str = ECHO) -> None:
    handlers: Any = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


async def call(node: ap.Node, *, credentials: Credentials | None = None, service: str = ECHO) -> bytes:
    metadata = () if credentials is None else credentials.metadata()
    async with grpc.aio.insecure_channel(node.address) as channel:
        echo_there: Any = channel.unary_unary(f"/{service}/Echo", None, None)
        answer: bytes = await echo_there(b"hello", metadata=metadata)
        return answer


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[ap.Node]:
    node = await ap.Node.start(**settings)
    try:
        yield node
    finally:
        await node.stop()


async def test_a_node_alone_serves_when_it_is_given_an_address() -> None:
    async with started(serve="127.0.0.1:0", services=[add_echo]) as node:
        assert node.address.startswith("127.0.0.1:")
        assert await call(node, credentials=node.credentials) == b"hello"


async def test_services_of_the_program_make_a_node_alone_serve_on_loopback() -> None:
    async with started(services=[add_echo]) as node:
        assert node.address.startswith("127.0.0.1:")


async def test_a_node_alone_with_nothing_to_serve_has_no_server() -> None:
    async with started() as node:
        assert node.address == ""
        with pytest.raises(ap.UsageError, match="credentials: expected a node with a server"):
            _ = node.credentials


@pytest.mark.parametrize("credentials", [None, Credentials(bytes(32))])
async def test_a_call_of_a_service_of_the_program_needs_the_token_of_the_job(credentials: Credentials | None) -> None:
    async with started(services=[add_echo]) as node:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(node, credentials=credentials)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_anyone_may_call_a_public_service_and_no_other() -> None:
    services: list[Callable[[grpc.aio.Server], object]] = [add_echo, lambda server: add_echo(server, "tests.EchoToo")]
    async with started(services=services, public_services=[ECHO]) as node:
        assert await call(node) == b"hello"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(node, service="tests.EchoToo")
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_health_service_may_be_made_public() -> None:
    async with (
        started(serve="127.0.0.1:0", public_services=[HEALTH]) as node,
        grpc.aio.insecure_channel(node.address) as channel,
    ):
        check = channel.unary_unary(
            f"/{HEALTH}/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        assert (await check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("name", ["asyncpar.v1.Link", "asyncpar.v1.Actors", "asyncpar.v2.Anything"])
async def test_services_of_the_node_itself_are_never_public(name: str) -> None:
    with pytest.raises(ap.UsageError, match=f"public_services: {name} is how ranks trust each other"):
        await ap.Node.start(services=[add_echo], public_services=[name])


async def test_a_public_service_that_nobody_adds_is_refused() -> None:
    with pytest.raises(ap.UsageError, match=r"no service is called tests\.Ecko; services added: tests\.Echo"):
        await ap.Node.start(services=[add_echo], public_services=["tests.Ecko"])


@pytest.mark.parametrize("name", ["asyncpar.v1.Link", HEALTH])
async def test_a_service_cannot_take_the_place_of_one_of_the_node(name: str) -> None:
    with pytest.raises(ap.UsageError, match="is a service of the node itself"):
        await ap.Node.start(services=[lambda server: add_echo(server, name)])


async def test_a_service_only_registers_the_node_starts_the_server() -> None:
    with pytest.raises(ap.UsageError, match="expected a function that only adds a servicer, it called add_insecure_p"):
        await ap.Node.start(services=[lambda server: server.add_insecure_port("127.0.0.1:0")])


async def test_what_is_no_function_is_no_service() -> None:
    with pytest.raises(ap.UsageError, match="services: expected functions that are given a"):
        await ap.Node.start(services=["tests.Echo"])  # type: ignore[list-item]


@pytest.mark.parametrize("address", ["here", "127.0.0.1", "127.0.0.1:70000", "", 8000])
async def test_an_address_that_is_none_is_refused(address: Any) -> None:
    with pytest.raises(ap.UsageError, match="serve: expected host:port"):
        await ap.Node.start(serve=address)


async def test_alone_a_node_without_a_secret_that_others_know_serves_on_loopback_only() -> None:
    with pytest.raises(ap.UsageError, match=r"serve: 0\.0\.0\.0 is not loopback"):
        await ap.Node.start(serve="0.0.0.0:0")


@asynccontextmanager
async def job_of_one(directory: Path) -> AsyncIterator[LaunchEnvironment]:
    """What a launched rank finds in its environment, and the rendezvous it joins at."""
    server = RpcServer(Credentials(create_secret(directory / "secret")))
    service = RendezvousService(job="test", world_size=1)
    membership_pb2_grpc.add_RendezvousServicer_to_server(service, server.server)  # type: ignore[no-untyped-call]
    await server.start()
    yield LaunchEnvironment(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        group_rank=0,
        group_world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        rendezvous=server.address,
        secret_file=str(directory / "secret"),
        job="test",
        generation=0,
        restart_count=0,
        host="here",
        host_id="here",
        bind="127.0.0.1",
        timeout=30.0,
    )
    service.close("the test is over")
    await server.stop(grace=0)


async def test_a_launched_node_serves_the_program_on_the_server_it_has(tmp_path: Path) -> None:
    async with job_of_one(tmp_path) as environment, started(environment=environment, services=[add_echo]) as node:
        assert node.membership.members[0].address == node.address
        assert await call(node, credentials=Credentials((tmp_path / "secret").read_bytes())) == b"hello"
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await call(node)


async def test_a_launched_node_serves_where_the_launcher_says(tmp_path: Path) -> None:
    async with job_of_one(tmp_path) as environment:
        with pytest.raises(ap.UsageError, match=r"serve: in a launched job expected .*, 127\.0\.0\.1, got 0\.0\.0\.0"):
            await ap.Node.start(environment, serve="0.0.0.0:0")


async def test_alone_a_node_takes_the_secret_of_the_file_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = create_secret(tmp_path / "secret")
    monkeypatch.setenv("ASYNCPAR_SECRET_FILE", str(tmp_path / "secret"))
    async with started(services=[add_echo]) as node:
        assert await call(node, credentials=Credentials(secret)) == b"hello"


async def test_a_port_that_is_taken_is_a_clear_error_and_nothing_is_left() -> None:
    async with started(serve="127.0.0.1:0") as node:
        with pytest.raises(ap.UsageError, match=f"{node.address} cannot be bound"):
            await ap.Node.start(serve=node.address)


async def test_credentials_never_show_the_secret() -> None:
    async with started(serve="127.0.0.1:0") as node:
        shown = f"{node.credentials!r} {node.credentials}"
        assert node.credentials.secret.hex() not in shown
        assert node.credentials.metadata()[0][1] not in shown


async def test_two_nodes_alone_do_not_accept_each_others_credentials() -> None:
    async with started(services=[add_echo]) as one, started(services=[add_echo]) as other:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await call(one, credentials=other.credentials)
