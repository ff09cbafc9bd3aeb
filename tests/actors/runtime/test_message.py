"""Messages of hostile or broken peers harm no other rank."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.message import (
    CallMessage,
    Cancel,
    Credit,
    FailureMessage,
    Reply,
    TellMessage,
)
from asyncpar.actors.runtime.routing import MessageDecoder
from asyncpar.actors.runtime.window import WINDOW
from asyncpar.errors import PeerLost, ProtocolError, RemoteError, UsageError
from asyncpar.net.wire.payload import PayloadEncoder


class Echo(Actor):
    def __init__(self) -> None:
        self.gate = asyncio.Event()

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def total(self, array: np.ndarray) -> float:
        return float(array.sum())

    @endpoint
    async def wait(self) -> None:
        await self.gate.wait()

    @endpoint
    async def open(self) -> None:
        self.gate.set()

    async def secret(self) -> str:
        return "secret"


def encode(envelope: object) -> memoryview:
    return PayloadEncoder().finish(envelope, what="test")


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


VALID = [
    CallMessage(1, "echo", "echo", [raw("value")], {}),
    CallMessage(2, "echo", "echo", [], {"value": raw([1, 2, {"a": None}])}),
    TellMessage("echo", "echo", [raw(1)], {}),
    Reply(1, raw("value")),
    FailureMessage(1, message.RAISED, "text", "KeyError", "Traceback"),
    Cancel(1),
    Credit("echo", 5),
    message.Deadline(1, 2.5),
    message.Yield(1, raw("value")),
    message.YieldCredit(1, 5),
    message.FeedMessage(1, 0, raw("value")),
    message.FeedEnd(1, 0, True, "text", "KeyError", "Traceback"),
    message.FeedCredit(1, 0, 5),
    message.Abandon("trainers", 1000, [0, 300], 300, "rank 300 failed for the thousandth time"),
]


@pytest.mark.parametrize("envelope", VALID, ids=lambda envelope: type(envelope).__name__)
def test_messages_come_back_as_they_were(envelope: Any) -> None:
    decoded = MessageDecoder().decode(encode(envelope))
    assert type(decoded) is type(envelope)
    assert msgspec.msgpack.encode(decoded) == msgspec.msgpack.encode(envelope)


def test_fields_of_newer_versions_are_ignored() -> None:
    assert MessageDecoder().decode(encode([5, 77, "deadline", 3.0])) == Cancel(77)


@pytest.mark.parametrize(
    "envelope",
    [None, 5, {}, [], [99, 1], [1, 1], [1, -1, "a", "b", [], {}], [6, "a", 0], [6, "a", 2**63], [5, "x"], ["call", 1]],
    ids=str,
)
def test_what_is_no_message_is_a_protocol_error(envelope: object) -> None:
    with pytest.raises(ProtocolError, match="actor message"):
        MessageDecoder().decode(encode(envelope))


@given(st.binary(max_size=200), st.data())
def test_damaged_messages_are_protocol_errors_or_messages(garbage: bytes, data: st.DataObject) -> None:
    decoder = MessageDecoder()
    payload = bytearray(encode(data.draw(st.sampled_from(VALID))))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    for damaged in (garbage, payload, payload[: data.draw(st.integers(0, len(payload)))]):
        with contextlib.suppress(ProtocolError):
            assert isinstance(decoder.decode(bytes(damaged)), message.Message)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.tuples(st.sampled_from(VALID), st.integers(0, 60), st.integers(0, 255)),
        ),
        max_size=6,
    )
)
def test_a_hostile_rank_harms_only_itself(open_ranks: Any, attacks: list[Any]) -> None:
    async def attack() -> None:
        async with open_ranks(3) as ranks:
            await ranks.systems[1].spawn(Echo, name="echo")
            for item in attacks:
                payload = bytearray(item if isinstance(item, bytes) else encode(item[0]))
                if not isinstance(item, bytes):
                    payload[item[1] % len(payload)] = item[2]
                if 1 in ranks.links[0].lost:
                    break
                ranks.links[0].send_message(1, memoryview(payload))
                await asyncio.sleep(0)
            assert await ranks.systems[2].ref("echo", rank=1).echo("alive") == "alive"

    asyncio.run(attack())


async def expect_expulsion(open_ranks: Any, *envelopes: object, text: str) -> None:
    """Send ``envelopes`` from rank 0 to rank 1 and expect rank 1 to end the connection and to go on."""
    async with open_ranks(3) as ranks:
        await ranks.systems[1].spawn(Echo, name="echo")
        await ranks.systems[1].spawn(Echo, name="victim")
        for envelope in envelopes:
            ranks.links[0].send_message(1, encode(envelope))
        for _ in range(10):
            await asyncio.sleep(0)
        assert text in str(ranks.links[1].lost[0])
        assert isinstance(ranks.links[0].lost[1], PeerLost)
        assert await ranks.systems[2].ref("echo", rank=1).echo("alive") == "alive"


async def test_a_call_sent_twice_ends_the_connection(open_ranks: Any) -> None:
    call = CallMessage(1, "victim", "wait", [], {})
    await expect_expulsion(open_ranks, call, call, text="rank 0 sent call 1 twice")


async def test_credit_for_nothing_ends_the_connection(open_ranks: Any) -> None:
    await expect_expulsion(open_ranks, Credit("echo", 5), text="returned 5 for an actor that was sent nothing")


async def test_more_than_the_window_ends_the_connection(open_ranks: Any) -> None:
    big = TellMessage("victim", "echo", [raw(bytes(WINDOW // 2))], {})
    await expect_expulsion(
        open_ranks, TellMessage("victim", "wait", [], {}), *[big] * 4, text="the peer overspent its window"
    )


async def test_an_answer_from_the_wrong_rank_ends_the_connection(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        await ranks.systems[1].spawn(Echo, name="echo")
        ask = asyncio.create_task(ranks.systems[0].ref("echo", rank=1).wait())
        await asyncio.sleep(0)
        ranks.links[2].send_message(0, encode(Reply(0, raw("forged"))))
        await asyncio.sleep(0)
        assert "rank 2 answers call 0, which rank 1 got" in str(ranks.links[0].lost[2])
        await ranks.systems[0].ref("echo", rank=1).open.tell()
        ask.cancel()


async def test_answers_that_nobody_waits_for_are_ignored(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Echo, name="echo")
        for envelope in (Reply(5, raw(1)), FailureMessage(6, message.USAGE, "text"), Cancel(7)):
            ranks.links[0].send_message(1, encode(envelope))
        assert await ranks.systems[0].ref("echo", rank=1).echo(1) == 1


@pytest.mark.parametrize("name", ["secret", "_seen", "__init__", "__class__", "on_stop", "ref", "gate", ""])
async def test_only_endpoints_can_be_reached_from_the_wire(open_ranks: Any, name: str) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Echo, name="echo")
        received: asyncio.Queue[memoryview] = asyncio.Queue()
        ranks.links[0].on_message = lambda rank, payload, release: received.put_nowait(payload)
        ranks.links[0].send_message(1, encode(CallMessage(1, "echo", name, [], {})))
        answer = MessageDecoder().decode(await received.get())
        assert isinstance(answer, FailureMessage)
        assert (answer.call, answer.reason) == (1, message.ABSENT)
        assert answer.text == f"{name!r} is no endpoint of Echo; it has ['echo', 'open', 'total', 'wait']"


async def test_a_damaged_array_in_an_argument_is_refused_and_the_actor_goes_on(open_ranks: Any) -> None:
    array = msgspec.msgpack.Ext(1, b"\x0b\x01" + (0).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little"))
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Echo, name="echo")
        received: asyncio.Queue[memoryview] = asyncio.Queue()
        on_message = ranks.links[0].on_message
        ranks.links[0].on_message = lambda rank, payload, release: received.put_nowait(payload)
        ranks.links[0].send_message(1, encode(CallMessage(1, "echo", "total", [raw(array)], {})))
        answer = MessageDecoder().decode(await received.get())
        assert isinstance(answer, FailureMessage)
        assert "array: shape (1099511627776,) of float32 at" in answer.text
        ranks.links[0].on_message = on_message
        assert await ranks.systems[0].ref("echo", rank=1).total(np.ones(3)) == 3.0


async def test_a_damaged_array_in_an_answer_is_a_protocol_error_at_the_caller(open_ranks: Any) -> None:
    array = msgspec.msgpack.Ext(1, b"\x0b\x01" + (0).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little"))
    async with open_ranks(2) as ranks:
        ranks.links[1].on_message = lambda rank, payload, release: ranks.links[1].send_message(
            0, encode(Reply(0, raw(array)))
        )
        with pytest.raises(ProtocolError, match="the result of total of <actor 'echo' on rank 1>: array: shape"):
            await ranks.systems[0].ref("echo", rank=1).total(1)


async def test_an_answer_of_the_wrong_type_is_a_usage_error_where_the_class_is_known(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        ranks.links[1].on_message = lambda rank, payload, release: ranks.links[1].send_message(
            0, encode(Reply(0, raw("text")))
        )
        with pytest.raises(UsageError, match="<Echo 'echo' on rank 1>: Expected `float`, got `str`"):
            await ranks.systems[0].ref("echo", rank=1, actor_class=Echo).total(np.ones(1))


async def test_a_reason_of_a_newer_version_counts_as_raised(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        ranks.links[1].on_message = lambda rank, payload, release: ranks.links[1].send_message(
            0, encode(FailureMessage(0, "overloaded", "too much to do", "Overload"))
        )
        with pytest.raises(RemoteError, match="rank 1: Overload: too much to do"):
            await ranks.systems[0].ref("echo", rank=1).total(1)
