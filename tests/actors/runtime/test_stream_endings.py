"""However a stream ends, both ends end, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.errors import ActorDown, PeerLost, RemoteError, UsageError


class Witness:
    """What happened, for tests that wait for it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = asyncio.Event()

    def note(self, event: str) -> None:
        self.events.append(event)
        self._changed.set()

    async def sees(self, event: str, times: int = 1) -> None:
        while self.events.count(event) < times:
            self._changed.clear()
            await self._changed.wait()


class Streamer(Actor):
    def __init__(self, witness: Witness) -> None:
        self.witness = witness
        self.escaped: AsyncIterator[int] | None = None

    @endpoint
    async def endless(self) -> AsyncIterator[int]:
        i = 0
        try:
            while True:
                yield i
                i += 1
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            self.witness.note("generator closed")

    @endpoint
    async def silent(self) -> AsyncIterator[int]:
        try:
            yield 0
            self.witness.note("silent")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.witness.note("generator cancelled")
            raise
        finally:
            self.witness.note("generator closed")

    @endpoint
    async def stubborn(self) -> AsyncIterator[int]:
        """Does not heed a cancellation."""
        try:
            yield 0
            while True:
                try:
                    self.witness.note("silent")
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    yield -1
        finally:
            self.witness.note("generator closed")

    @endpoint
    async def failing(self, after: int) -> AsyncIterator[int]:
        for i in range(after):
            yield i
        raise ZeroDivisionError("enough")

    @endpoint
    async def read(self, numbers: AsyncIterator[int], stop: int | None) -> int:
        try:
            async for n in numbers:
                self.witness.note("read")
                if n == stop:
                    return n
        except asyncio.CancelledError:
            self.witness.note("endpoint cancelled")
            raise
        except RemoteError as error:
            self.witness.note(str(error))
            raise
        return -1

    @endpoint
    async def forgive(self, numbers: AsyncIterator[int]) -> int:
        try:
            return sum([n async for n in numbers])
        except RemoteError:
            return -1

    @endpoint
    async def fail(self, numbers: AsyncIterator[int]) -> None:
        await anext(numbers)
        raise ZeroDivisionError("no more")

    @endpoint
    async def keep(self, numbers: AsyncIterator[int]) -> int:
        self.escaped = numbers
        return await anext(numbers)

    @endpoint
    async def read_kept(self) -> int:
        assert self.escaped is not None
        return await anext(self.escaped)

    @endpoint
    async def echo(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        try:
            async for n in numbers:
                yield n
        finally:
            self.witness.note("generator closed")

    @endpoint
    async def hello(self) -> str:
        return "hello"


class Boom(Exception):
    """The caller's own."""


class Input:
    """An endless input of the caller, which fails at ``fail_at`` and waits for ever at ``wait_at``."""

    def __init__(self, witness: Witness, *, fail_at: int | None = None, wait_at: int | None = None) -> None:
        self.witness = witness
        self.fail_at = fail_at
        self.wait_at = wait_at

    async def __aiter__(self) -> AsyncIterator[int]:
        i = 0
        try:
            while True:
                if i == self.fail_at:
                    raise Boom("own")
                if i == self.wait_at:
                    self.witness.note("input waits")
                    await asyncio.Event().wait()
                yield i
                i += 1
        finally:
            await asyncio.sleep(0)
            self.witness.note("input closed")


@pytest.fixture(params=[0, 1], ids=["same rank", "other rank"])
def home(request: pytest.FixtureRequest) -> int:
    """The rank of the actor; its caller is rank 0."""
    rank: int = request.param
    return rank


async def read(stream: AsyncIterator[int], use: Callable[[int], object]) -> None:
    async for item in stream:
        use(item)


def fail(item: int) -> None:
    raise Boom


async def open_streamer(ranks: Any, home: int) -> tuple[Any, Witness]:
    witness = Witness()
    await ranks.systems[home].spawn(Streamer, witness, name="s")
    return ranks.systems[0].ref("s", rank=home, actor_class=Streamer), witness


# -- the reader leaves -------------------------------------------------------------------------------------------------


@pytest.mark.promise("stream-leave")
async def test_leaving_the_loop_closes_the_generator(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        async for item in ref.endless.stream():
            if item == 100:
                break
        await witness.sees("generator closed")
        assert await ref.hello() == "hello"


async def test_an_exception_in_the_loop_closes_the_generator(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        with pytest.raises(Boom):
            await read(ref.endless.stream(), fail)
        await witness.sees("generator closed")


@pytest.mark.promise("stream-leave")
async def test_cancelling_the_reader_cancels_the_generator_where_it_waits(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        reading = asyncio.create_task(read(ref.silent.stream(), lambda _: None))
        await witness.sees("silent")
        reading.cancel()
        await asyncio.wait({reading})
        assert reading.cancelled()
        await witness.sees("generator cancelled")
        await witness.sees("generator closed")
        assert await ref.hello() == "hello"


async def test_a_timeout_around_the_loop_closes_the_generator(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as timeout:
                await read(ref.silent.stream(), lambda _: timeout.reschedule(0))
        await witness.sees("generator closed")


async def test_closing_the_iterator_closes_the_generator(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        stream = ref.endless.stream()
        assert await anext(stream) == 0
        await stream.aclose()
        await witness.sees("generator closed")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_dropping_the_iterator_closes_the_generator(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        stream = ref.endless.stream()
        await anext(stream)
        del stream
        gc.collect()
        await witness.sees("generator closed")


async def test_an_iterator_that_was_never_begun_does_nothing(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        ref.endless.stream()
        assert await ref.hello() == "hello"
        assert witness.events == []


async def test_a_generator_that_does_not_heed_a_cancellation_is_closed(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        stream = ref.stubborn.stream()
        assert await anext(stream) == 0
        await witness.sees("silent")
        await stream.aclose()
        await witness.sees("generator closed")
        assert await ref.hello() == "hello"


async def test_a_storm_of_cancellations_leaves_nothing(open_ranks: Any, home: int) -> None:
    async def run(ref: Any, turn: int, witness: Witness) -> None:
        calls = (ref.endless.stream, lambda: ref.echo.stream(Input(witness)), ref.silent.stream)
        async for _ in calls[turn % 3]():
            await asyncio.sleep(0)

    order = random.Random(4)
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        for _ in range(20):
            tasks = [asyncio.create_task(run(ref, turn, witness)) for turn in range(15)]
            while tasks:
                for _ in range(order.randrange(12)):
                    await asyncio.sleep(0)
                task = tasks.pop(order.randrange(len(tasks)))
                task.cancel()
                await asyncio.wait({task})
                assert task.cancelled()
        assert await ref.hello() == "hello"


# -- the endpoint ends -------------------------------------------------------------------------------------------------


@pytest.mark.promise("stream-failure")
async def test_what_was_yielded_before_a_failure_arrives_before_it(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, _ = await open_streamer(ranks, home)
        received: list[int] = []
        with pytest.raises(RemoteError, match="ZeroDivisionError: enough") as caught:
            await read(ref.failing.stream(100), received.append)
        assert received == list(range(100))
        assert caught.value.remote_traceback.count("File ") == 1
        assert await ref.hello() == "hello"


@pytest.mark.promise("stream-leave")
async def test_an_endpoint_that_returns_early_closes_the_input_before_its_answer(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        assert await ref.read(Input(witness), 3) == 3
        assert witness.events[-1] == "input closed"
        witness.events.clear()
        assert await ref.read(Input(witness, wait_at=5), 4) == 4
        assert witness.events[-1] == "input closed"


@pytest.mark.promise("stream-lazy")
async def test_an_endpoint_that_fails_closes_the_input(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        with pytest.raises(RemoteError, match="ZeroDivisionError: no more"):
            await ref.fail(Input(witness))
        assert witness.events == ["input closed"]


async def test_a_call_that_is_refused_closes_an_input_that_was_begun(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        witness = Witness()
        begun = aiter(Input(witness))
        await anext(begun)
        with pytest.raises(UsageError, match="there is no actor"):
            await ranks.systems[0].ref("nobody", rank=home).read(begun, None)
        assert witness.events == ["input closed"]


async def test_a_stream_that_outlives_its_call_says_so(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        assert await ref.keep(Input(witness)) == 0
        with pytest.raises(RemoteError, match=r"UsageError: Streamer.keep\(\): the call that brought this stream has"):
            await ref.read_kept()


# -- the input fails ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("stream-failure")
async def test_a_failing_input_raises_at_the_endpoint_and_comes_back_as_itself(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        with pytest.raises(Boom, match="own"):
            await ref.read(Input(witness, fail_at=2), None)
        assert witness.events[:3] == ["read", "read", "input closed"]
        assert witness.events[3].startswith(f"rank {0}: ")
        assert "Boom: own" in witness.events[3]
        with pytest.raises(Boom):
            await ref.forgive(Input(witness, fail_at=2))


async def test_a_failing_input_ends_a_stream_after_what_came_of_it(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        received: list[int] = []
        with pytest.raises(Boom, match="own"):
            await read(ref.echo.stream(Input(witness, fail_at=70)), received.append)
        assert received == list(range(70))


async def test_cancelling_the_call_ends_the_endpoint_and_the_input(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        asking = asyncio.ensure_future(ref.read(Input(witness, wait_at=1), None))
        await witness.sees("read")
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        assert "input closed" in witness.events
        await witness.sees("endpoint cancelled")


# -- actors, nodes and ranks end ---------------------------------------------------------------------------------------


async def test_a_killed_actor_ends_its_streams(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        stream = ref.silent.stream()
        assert await anext(stream) == 0
        await witness.sees("silent")
        await ranks.systems[home].kill(ref)
        with pytest.raises(ActorDown, match="the actor was killed"):
            await anext(stream)
        assert witness.events[-1] == "generator closed"


async def test_stopping_an_actor_lets_its_stream_finish(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        stream = ref.echo.stream(Input(witness, fail_at=200))
        assert await anext(stream) == 0
        stopping = asyncio.create_task(ranks.systems[home].stop(ref))
        with pytest.raises(Boom):
            async for _ in stream:
                pass
        await stopping


async def test_a_lost_rank_ends_both_halves(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        ref, witness = await open_streamer(ranks, 1)
        stream = ref.echo.stream(Input(witness, wait_at=3))
        assert await anext(stream) == 0
        await witness.sees("input waits")
        ranks.kill(1)
        with pytest.raises(PeerLost, match=r"echo of .*: rank 1 .* is lost: killed"):
            async for _ in stream:
                pass
        assert "input closed" in witness.events
        await witness.sees("generator closed")


async def test_a_lost_caller_ends_the_generator(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        ref, witness = await open_streamer(ranks, 1)
        stream = ref.silent.stream()
        assert await anext(stream) == 0
        await witness.sees("silent")
        ranks.kill(0)
        await witness.sees("generator closed")
        assert await ranks.systems[2].ref("s", rank=1).hello() == "hello"
        with pytest.raises(PeerLost):
            await anext(stream)


async def test_a_lost_rank_ends_a_stream_that_nobody_reads_at_the_moment(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, 1)
        stream = ref.echo.stream(Input(witness))
        assert await anext(stream) == 0
        ranks.kill(1)
        await witness.sees("input closed")
        with pytest.raises(PeerLost):
            await anext(stream)


@pytest.mark.parametrize("closing", [0, 1])
async def test_a_closed_node_ends_its_streams(open_ranks: Any, closing: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, 1)
        stream = ref.echo.stream(Input(witness, wait_at=3))
        asking = asyncio.ensure_future(anext(stream))
        assert await asking == 0
        await witness.sees("input waits")
        await ranks.systems[closing].close()
        await ranks.links[closing].close()
        with pytest.raises(PeerLost, match="closed"):
            async for _ in stream:
                pass
        assert "input closed" in witness.events
        await witness.sees("generator closed")


async def test_a_node_can_be_left_while_streams_are_held_and_nobody_reads(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        ref, witness = await open_streamer(ranks, home)
        stream = ref.echo.stream(Input(witness))
        await anext(stream)
    assert "input closed" in witness.events
    assert "generator closed" in witness.events
    await stream.aclose()
