"""The actor gateway, used as other languages use it: a bare gRPC channel, messages of the published proto, a token."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio
import ml_dtypes  # noqa: F401  # numpy learns bfloat16 from it
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import asyncpar as ap
from asyncpar._proto.asyncpar.v1 import actors_pb2
from asyncpar._proto.asyncpar.v1.actors_pb2 import (
    ActorCall,
    ActorError,
    ActorItem,
    ActorPart,
    ActorResult,
    ActorTold,
    Array,
    Value,
)
from asyncpar.actors.runtime.calls import time_left
from asyncpar.actors.runtime.gateway import ActorGateway
from asyncpar.net.transport.rpc import Credentials, RpcServer

SERVICE = "asyncpar.v1.Actors"
JSON = ActorCall.Format.JSON
_DEADLINE = 3.0
"""Of which the node leaves itself a quarter of a second for the answer, also on a busy machine."""


@dataclass
class Point:
    x: int
    y: float = 0.0


class Desk(ap.Actor):
    """What the tests call."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.entered = asyncio.Event()
        self.left = asyncio.Event()

    @ap.endpoint
    async def add(self, n: int, *, to: int = 10) -> int:
        return n + to

    @ap.endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @ap.endpoint
    async def double(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return 2 * x

    @ap.endpoint
    async def move(self, point: Point) -> Point:
        return Point(point.x + 1, point.y)

    @ap.endpoint
    async def note(self, text: str) -> None:
        self.log.append(text)

    @ap.endpoint
    async def read(self) -> list[str]:
        return self.log

    @ap.endpoint
    async def when(self) -> datetime:
        return datetime(2026, 1, 2, tzinfo=UTC)

    @ap.endpoint
    async def mixed(self) -> dict[str, Any]:
        return {"a": np.arange(3, dtype=np.int16), "b": [np.ones((1, 2)), None]}

    @ap.endpoint
    async def large(self, size: int) -> bytes:
        return bytes(size)

    @ap.endpoint
    async def fail(self, more: str) -> None:
        raise LookupError("nothing there" + more)

    @ap.endpoint(concurrency=4)
    async def hang(self) -> None:
        self.entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.left.set()

    @ap.endpoint(concurrency=4)
    async def wait_until_hanging(self) -> None:
        await self.entered.wait()

    @ap.endpoint(concurrency=4)
    async def wait_until_left(self) -> None:
        await self.left.wait()

    @ap.endpoint
    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([n async for n in numbers])

    @ap.endpoint
    async def weigh(self, rows: AsyncIterator[NDArray[np.float32]], *, by: AsyncIterator[float]) -> float:
        total = 0.0
        async for row in rows:
            total += float(row.sum()) * await anext(by)
        return total

    @ap.endpoint
    async def doubled(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        async for n in numbers:
            yield 2 * n

    @ap.endpoint
    async def first(self, numbers: AsyncIterator[int]) -> int:
        async for n in numbers:
            return n
        return -1

    @ap.endpoint
    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    @ap.endpoint
    async def break_off(self) -> AsyncIterator[NDArray[np.float64]]:
        yield np.zeros(2)
        raise LookupError("no more")

    @ap.endpoint(concurrency=4)
    async def trickle(self) -> AsyncIterator[int]:
        try:
            yield 1
            self.entered.set()
            await asyncio.get_running_loop().create_future()
        finally:
            self.left.set()

    @ap.endpoint
    async def learn_time_left(self) -> float:
        while (left := time_left()) is None:  # noqa: ASYNC110  # it travels after its call
            await asyncio.sleep(0)
        return left

    async def secret(self) -> None:
        raise AssertionError("it is no endpoint")

    async def _private(self) -> None:
        raise AssertionError("it is private")


class Busy(ap.Actor):
    """Works for ever, and has room for one more."""

    mailbox = ap.Mailbox(limit=1, when_full="fail")

    def __init__(self) -> None:
        self.working = asyncio.Event()

    @ap.endpoint
    async def work(self) -> None:
        self.working.set()
        await asyncio.get_running_loop().create_future()

    @ap.endpoint(concurrency=1)
    async def is_working(self) -> None:
        await self.working.wait()


class Client:
    """A program in another language: what it knows is the proto, an address and the secret of the job."""

    def __init__(self, address: str, secret: bytes) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        token = hmac.new(secret, b"asyncpar rpc token", hashlib.sha256).hexdigest()
        self.metadata = (("asyncpar-token", token),)

    async def ask(self, endpoint: str, *arguments: Value, actor: str = "desk", **settings: Any) -> Value:
        call = ActorCall(actor=actor, endpoint=endpoint, arguments=arguments, **settings)
        result: ActorResult = await self.send(call)
        return result.value

    def send(self, call: ActorCall, *, timeout: float | None = None) -> Any:
        method: Any = self.channel.unary_unary(f"/{SERVICE}/Ask", ActorCall.SerializeToString, ActorResult.FromString)
        return method(call, metadata=self.metadata, timeout=timeout)

    async def tell(self, endpoint: str, *arguments: Value, actor: str = "desk") -> ActorTold:
        method: Any = self.channel.unary_unary(f"/{SERVICE}/Tell", ActorCall.SerializeToString, ActorTold.FromString)
        call = ActorCall(actor=actor, endpoint=endpoint, arguments=arguments)
        told: ActorTold = await method(call, metadata=self.metadata)
        return told

    def stream(self, endpoint: str, *arguments: Value, timeout: float | None = None) -> Any:
        method: Any = self.channel.unary_stream(
            f"/{SERVICE}/Stream", ActorCall.SerializeToString, ActorResult.FromString
        )
        call = ActorCall(actor="desk", endpoint=endpoint, arguments=arguments)
        return method(call, metadata=self.metadata, timeout=timeout)

    def feed(self, *parts: ActorPart, is_open: bool = False, timeout: float | None = 30.0) -> Any:
        """Send ``parts``, and end them unless the call is left open."""
        method: Any = self.channel.stream_unary(f"/{SERVICE}/Feed", ActorPart.SerializeToString, ActorResult.FromString)

        async def send() -> AsyncIterator[ActorPart]:
            for part in parts:
                yield part
            if is_open and parts:
                await asyncio.get_running_loop().create_future()

        return method(send(), metadata=self.metadata, timeout=timeout)

    def converse(self) -> Any:
        method: Any = self.channel.stream_stream(
            f"/{SERVICE}/Converse", ActorPart.SerializeToString, ActorResult.FromString
        )
        return method(metadata=self.metadata, timeout=30.0)


@asynccontextmanager
async def opened(size: int = 1) -> AsyncIterator[tuple[Client, ap.Node]]:
    """A client of rank 0, and the node of the last rank, where the desk is."""
    async with ap.testing.local_world(size, transport="tcp") as nodes:
        await nodes[-1].spawn(Desk, name="desk")
        client = Client(nodes[0].address, nodes[0].credentials.secret)
        try:
            yield client, nodes[-1]
        finally:
            await client.channel.close(None)


def packed(value: Any) -> Value:
    return Value(msgpack=msgspec.msgpack.encode(value))


def unpacked(value: Value) -> Any:
    assert value.WhichOneof("kind") == "msgpack"
    return msgspec.msgpack.decode(value.msgpack)


def floats(*numbers: float) -> Value:
    return Value(array=Array(dtype="float32", shape=[len(numbers)], content=struct.pack(f"<{len(numbers)}f", *numbers)))


async def error_of(answer: Any) -> tuple[grpc.StatusCode, ActorError]:
    """Return the status of a call that fails, and what came with it."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer
    trailing: Any = raised.value.trailing_metadata()
    metadata: dict[str, Any] = dict(trailing)
    return raised.value.code(), ActorError.FromString(metadata.get("asyncpar-error-bin", b""))


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("language")
async def test_an_endpoint_is_asked_with_msgpack_by_position_and_by_name() -> None:
    async with opened() as (client, _):
        assert unpacked(await client.ask("add", packed(3))) == 13
        assert unpacked(await client.ask("add", packed(3), keywords={"to": packed(4)})) == 7


async def test_an_endpoint_is_asked_with_json_and_answers_in_it() -> None:
    async with opened() as (client, _):
        answer = await client.ask("add", Value(json="3"), format=JSON)
        assert answer.WhichOneof("kind") == "json"
        assert json.loads(answer.json) == 13


async def test_objects_are_maps_by_field_name() -> None:
    async with opened() as (client, _):
        answer = await client.ask("move", Value(json='{"x": 1, "y": 0.5}'), format=JSON)
        assert json.loads(answer.json) == {"x": 2, "y": 0.5}
        assert unpacked(await client.ask("move", packed({"x": 1}))) == {"x": 2, "y": 0.0}


@pytest.mark.parametrize("form", [ActorCall.Format.MSGPACK, JSON])
async def test_arrays_are_arrays_whatever_the_format(form: Any) -> None:
    async with opened() as (client, _):
        answer = await client.ask("double", floats(1.0, 2.5), format=form)
        assert (answer.array.dtype, list(answer.array.shape)) == ("float32", [2])
        assert struct.unpack("<2f", answer.array.content) == (2.0, 5.0)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "complex128", "bfloat16", "float8_e5m2"])
async def test_every_dtype_and_shape_comes_back_as_it_was(dtype: str) -> None:
    array = np.arange(6).reshape(2, 1, 3).astype(np.dtype(dtype))
    async with opened() as (client, _):
        sent = Array(dtype=dtype, shape=[2, 1, 3], content=array.tobytes())
        assert (await client.ask("echo", Value(array=sent))).array == sent
        number = Array(dtype=dtype, content=array.tobytes()[: array.itemsize])
        assert (await client.ask("echo", Value(array=number))).array == number
        nothing = Array(dtype=dtype, shape=[0, 4])
        assert (await client.ask("echo", Value(array=nothing))).array == nothing


async def test_arrays_inside_plain_data_come_beside_it() -> None:
    async with opened() as (client, _):
        answer = await client.ask("mixed")
        plain = msgspec.msgpack.decode(answer.msgpack)
        places = [struct.unpack("<I", ext.data)[0] for ext in (plain["a"], plain["b"][0])]
        assert [ext.code for ext in (plain["a"], plain["b"][0])] == [1, 1]
        assert [answer.arrays[place].dtype for place in places] == ["int16", "float64"]
        assert list(answer.arrays[places[1]].shape) == [1, 2]
        echoed = await client.ask("echo", answer)
        assert echoed.arrays == answer.arrays


async def test_dates_bytes_and_references_have_a_plain_form() -> None:
    async with opened() as (client, _):
        assert unpacked(await client.ask("when")) == datetime(2026, 1, 2, tzinfo=UTC)
        assert json.loads((await client.ask("when", format=JSON)).json) == "2026-01-02T00:00:00Z"
        assert unpacked(await client.ask("echo", packed(b"ab"))) == b"ab"
        assert (await client.ask("echo", packed(b"ab"), format=JSON)).json == '"YWI="'


# -- where and how -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("language")
async def test_actors_of_other_ranks_are_reached_by_their_rank() -> None:
    async with opened(2) as (client, _):
        assert unpacked(await client.ask("add", packed(1), rank=1)) == 11
        code, error = await error_of(client.ask("add", packed(1)))
        assert (code, error.type) == (grpc.StatusCode.NOT_FOUND, "NotFound")
        code, error = await error_of(client.ask("add", packed(1), rank=2))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.message == "rank: expected 0..1, got 2"


async def test_a_node_alone_that_serves_is_reached_too() -> None:
    node = await ap.Node.start(serve="127.0.0.1:0")
    await node.spawn(Desk, name="desk")
    client = Client(node.address, node.credentials.secret)
    assert unpacked(await client.ask("add", packed(1))) == 11
    await client.channel.close(None)
    await node.stop()


@pytest.mark.promise("language")
async def test_a_told_message_is_handled_and_not_answered() -> None:
    async with opened() as (client, _):
        await client.tell("note", packed("one"))
        await client.tell("note", packed("two"))
        assert unpacked(await client.ask("read")) == ["one", "two"]


async def test_a_message_told_to_nobody_is_a_dead_letter() -> None:
    async with opened() as (client, node):
        await client.tell("note", packed("one"), actor="nobody")
        assert node.dead_letters.count == 1


@pytest.mark.promise("language")
async def test_a_stream_comes_item_by_item() -> None:
    async with opened() as (client, _):
        assert [unpacked(item.value) async for item in client.stream("count", packed(500))] == list(range(500))


async def test_what_a_stream_raises_comes_after_its_items() -> None:
    async with opened() as (client, _):
        stream = client.stream("break_off")
        assert list((await stream.read()).value.array.shape) == [2]
        code, error = await error_of(stream.read())
        assert (code, error.type, error.message) == (grpc.StatusCode.UNKNOWN, "LookupError", "no more")


async def test_ending_a_stream_ends_its_endpoint() -> None:
    async with opened() as (client, _):
        stream = client.stream("trickle")
        await stream.read()
        await client.ask("wait_until_hanging")
        stream.cancel()
        await client.ask("wait_until_left")


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("language-deadline")
async def test_cancelling_a_call_cancels_its_endpoint() -> None:
    async with opened(2) as (client, _):
        call = client.send(ActorCall(actor="desk", endpoint="hang", rank=1))
        await client.ask("wait_until_hanging", rank=1)
        call.cancel()
        await client.ask("wait_until_left", rank=1)


@pytest.mark.promise("language-deadline")
async def test_the_deadline_of_a_call_ends_its_endpoint_and_says_what_it_waited_for() -> None:
    async with opened(2) as (client, _):
        call = client.send(ActorCall(actor="desk", endpoint="hang", rank=1), timeout=_DEADLINE)
        feeding = client.feed(part_of("total", Value(stream=0), rank=1), is_open=True, timeout=_DEADLINE)
        (code, error), (code_of_streams, error_of_streams) = await asyncio.gather(error_of(call), error_of(feeding))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (error.type, error.rank) == ("PeerTimeout", 1)
        assert "hang() of actor 'desk' on rank 1 has not ended within the " in error.message
        await client.ask("wait_until_left", rank=1)
        assert (code_of_streams, error_of_streams.type) == (grpc.StatusCode.DEADLINE_EXCEEDED, "PeerTimeout")
        assert "total() of actor 'desk'" in error_of_streams.message


async def test_the_deadline_of_a_stream_ends_its_endpoint() -> None:
    async with opened() as (client, _):
        stream = client.stream("trickle", timeout=0.3)
        assert unpacked((await stream.read()).value) == 1
        code, _ = await error_of(stream.read())
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await client.ask("wait_until_left")


async def test_an_endpoint_sees_the_deadline_of_its_call() -> None:
    async with opened(2) as (client, _):
        call = client.send(ActorCall(actor="desk", endpoint="learn_time_left", rank=1), timeout=50.0)
        assert 20.0 < unpacked((await call).value) < 60.0  # gRPC rounds


# -- streams among the arguments ---------------------------------------------------------------------------------------


def part_of(endpoint: str, *arguments: Value, **settings: Any) -> ActorPart:
    return ActorPart(call=ActorCall(actor="desk", endpoint=endpoint, arguments=arguments, **settings))


def item(value: Any, stream: int = 0) -> ActorPart:
    return ActorPart(item=ActorItem(stream=stream, value=value if isinstance(value, Value) else packed(value)))


@pytest.mark.parametrize("size", [1, 2])
async def test_an_endpoint_takes_a_stream(size: int) -> None:
    async with opened(size) as (client, _):
        call = client.feed(part_of("total", Value(stream=0), rank=size - 1), *(item(n) for n in range(100)))
        assert unpacked((await call).value) == 4950


async def test_streams_of_arrays_and_of_two_arguments_come_in_order() -> None:
    async with opened() as (client, _):
        call = client.feed(
            part_of("weigh", Value(stream=3), keywords={"by": Value(stream=7)}),
            *(part for n in range(40) for part in (item(floats(n, 1.0), 3), item(2, 7))),
            ActorPart(end=3),
        )
        assert unpacked((await call).value) == sum(2 * (n + 1.0) for n in range(40))


async def test_items_go_both_ways() -> None:
    async with opened() as (client, _):
        call = client.converse()
        await call.write(part_of("doubled", Value(stream=0)))
        for n in range(50):
            await call.write(item(n))
            assert unpacked((await call.read()).value) == 2 * n
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]  # absent from the stubs


async def test_a_stream_that_the_endpoint_leaves_holds_up_nothing() -> None:
    async with opened() as (client, _):
        call = client.feed(part_of("first", Value(stream=0)), *(item(n) for n in range(500)))
        assert unpacked((await call).value) == 0


WRONG_PARTS: dict[str, tuple[list[ActorPart], str]] = {
    "no call": ([item(1)], "expected a call, got item"),
    "nothing": ([], "expected a call, got none"),
    "two calls": ([part_of("total", Value(stream=0)), part_of("total")], "expected an item or an end after the call"),
    "an empty part": ([part_of("total", Value(stream=0)), ActorPart()], "got nothing"),
    "an unknown stream": ([part_of("total", Value(stream=0)), item(1, 5)], "stream 5, which no argument is"),
    "an item after the end": (
        [part_of("weigh", Value(stream=3), keywords={"by": Value(stream=7)}), ActorPart(end=7), item(1, 7)],
        "stream 7, which has ended",
    ),
    "a stream twice": ([part_of("weigh", Value(stream=0), Value(stream=0))], "stream 0 is another argument"),
    "a bad item": ([part_of("total", Value(stream=0)), item(Value(msgpack=b"\xc1"))], "an item of stream 0"),
    "a stream in an item": ([part_of("total", Value(stream=0)), item(Value(stream=1))], "is a stream; call Feed"),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
async def test_wrong_parts_of_a_call_are_invalid(case: str) -> None:
    parts, message = WRONG_PARTS[case]
    async with opened() as (client, _):
        code, error = await error_of(client.feed(*parts, is_open=True))
        assert (code, error.type) == (grpc.StatusCode.INVALID_ARGUMENT, "UsageError")
        assert message in error.message


async def test_a_stream_in_an_ask_says_what_to_call() -> None:
    async with opened() as (client, _):
        code, error = await error_of(client.ask("total", Value(stream=0)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "call Feed, or Converse" in error.message


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("language-error")
async def test_what_an_endpoint_raises_comes_with_type_message_and_traceback() -> None:
    async with opened(2) as (client, _):
        code, error = await error_of(client.ask("fail", packed(""), rank=1))
        assert code is grpc.StatusCode.UNKNOWN
        assert (error.type, error.message, error.rank) == ("LookupError", "nothing there", 1)
        assert error.traceback.startswith("Traceback")
        assert 'raise LookupError("nothing there"' in error.traceback


@pytest.mark.parametrize("letter", ["!", "\N{BULLSEYE}", "\0"])
async def test_a_very_long_error_is_cut_and_arrives(letter: str) -> None:
    async with opened() as (client, _):
        code, error = await error_of(client.ask("fail", packed(20_000 * letter)))
        assert (code, error.type) == (grpc.StatusCode.UNKNOWN, "LookupError")
        assert error.message.startswith("nothing there" + 100 * letter)


@pytest.mark.parametrize(
    "name", ["secret", "_private", "__init__", "__class__", "on_stop", "spawn", "rank", "name", ""]
)
async def test_only_endpoints_can_be_called(name: str) -> None:
    async with opened() as (client, _):
        code, error = await error_of(client.ask(name))
        assert code is grpc.StatusCode.NOT_FOUND
        assert repr(name) in error.message


@pytest.mark.parametrize("actor", ["nobody", "Desk"])
async def test_an_actor_that_is_not_there_is_not_found(actor: str) -> None:
    async with opened() as (client, _):
        code, error = await error_of(client.ask("add", packed(1), actor=actor))
        assert code is grpc.StatusCode.NOT_FOUND
        assert f"there is no actor {actor!r} on rank 0" in error.message


WRONG: dict[str, tuple[str, list[Value], str]] = {
    "a missing argument": ("add", [], "misses 'n'"),
    "an extra argument": ("add", [packed(1), packed(2)], "2 positional arguments"),
    "an argument of a wrong type": ("add", [packed("one")], "Expected `int`, got `str`"),
    "an array of a wrong kind": (
        "double",
        [Value(array=Array(dtype="int8", shape=[1], content=b"1"))],
        "Expected an array of `numpy.float32`",
    ),
    "an empty value": ("add", [Value()], "got an empty value"),
    "broken msgpack": ("add", [Value(msgpack=b"\xc1")], "argument 1: expected one value of msgpack"),
    "two msgpack values": ("add", [Value(msgpack=b"\x01\x02")], "argument 1: expected one value of msgpack"),
    "broken JSON": ("add", [Value(json="{")], "argument 1: expected one value of json"),
    "deep msgpack": ("echo", [Value(msgpack=b"\x91" * 100_000 + b"\x01")], "argument 1: expected one value of msgpack"),
    "deep JSON": ("echo", [Value(json="[" * 100_000)], "argument 1: expected one value of json"),
    "an extension that is no array": ("echo", [Value(msgpack=b"\xd4\x11\x00")], "expected extension type 1"),
    "an array that did not come": ("echo", [Value(msgpack=b"\xd6\x01\x05\x00\x00\x00")], "it names array 5"),
    "an unknown dtype": ("echo", [Value(array=Array(dtype="O", shape=[1], content=b"12345678"))], "got 'O'"),
    "too few elements": ("echo", [Value(array=Array(dtype="int32", shape=[3], content=b"1234"))], "expected 12 bytes"),
    "too many dimensions": ("echo", [Value(array=Array(dtype="int8", shape=[1] * 65, content=b"1"))], "at most 64"),
    "a shape beyond all numbers": (
        "echo",
        [Value(array=Array(dtype="int8", shape=[2**63, 2**63], content=b"1"))],
        "bytes for shape",
    ),
    "an empty array beyond all numbers": (
        "echo",
        [Value(array=Array(dtype="int8", shape=[0, 2**63, 2**63]))],
        "argument 1: shape",
    ),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_call_is_an_invalid_argument_that_says_what_is_wrong(case: str) -> None:
    endpoint, arguments, text = WRONG[case]
    async with opened() as (client, _):
        code, error = await error_of(client.ask(endpoint, *arguments))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.type == "UsageError"
        assert text in error.message
        assert unpacked(await client.ask("add", packed(1))) == 11


async def test_an_array_that_json_cannot_hold_is_refused() -> None:
    async with opened() as (client, _):
        code, error = await error_of(client.ask("mixed", format=JSON))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "arrays inside, which JSON cannot hold; ask for MSGPACK" in error.message


async def test_a_result_larger_than_a_message_is_refused() -> None:
    async with opened() as (client, _):
        code, error = await error_of(client.ask("large", packed(9 << 20)))
        assert (code, error.type) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ResultTooLarge")
        assert unpacked(await client.ask("add", packed(1))) == 11


async def test_a_full_mailbox_is_an_exhausted_resource() -> None:
    async with opened() as (client, node):
        busy = await node.spawn(Busy, name="busy")
        call = client.send(ActorCall(actor="busy", endpoint="work"))
        await client.ask("is_working", actor="busy")
        await busy.work.tell()
        code, error = await error_of(client.ask("work", actor="busy"))
        assert (code, error.type) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MailboxFull")
        call.cancel()


async def test_an_actor_that_has_ended_is_unavailable() -> None:
    async with opened(2) as (client, node):
        await node.stop_actor(node.ref("desk"))
        code, error = await error_of(client.ask("add", packed(1), rank=1))
        assert (code, error.type) == (grpc.StatusCode.UNAVAILABLE, "ActorDown")


async def test_a_rank_that_has_left_is_unavailable() -> None:
    async with opened(2) as (client, node):
        assert unpacked(await client.ask("add", packed(1), rank=1)) == 11
        await node.stop()
        code, error = await error_of(client.ask("add", packed(1), rank=1))
        assert (code, error.rank) == (grpc.StatusCode.UNAVAILABLE, 1)


async def test_a_node_that_is_not_in_its_world_yet_is_unavailable() -> None:
    credentials = Credentials(bytes(32))
    server = RpcServer(credentials)
    ActorGateway().register(server)
    await server.start()
    client = Client(server.address, credentials.secret)
    code, error = await error_of(client.ask("add", packed(1)))
    assert (code, error.type) == (grpc.StatusCode.UNAVAILABLE, "NotInWorld")
    await client.channel.close(None)
    await server.stop(grace=0)


async def test_a_call_that_runs_while_the_node_stops_is_unavailable() -> None:
    async with opened() as (client, node):
        call = client.send(ActorCall(actor="desk", endpoint="hang"))
        await client.ask("wait_until_hanging")
        stopping = asyncio.create_task(node.stop())
        code, _ = await error_of(call)
        await stopping
        assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.promise("language-token")
@pytest.mark.parametrize("spoil", [lambda token: "", lambda token: token[:-1] + "x", lambda token: "0" * 64])
async def test_without_the_token_of_the_job_nothing_is_answered(spoil: Callable[[str], str]) -> None:
    async with opened() as (client, _):
        ((key, token),) = client.metadata
        client.metadata = ((key, spoil(token)),)
        code, error = await error_of(client.ask("add", packed(1)))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert error == ActorError()
        code, _ = await error_of(client.tell("note", packed("x")))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        code, _ = await error_of(client.stream("count", packed(1)).read())
        assert code is grpc.StatusCode.UNAUTHENTICATED


def test_the_published_messages_are_those_that_are_used() -> None:
    service = actors_pb2.DESCRIPTOR.services_by_name["Actors"]
    shown = {method.name: (method.input_type.name, method.output_type.name) for method in service.methods}
    assert shown == {
        "Ask": ("ActorCall", "ActorResult"),
        "Tell": ("ActorCall", "ActorTold"),
        "Stream": ("ActorCall", "ActorResult"),
        "Feed": ("ActorPart", "ActorResult"),
        "Converse": ("ActorPart", "ActorResult"),
    }
