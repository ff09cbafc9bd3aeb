"""Deadlines are read off suspended tasks."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest
import uvloop

from asyncpar.actors.runtime import deadline_discovery
from asyncpar.actors.runtime.deadline_discovery import find_deadline
from asyncpar.errors import UsageError
from asyncpar.testing.loop import VirtualTimeLoop, run_virtual

Work = Callable[[], Coroutine[Any, Any, object]]
Look = Callable[..., float | None]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
    "virtual": VirtualTimeLoop,
}


@pytest.fixture(params=sorted(LOOPS))
def look(request: pytest.FixtureRequest) -> Look:
    """Run a coroutine until it waits, and return the seconds that the task which waits innermost has left."""

    def run(work: Callable[[Wait], Coroutine[Any, Any, object]], after: Work | None = None) -> float | None:
        async def main() -> float | None:
            wait = Wait()
            begun = asyncio.get_running_loop().time()
            task = asyncio.create_task(work(wait))
            await wait.reached.wait()
            if after is not None:
                await after()
            for _ in range(3):
                await asyncio.sleep(0)
            assert wait.task is not None
            found = find_deadline(wait.task)
            task.cancel()
            wait.gate.set()
            await asyncio.wait({task})
            return None if found is None else found - begun

        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(main())

    return run


class Wait:
    """Where a task waits."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None

    async def __call__(self) -> None:
        self.task = asyncio.current_task()
        self.reached.set()
        await self.gate.wait()

    def __await__(self) -> Generator[Any, None, None]:
        return self().__await__()


def about(seconds: float) -> Any:
    return pytest.approx(seconds, abs=0.5)


def test_a_task_without_timeouts_has_no_deadline(look: Look) -> None:
    async def work(wait: Wait) -> None:
        await wait()

    assert look(work) is None


def test_a_timeout_is_a_deadline(look: Look) -> None:
    async def work(wait: Wait) -> None:
        async with asyncio.timeout(50):
            await wait()

    assert look(work) == about(50)


def test_timeout_at_is_a_deadline(look: Look) -> None:
    async def work(wait: Wait) -> None:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + 40):
            await wait()

    assert look(work) == about(40)


