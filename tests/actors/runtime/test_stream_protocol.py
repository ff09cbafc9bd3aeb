"""Peers that break the rules of streams are expelled, and nobody else is harmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.routing import MessageDecoder
from asyncpar.actors.runtime.window import ITEM_OVERHEAD, STREAM_WINDOW
from asyncpar.errors import PeerLost
from asyncpar.net.wire.payload import PayloadEncoder


class Victim(Actor):
    @endpoint(concurrency=4)
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @endpoint(concurrency=4)
    async def hold(self, numbers: AsyncIterator[int]) -> None:
        await asyncio.Event().wait()

    @endpoint(concurrency=4)
    async def begin(self, numbers: AsyncIterator[int]) -> None:
        await anext(numbers)
        await asyncio.Event().wait()

    @endpoint(concurrency=4)
    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([n async for n in numbers])

    @endpoint(concurrency=4)
    async def both(self, left: AsyncIterator[int], right: AsyncIterator[int]) -> int:
        return 0

    @endpoint(concurrency=4)
    async def items(self) -> AsyncIterator[int]:
        while True:
            yield 1

    @endpoint(concurrency=4)
    async def hello(self) -> str:
        return "hello"


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def stream(number: int) -> msgspec.Raw:
    return raw(msgspec.msgpack.Ext(17, bytes([number])))


def encode(envelope: object) -> memoryview:
    return PayloadEncoder().finish(envelope, what="test")


def call(name: str, *arguments: msgspec.Raw, wants_stream: bool = False) -> message.CallMessage:
    return message.CallMessage(1, "v", name, list(arguments), {}, None, wants_stream)


FEED = message.FeedMessage(1, 0, raw(5))
HOLD = call("hold", stream(0))
BEGIN = call("begin", stream(0))
ITEMS = call("items", wants_stream=True)


@pytest.mark.parametrize(
    ("envelopes", "text"),
    [
        ([call("wait"), FEED], "rank 0 streams to call 1, which is not open for that"),
        ([call("wait"), message.YieldCredit(1, 5)], "rank 0 streams to call 1, which is not open for that"),
        ([HOLD, FEED], "the peer overspent its window of 1048576 bytes"),
        ([BEGIN, *[FEED] * 70], "the peer overspent its window of 1048576 bytes"),
        ([BEGIN, message.FeedMessage(1, 7, raw(5))], "Victim.begin() has no stream 7"),
        ([BEGIN, message.FeedEnd(1, 7)], "Victim.begin() has no stream 7"),
        ([BEGIN, FEED, message.FeedEnd(1, 0), FEED], "sent an item after the end"),
        ([HOLD, message.YieldCredit(1, 5)], "Victim.hold() yielded nothing yet"),
        ([ITEMS, message.YieldCredit(1, 2 * STREAM_WINDOW)], "are outstanding, the peer returned 2097152"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_caller_that_breaks_the_rules_is_expelled(open_ranks: Any, envelopes: list[Any], text: str) -> None:
    async with open_ranks(3) as ranks:
        await ranks.systems[1].spawn(Victim, name="v")
        ranks.links[0].on_message = lambda rank, payload, release: release()
        for envelope in envelopes:
            if 1 not in ranks.links[0].lost:
                ranks.links[0].send_message(1, encode(envelope))
                await turns()
        assert text in str(ranks.links[1].lost[0])
        assert isinstance(ranks.links[0].lost[1], PeerLost)
        assert await ranks.systems[2].ref("v", rank=1).hello() == "hello"
        assert ranks.systems[1].pending == 0


@pytest.mark.parametrize(
    ("method", "answers", "text"),
    [
        ("wait", [message.Yield(0, raw(1))], "which was not asked for a stream"),
        ("wait", [message.FeedCredit(0, 0, 1)], "which has no streams"),
        ("items", [message.Yield(0, raw(1))] * 65, "the peer overspent its window of 1048576 bytes"),
        ("hold", [message.FeedCredit(0, 1, 1)], "the call has 1 streams, got credit for 1"),
        ("hold", [message.FeedCredit(0, 0, STREAM_WINDOW + 1)], "1048576 are outstanding, the peer returned 1048577"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_callee_that_breaks_the_rules_is_expelled(
    open_ranks: Any, method: str, answers: list[Any], text: str
) -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1

    async with open_ranks(2) as ranks:
        ranks.links[1].on_message = lambda rank, payload, release: release()
        endpoint = getattr(ranks.systems[0].ref("v", rank=1), method)
        if method == "items":
            calling = asyncio.ensure_future(first_but_slowly(endpoint.stream()))
        else:
            calling = asyncio.ensure_future(endpoint(*([numbers()] if method == "hold" else [])))
        await turns()
        for answer in answers:
            if 0 not in ranks.links[1].lost:
                ranks.links[1].send_message(0, encode(answer))
        with pytest.raises(PeerLost):
            await calling
        assert text in str(ranks.links[0].lost[1])


async def first_but_slowly(stream: AsyncIterator[int]) -> None:
    async for _ in stream:
        await turns(1000)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def answers_to(ranks: Any, *envelopes: object) -> list[Any]:
    """Send ``envelopes`` from rank 0 to rank 1 and return what comes back."""
    received: list[Any] = []

    def receive(rank: int, payload: memoryview, release: Any) -> None:
        received.append(MessageDecoder().decode(payload))
        release()

    ranks.links[0].on_message = receive
    for envelope in envelopes:
        ranks.links[0].send_message(1, encode(envelope))
        await turns()
    return received


async def test_a_bare_peer_can_feed_a_stream(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Victim, name="v")
        feeds = [message.FeedMessage(1, 0, raw(n)) for n in (1, 2, 3)]
        answers = await answers_to(ranks, call("total", stream(0)), *feeds, message.FeedEnd(1, 0))
        assert answers == [message.FeedCredit(1, 0, STREAM_WINDOW), message.Reply(1, raw(6))]


async def test_a_bare_peer_can_read_a_stream(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Victim, name="v")
        cost = len(encode(message.Yield(1, raw(1)))) + ITEM_OVERHEAD
        answers = await answers_to(ranks, ITEMS, message.YieldCredit(1, 10 * cost), message.Cancel(1))
        ahead = -(-STREAM_WINDOW // cost)
        assert answers == [message.Yield(1, raw(1))] * (ahead + 10)


async def test_the_same_stream_twice_is_refused(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Victim, name="v")
        (answer,) = await answers_to(ranks, call("both", stream(3), stream(3)))
        assert answer.reason == message.USAGE
        assert "argument 'right' of Victim.both(): is the same stream as another argument" in answer.text


async def test_stream_messages_for_calls_that_are_over_are_ignored(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Victim, name="v")
        late = [FEED, message.FeedEnd(1, 0), message.YieldCredit(1, 5), message.Yield(1, raw(1))]
        assert await answers_to(ranks, *late, message.FeedCredit(1, 0, 5)) == []
        assert ranks.links[1].lost == {}
