"""Streams in both directions: what arrives, in which order, and how far ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.errors import RemoteError, UsageError
from tests.soak import chosen

AHEAD = 64
"""Small items that may be ahead of their reader."""


@dataclass
class Point:
    x: int
    y: float


class Source(Actor):
    """Yields, and lets the test see how far it has come."""

    def __init__(self, seen: list[object] | None = None) -> None:
        self.seen = [] if seen is None else seen

    @endpoint
    async def count(self, stop: int) -> AsyncIterator[int]:
        for i in range(stop):
            self.seen.append(i)
            yield i

    @endpoint
    async def points(self) -> AsyncGenerator[Point, None]:
        yield Point(1, 2.5)
        yield Point(3, 4.5)

    @endpoint
    async def wrong(self) -> AsyncIterator[int]:
        try:
            yield 1
            yield "two"  # type: ignore[misc]
            yield 3
        finally:
            self.seen.append("closed")

    @endpoint
    async def unsendable(self) -> AsyncIterator[object]:
        yield 1
        yield object()

    @endpoint
    async def anything(self):  # type: ignore[no-untyped-def]
        yield {"a": [1, 2]}

    @endpoint
    async def reuse(self, count: int) -> AsyncIterator[npt.NDArray[np.int64]]:
        buffer = np.zeros(4, np.int64)
        for i in range(count):
            buffer[:] = i
            yield buffer

    @endpoint
    async def large(self, size: int) -> AsyncIterable[np.ndarray]:
        for i in range(3):
            self.seen.append(i)
            yield np.full(size, i, np.uint8)

    @endpoint(concurrency=2)
    async def beside(self, stop: int) -> AsyncIterator[int]:
        for i in range(stop):
            yield i

    @endpoint
    async def add(self, n: int) -> int:
        return n + 1


class Sink(Actor):
    """Reads, one item each time it is let."""

    def __init__(self, seen: list[object] | None = None) -> None:
        self.seen = [] if seen is None else seen
        self.gate = asyncio.Semaphore(0)

    @endpoint
    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([n async for n in numbers])

    @endpoint
    async def ignore(self, numbers: AsyncIterable[int], then: int) -> int:
        return then

    @endpoint
    async def first_and_rest(self, numbers: AsyncIterator[int]) -> list[int]:
        head = [await anext(numbers)]
        async for n in numbers:
            head.append(n)
            break
        return [*head, sum([n async for n in numbers])]

    @endpoint
    async def pairs(self, left: AsyncIterator[int], *, right: AsyncIterator[str]) -> list[tuple[int, str]]:
        return [(n, await anext(right)) async for n in left]

    @endpoint
    async def many(self, *streams: AsyncIterator[int]) -> list[int]:
        return [sum([n async for n in stream]) for stream in streams]

    @endpoint
    async def maybe(self, numbers: AsyncIterator[int] | None = None) -> int:
        return -1 if numbers is None else await anext(numbers)

    @endpoint
    async def slowly(self, numbers: AsyncIterator[int]) -> None:
        await self.gate.acquire()
        async for n in numbers:
            self.seen.append(n)
            await self.gate.acquire()

    @endpoint
    async def arrays(self, arrays: AsyncIterator[npt.NDArray[np.int64]]) -> list[int]:
        kept = [array async for array in arrays]
        return [int(array[0]) for array in kept]

    @endpoint
    async def double(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        async for n in numbers:
            yield 2 * n

    @endpoint
    async def both_at_once(self, numbers: AsyncIterator[int]) -> str:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(self.read(numbers))
        except ExceptionGroup as errors:
            return str(errors.exceptions[0])
        return ""

    async def read(self, numbers: AsyncIterator[int]) -> None:
        await anext(numbers)


async def numbers(stop: int, seen: list[object] | None = None) -> AsyncIterator[int]:
    for i in range(stop):
        if seen is not None:
            seen.append(i)
        yield i


async def read(stream: AsyncIterator[object], received: list[object]) -> None:
    async for item in stream:
        received.append(item)  # noqa: PERF401  # what came before a failure counts


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture(params=[0, 1], ids=["same rank", "other rank"])
def home(request: pytest.FixtureRequest) -> int:
    """The rank of the actor; its caller is rank 0."""
    rank: int = request.param
    return rank


# -- out ---------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("stream-out")
async def test_items_arrive_in_order_and_then_the_stream_ends(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, name="s")
        ref = ranks.systems[0].ref("s", rank=home, actor_class=Source)
        assert [item async for item in ref.count.stream(200)] == list(range(200))
        assert [item async for item in ref.count.stream(0)] == []


async def test_thousands_of_items_arrive_in_order(open_ranks: Any) -> None:
    count = chosen(10_000, soak=100_000)
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Source, name="s")
        expected = 0
        async for item in ranks.systems[0].ref("s", rank=1, actor_class=Source).count.stream(count):
            assert item == expected
            expected += 1
        assert expected == count


async def test_items_come_as_the_types_of_the_annotation(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, name="s")
        typed = ranks.systems[0].ref("s", rank=home, actor_class=Source)
        untyped = ranks.systems[0].ref("s", rank=home)
        assert [item async for item in typed.points.stream()] == [Point(1, 2.5), Point(3, 4.5)]
        assert [item async for item in untyped.points.stream()] == [{"x": 1, "y": 2.5}, {"x": 3, "y": 4.5}]
        assert [item async for item in typed.anything.stream()] == [{"a": [1, 2]}]


async def test_an_item_of_the_wrong_type_ends_the_stream_at_both_ends(open_ranks: Any, home: int) -> None:
    seen: list[object] = []
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, seen, name="s")
        ref = ranks.systems[0].ref("s", rank=home, actor_class=Source)
        received: list[object] = []
        with pytest.raises(UsageError, match=r"item 2 of wrong of .*Expected `int`, got `str`"):
            await read(ref.wrong.stream(), received)
        assert received == [1]
        assert await ref.add(1) == 2
        assert seen == ["closed"]


async def test_an_item_that_cannot_be_sent_is_an_error_that_names_it(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, name="s")
        received: list[object] = []
        with pytest.raises(
            RemoteError, match=r"item 2 of Source.unsendable\(\): a value of type object cannot be sent"
        ):
            await read(ranks.systems[0].ref("s", rank=home).unsendable.stream(), received)
        assert received == [1]


@pytest.mark.promise("stream-credit")
async def test_a_slow_reader_bounds_what_is_produced(open_ranks: Any, home: int) -> None:
    seen: list[object] = []
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, seen, name="s")
        stream = ranks.systems[0].ref("s", rank=home, actor_class=Source).count.stream(10_000)
        for read in range(1, 200):
            await anext(stream)
            await turns(5)
            assert read <= len(seen) <= read + AHEAD
        await stream.aclose()


async def test_nothing_is_produced_before_the_iteration_begins(open_ranks: Any, home: int) -> None:
    seen: list[object] = []
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, seen, name="s")
        stream = ranks.systems[0].ref("s", rank=home, actor_class=Source).count.stream(10)
        await turns()
        assert seen == []
        assert await anext(stream) == 0
        await stream.aclose()


async def test_a_large_array_arrives_as_a_writable_view_and_alone(open_ranks: Any, home: int) -> None:
    seen: list[object] = []
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, seen, name="s")
        stream = ranks.systems[0].ref("s", rank=home, actor_class=Source).large.stream(64 << 20)
        first = await anext(stream)
        await turns()
        assert seen == [0, 1]
        assert (first.size, int(first[-1]), first.flags.owndata, first.flags.writeable) == (64 << 20, 0, False, True)
        assert [int(array[0]) async for array in stream] == [1, 2]


async def test_a_generator_may_use_its_buffer_again(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, name="s")
        kept = [array async for array in ranks.systems[0].ref("s", rank=home, actor_class=Source).reuse.stream(100)]
        assert [int(array[0]) for array in kept] == list(range(100))


async def test_an_actor_is_held_while_it_yields_unless_the_endpoint_is_concurrent(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, name="s")
        ref = ranks.systems[0].ref("s", rank=home, actor_class=Source)
        beside = ref.beside.stream(1000)
        assert await anext(beside) == 0
        assert await ref.add(1) == 2
        held = ref.count.stream(1000)
        assert await anext(held) == 0
        asking = asyncio.ensure_future(ref.add(1))
        await turns()
        assert not asking.done()
        await held.aclose()
        assert await asking == 2
        assert [item async for item in beside] == list(range(1, 1000))


# -- in ----------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("stream-in")
async def test_an_endpoint_reads_what_the_caller_yields(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Sink, name="s")
        for ref in (ranks.systems[0].ref("s", rank=home, actor_class=Sink), ranks.systems[0].ref("s", rank=home)):
            assert await ref.total(numbers(500)) == sum(range(500))
            assert await ref.total(numbers=numbers(0)) == 0


async def test_several_streams_of_one_call_are_independent(open_ranks: Any, home: int) -> None:
    async def letters() -> AsyncIterator[str]:
        for letter in "abc":
            yield letter

    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Sink, name="s")
        ref = ranks.systems[0].ref("s", rank=home, actor_class=Sink)
        assert await ref.pairs(numbers(3), right=letters()) == [(0, "a"), (1, "b"), (2, "c")]
        assert await ref.many(numbers(3), numbers(200), numbers(4)) == [3, 19900, 6]


async def test_streams_pass_in_both_directions_at_once(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Sink, name="s")
        ref = ranks.systems[0].ref("s", rank=home, actor_class=Sink)
        assert [item async for item in ref.double.stream(numbers(1000))] == list(range(0, 2000, 2))


async def test_any_object_that_can_be_iterated_asynchronously_is_a_stream(open_ranks: Any, home: int) -> None:
    class Iterable:
        def __aiter__(self) -> AsyncIterator[int]:
            return numbers(4)

    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Sink, name="s")
        await ranks.systems[home].spawn(Source, name="source")
        ref = ranks.systems[0].ref("s", rank=home, actor_class=Sink)
        source = ranks.systems[0].ref("source", rank=home, actor_class=Source)
        assert await ref.total(Iterable()) == 6
        assert await ref.total(source.count.stream(5)) == 10


@pytest.mark.promise("stream-lazy")
async def test_the_caller_is_not_asked_for_items_before_the_endpoint_reads(open_ranks: Any, home: int) -> None:
    seen: list[object] = []
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Sink, name="s")
        ref = ranks.systems[0].ref("s", rank=home, actor_class=Sink)
        assert await ref.ignore(numbers(10, seen), 7) == 7
        assert seen == []


@pytest.mark.promise("stream-credit")
async def test_a_slow_endpoint_bounds_what_the_caller_produces(open_ranks: Any, home: int) -> None:
    produced: list[object] = []
    read: list[object] = []
    sinks: list[Sink] = []

    class Seen(Sink):
        async def on_start(self) -> None:
            sinks.append(self)

    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Seen, read, name="s")
        asking = asyncio.ensure_future(ranks.systems[0].ref("s", rank=home).slowly(numbers(300, produced)))
        await turns()
        assert produced == []
        for _ in range(300):
            sinks[0].gate.release()
            await turns(8)
            assert len(read) <= len(produced) <= len(read) + AHEAD
        sinks[0].gate.release()
        await asking
        assert read == list(range(300))


async def test_a_stream_can_be_left_and_read_on(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Sink, name="s")
        assert await ranks.systems[0].ref("s", rank=home).first_and_rest(numbers(100)) == [0, 1, sum(range(2, 100))]


async def test_items_of_the_caller_are_copied_when_they_are_produced(open_ranks: Any, home: int) -> None:
    async def arrays() -> AsyncIterator[npt.NDArray[np.int64]]:
        buffer = np.zeros(4, np.int64)
        for i in range(100):
            buffer[:] = i
            yield buffer

    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Sink, name="s")
        ref = ranks.systems[0].ref("s", rank=home, actor_class=Sink)
        assert await ref.arrays(arrays()) == list(range(100))


async def test_a_stream_may_be_optional(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Sink, name="s")
        ref = ranks.systems[0].ref("s", rank=home, actor_class=Sink)
        assert [await ref.maybe(), await ref.maybe(None), await ref.maybe(numbers(1))] == [-1, -1, 0]


async def test_a_stream_has_one_reader_at_a_time(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Sink, name="s")
        text = await ranks.systems[0].ref("s", rank=home).both_at_once(numbers(10))
        assert "argument 'numbers' of Sink.both_at_once(): a task waits for the next item already" in text


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actor_class", [Source, None], ids=["typed", "untyped"])
async def test_a_call_that_does_not_fit_the_endpoint_says_which_one_does(
    open_ranks: Any, home: int, actor_class: type[Source] | None
) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, name="s")
        ref: Any = ranks.systems[0].ref("s", rank=home, actor_class=actor_class)
        with pytest.raises(UsageError, match=r"count\(\) yields a stream; use `async for \.\.\. in ref\.count\.stream"):
            await ref.count(5)
        with pytest.raises(UsageError, match=r"add\(\) returns one result; use `await ref\.add\(\.\.\.\)`"):
            async for _ in ref.add.stream(5):
                pass
        assert await ref.add(1) == 2


async def test_what_is_told_cannot_stream(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, name="source")
        await ranks.systems[home].spawn(Sink, name="sink")
        source = ranks.systems[0].ref("source", rank=home, actor_class=Source)
        with pytest.raises(UsageError, match=r"count\(\) yields a stream; use `async for"):
            source.count.tell(5)
        for actor_class in (Sink, None):
            sink: Any = ranks.systems[0].ref("sink", rank=home, actor_class=actor_class)
            with pytest.raises(UsageError, match=r"argument 1 of total\(\): a told message cannot bring a stream; ask"):
                sink.total.tell(numbers(3))
        ranks.systems[0].ref("source", rank=home).count.tell(5)
        assert await source.add(1) == 2
        assert "count() yields a stream" in ranks.systems[home].dead_letters.recent[-1].reason


async def test_streams_and_plain_arguments_are_not_confused(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Source, name="source")
        await ranks.systems[home].spawn(Sink, name="sink")
        sink = ranks.systems[0].ref("sink", rank=home)
        with pytest.raises(UsageError, match=r"argument 'numbers' of Sink.total\(\): expected a stream"):
            await sink.total([1, 2, 3])
        with pytest.raises(UsageError, match=r"argument 'n' of Source.add\(\): Expected `int`, got `ext`"):
            await ranks.systems[0].ref("source", rank=home).add(numbers(3))
        with pytest.raises(UsageError, match=r"argument 1 of add\(\): a value of type async_generator cannot be sent"):
            await ranks.systems[0].ref("source", rank=home, actor_class=Source).add(numbers(3))
        same = numbers(3)
        with pytest.raises(UsageError, match=r"argument 2 of many\(\): is the same stream as another argument"):
            await sink.many(same, same)


async def test_an_item_of_the_callers_that_does_not_fit_is_the_callers_error(open_ranks: Any, home: int) -> None:
    async def wrong() -> AsyncIterator[Any]:
        yield 1
        yield "two"

    async def unsendable() -> AsyncIterator[Any]:
        yield 1
        yield object()

    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Sink, name="s")
        ref = ranks.systems[0].ref("s", rank=home, actor_class=Sink)
        with pytest.raises(UsageError, match=r"item 2 of argument 'numbers' of Sink.total\(\): Expected `int`"):
            await ref.total(wrong())
        with pytest.raises(UsageError, match=r"item 2 of argument 1 of total\(\): a value of type object cannot be"):
            await ref.total(unsendable())
        assert await ref.total(numbers(3)) == 3