def test_the_earliest_of_nested_timeouts_counts(look: Look) -> None:
    async def inner(wait: Wait, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            await wait()

    async def work(wait: Wait, outer: float, middle: float, last: float) -> None:
        async with asyncio.timeout(outer), asyncio.timeout(middle):
            await inner(wait, last)

    assert look(lambda wait: work(wait, 30, 20, 10)) == about(10)
    assert look(lambda wait: work(wait, 30, 10, 20)) == about(10)
    assert look(lambda wait: work(wait, 10, 30, 20)) == about(10)


def test_a_timeout_of_none_is_no_deadline(look: Look) -> None:
    async def work(wait: Wait) -> None:
        async with asyncio.timeout(None):
            await wait()

    assert look(work) is None


def test_a_timeout_that_was_left_is_none(look: Look) -> None:
    async def work(wait: Wait) -> None:
        async with asyncio.timeout(5) as left:
            await asyncio.sleep(0)
        assert not left.expired()
        await wait()

    assert look(work) is None


def test_a_timeout_that_was_moved_counts_where_it_is_now(look: Look) -> None:
    async def work(wait: Wait) -> None:
        async with asyncio.timeout(5) as moved:
            moved.reschedule(asyncio.get_running_loop().time() + 70)
            await wait()

    assert look(work) == about(70)


def test_a_timeout_that_others_move_counts_where_it_is_now(look: Look) -> None:
    moved: list[asyncio.Timeout] = []

    async def work(wait: Wait) -> None:
        async with asyncio.timeout(5) as timeout:
            moved[:] = [timeout]
            await wait()

    async def after() -> None:
        moved[0].reschedule(None)

    assert look(work, after) is None


def test_timeouts_around_and_inside_generators_count(look: Look) -> None:
    async def items(wait: Wait, seconds: float | None) -> AsyncIterator[int]:
        async with asyncio.timeout(seconds):
            await wait()
            yield 1

    async def through(wait: Wait, seconds: float | None) -> AsyncIterator[int]:
        async for item in items(wait, seconds):
            yield item

    async def work(wait: Wait, outer: float | None, inner: float | None) -> None:
        async with asyncio.timeout(outer):
            async for _ in through(wait, inner):
                pass

    assert look(lambda wait: work(wait, 30, None)) == about(30)
    assert look(lambda wait: work(wait, None, 20)) == about(20)
    assert look(lambda wait: work(wait, 30, 20)) == about(20)


def test_anext_and_objects_that_can_be_awaited_do_not_hide_timeouts(look: Look) -> None:
    class Awaitable:
        def __init__(self, wait: Wait) -> None:
            self.wait = wait

        def __await__(self) -> Generator[Any, None, None]:
            yield from self.wait.__await__()

    async def items(wait: Wait) -> AsyncIterator[int]:
        await Awaitable(wait)
        yield 1

    async def work(wait: Wait) -> None:
        async with asyncio.timeout(25):
            await anext(items(wait), 2)

    assert look(work) == about(25)


def test_a_child_of_a_task_group_has_the_deadline_of_its_parent(look: Look) -> None:
    async def work(wait: Wait) -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group, asyncio.timeout(5):
            group.create_task(wait())
            await wait.gate.wait()

    async def waiting_in_exit(wait: Wait) -> None:
        async with asyncio.timeout(60):
            async with asyncio.TaskGroup() as group:
                group.create_task(wait())

    assert look(work) == about(60)
    assert look(waiting_in_exit) == about(60)


def test_a_grandchild_has_the_deadline_of_everybody_above(look: Look) -> None:
    async def child(wait: Wait) -> None:
        async with asyncio.timeout(80), asyncio.TaskGroup() as group:
            group.create_task(wait())

    async def work(wait: Wait) -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(child(wait))

    assert look(work) == about(60)


def test_awaited_and_gathered_tasks_have_the_deadline_of_who_awaits_them(look: Look) -> None:
    async def awaiting(wait: Wait) -> None:
        async with asyncio.timeout(60):
            await asyncio.create_task(wait())

    async def gathering(wait: Wait) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(wait(), asyncio.sleep(0))

    assert look(awaiting) == about(60)
    assert look(gathering) == about(60)


def test_wait_for_is_a_deadline(look: Look) -> None:
    async def work(wait: Wait) -> None:
        await asyncio.wait_for(wait(), 15)

    async def nested(wait: Wait) -> None:
        async with asyncio.timeout(10):
            await asyncio.wait_for(wait(), 15)

    assert look(work) == about(15)
    assert look(nested) == about(10)


def test_shielded_and_merely_watched_tasks_have_no_deadline(look: Look) -> None:
    async def shielding(wait: Wait) -> None:
        async with asyncio.timeout(10):
            await asyncio.shield(wait())

    async def watching(wait: Wait) -> None:
        async with asyncio.timeout(10):
            await asyncio.wait({asyncio.create_task(wait())}, timeout=5)

    assert look(shielding) is None
    assert look(watching) is None


def test_timeouts_inside_context_managers_of_contextlib_count(look: Look) -> None:
    @contextlib.asynccontextmanager
    async def limited() -> AsyncIterator[None]:
        async with asyncio.timeout(35):
            yield

    async def managed(wait: Wait) -> None:
        async with limited():
            await wait()

    async def stacked(wait: Wait) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(45))
            await wait()

    assert look(managed) == about(35)
    assert look(stacked) == about(45)


def loop_deadline(run: Callable[[Source], Coroutine[Any, Any, object]]) -> float | None:
    """Run ``run`` until the source of its iteration waits, and return the deadline of the loop over that."""

    async def main() -> float | None:
        source = Source()
        task = asyncio.create_task(run(source))
        await source.reached.wait()
        assert source.iterator is not None
        assert source.task is not None
        found = find_deadline(source.task, source.iterator)
        task.cancel()
        await asyncio.wait({task})
        return found

    return run_virtual(main())


