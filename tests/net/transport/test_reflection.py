"""Generic clients learn from a node which services it has, and of which messages."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

import asyncpar as ap
from asyncpar.net.transport.serving import REFLECTION
from tests.test_node_serving import add_echo

reflection_pb2 = pytest.importorskip(
    "grpc_reflection.v1alpha.reflection_pb2", reason="grpcio-reflection (extra reflection) is not installed"
)
database = pytest.importorskip("grpc_reflection.v1alpha.proto_reflection_descriptor_database")


@asynccontextmanager
async def asked(*, has_token: bool = True, **settings: Any) -> AsyncIterator[Any]:
    """Yield what asks a node, which has a service of the program, one question, and returns the answer."""
    node = await ap.Node.start(serve="localhost:0", services=[add_echo], **settings)
    try:
        async with grpc.aio.insecure_channel(node.address) as channel:
            method: Any = channel.stream_stream(
                f"/{REFLECTION}/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )

            async def ask(**question: Any) -> Any:
                request = reflection_pb2.ServerReflectionRequest(**question)
                call = method(iter([request]), metadata=node.credentials.metadata() if has_token else (), timeout=30.0)
                (answer,) = [found async for found in call]
                return answer

            yield ask
    finally:
        await node.stop()


async def test_services_of_the_node_and_of_the_program_are_listed() -> None:
    async with asked() as ask:
        answer = await ask(list_services="")
    names = [service.name for service in answer.list_services_response.service]
    assert names == ["asyncpar.v1.Actors", "grpc.health.v1.Health", REFLECTION, "tests.Echo"]


@pytest.mark.parametrize(
    ("symbol", "file"),
    [("asyncpar.v1.Actors", "asyncpar/v1/actors.proto"), ("grpc.health.v1.Health", "grpc_health/v1/health.proto")],
)
async def test_a_service_comes_with_its_messages(symbol: str, file: str) -> None:
    async with asked() as ask:
        by_symbol, by_name = await ask(file_containing_symbol=symbol), await ask(file_by_filename=file)
    for answer in (by_symbol, by_name):
        (content,) = answer.file_descriptor_response.file_descriptor_proto
        found = descriptor_pb2.FileDescriptorProto.FromString(content)
        assert (found.name, [service.name for service in found.service]) == (file, [symbol.rpartition(".")[2]])


async def test_what_is_not_there_is_not_found() -> None:
    async with asked() as ask:
        answer = await ask(file_containing_symbol="asyncpar.v1.Nothing")
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_nobody_gets_an_answer_without_the_token() -> None:
    async with asked(has_token=False) as ask:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(list_services="")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_without_the_package_callers_learn_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asked() as ask:
        monkeypatch.setitem(sys.modules, "grpc_reflection.v1alpha", None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(list_services="")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "pip install 'asyncpar[reflection]'" in str(caught.value.details())


# -- a client without stubs --------------------------------------------------------------------------------------------


def call_as_a_stranger(address: str, metadata: Any) -> tuple[list[str], str]:
    """Check the health of a node by nothing but what it says of itself; return the methods of actors, and the state."""

    class WithToken(grpc.StreamStreamClientInterceptor):  # type: ignore[type-arg]
        def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
            return continuation(details._replace(metadata=metadata), requests)

    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(database.ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, WithToken())))
        service = pool.FindServiceByName("grpc.health.v1.Health")
        method = service.methods_by_name["Check"]
        request, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        ask = channel.unary_unary(f"/{service.full_name}/{method.name}", request.SerializeToString, answer.FromString)
        found = ask(request(), metadata=metadata, timeout=30.0)
        actors = pool.FindServiceByName("asyncpar.v1.Actors")
        states = method.output_type.enum_types_by_name["ServingStatus"].values_by_number
        return sorted(actors.methods_by_name), states[found.status].name


async def test_a_client_without_stubs_calls_what_the_node_describes() -> None:
    node = await ap.Node.start(serve="localhost:0", services=[add_echo])
    try:
        methods, state = await asyncio.to_thread(call_as_a_stranger, node.address, node.credentials.metadata())
    finally:
        await node.stop()
    assert "Ask" in methods, methods
    assert state == "SERVING"