class Source:
    """Makes an iterator that yields once and then waits."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.iterator: weakref.ref[Any] | None = None
        self.task: asyncio.Task[Any] | None = None

    def __call__(self) -> AsyncIterator[int]:
        made = self.items()
        self.iterator = weakref.ref(made)
        return made

    async def items(self) -> AsyncGenerator[int, None]:
        self.task = asyncio.current_task()
        yield 1
        self.reached.set()
        await asyncio.Event().wait()


def test_timeouts_around_a_loop_are_the_deadline_of_the_iteration() -> None:
    async def simple(source: Source) -> None:
        async with asyncio.timeout(20):
            async for _ in source():
                pass

    async def called(source: Source) -> None:
        async with asyncio.timeout(10):
            await simple(source)

    async def comprehended(source: Source) -> None:
        async with asyncio.timeout(25):
            [item async for item in source()]

    async def in_the_body(source: Source) -> None:
        async with asyncio.timeout(30):
            async for _ in source():
                source.reached.set()
                async with asyncio.timeout(5):
                    await asyncio.Event().wait()

    async def as_a_child(source: Source) -> None:
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            await group.create_task(simple(source))

    assert loop_deadline(simple) == 20
    assert loop_deadline(called) == 10
    assert loop_deadline(comprehended) == 25
    assert loop_deadline(in_the_body) == 30
    assert loop_deadline(as_a_child) == 15


def test_timeouts_around_one_step_are_no_deadline_of_the_iteration() -> None:
    async def stepwise(source: Source) -> None:
        iterator = aiter(source())
        while True:
            async with asyncio.timeout(5):
                await anext(iterator)

    async def left_and_taken_up(source: Source) -> None:
        iterator = source()
        async with asyncio.timeout(5):
            async for _ in iterator:
                pass

    async def known_elsewhere(source: Source) -> None:
        kept: list[Any] = []

        def keep() -> AsyncIterator[int]:
            kept.append(source())
            return aiter(kept[0])

        async with asyncio.timeout(5):
            async for _ in keep():
                pass

    async def through(source: Source) -> AsyncIterator[int]:
        async with asyncio.timeout(40):
            async for item in source():
                yield item

    async def through_a_generator(source: Source) -> None:
        iterator = through(source)
        await anext(iterator)
        async with asyncio.timeout(5):
            await anext(iterator)

    assert loop_deadline(stepwise) is None
    assert loop_deadline(left_and_taken_up) is None
    assert loop_deadline(known_elsewhere) is None
    assert loop_deadline(through_a_generator) == 40


def test_context_managers_of_users_are_not_touched(look: Look) -> None:
    class Touchy:
        async def __aenter__(self) -> Touchy:
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"touched: {name}")

    async def work(wait: Wait) -> None:
        async with asyncio.timeout(12), Touchy():
            await wait()

    assert look(work) == about(12)


@pytest.fixture
def checked_anew() -> Iterator[None]:
    deadline_discovery.check_interpreter.cache_clear()
    yield
    deadline_discovery.check_interpreter.cache_clear()


@pytest.mark.usefixtures("checked_anew")
@pytest.mark.parametrize("shown", [[], [object()]], ids=["nothing", "something else"])
def test_an_interpreter_that_does_not_show_timeouts_is_refused(
    monkeypatch: pytest.MonkeyPatch, shown: list[object]
) -> None:
    monkeypatch.setattr(deadline_discovery, "_contexts", lambda frame, below=None: iter(shown))
    with pytest.raises(
        UsageError, match=r"endpoints would not see the deadlines of their callers; use CPython 3\.11 to"
    ):
        deadline_discovery.check_interpreter()


@pytest.mark.usefixtures("checked_anew")
def test_an_interpreter_newer_than_those_tested_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_discovery, "_NEWEST", (3, 10))
    with pytest.warns(RuntimeWarning, match=r"asyncpar is tested on Python 3\.11 to 3\.10, this is 3\.\d+\."):
        deadline_discovery.check_interpreter()
