"""Arguments that have no value yet are awaited, wherever they stand; the function gets their values."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.engines.awaited_arguments import values_of, with_values
from asyncpar.engines.blocking_run import run_in_thread
from asyncpar.testing import engine_programs as programs
from tests.engines.consoles import RecordingConsole


class Reference:
    """Stands for an object reference of Ray: awaitable, by any loop, and no future."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.awaited = 0

    def __await__(self) -> Generator[Any, None, Any]:
        self.awaited += 1
        yield from asyncio.sleep(0).__await__()
        return self.value


def of_thread(value: Any) -> concurrent.futures.Future[Any]:
    future = concurrent.futures.Future[Any]()
    future.set_result(value)
    return future


async def give(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


KINDS: dict[str, Callable[[Any], Any]] = {
    "a reference": Reference,
    "a coroutine": give,
    "a task": lambda value: asyncio.ensure_future(give(value)),
    "a future of a thread": of_thread,
}
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "alone": (lambda one: one, lambda value: value),
    "in a list": (lambda one: [1, one, "x"], lambda value: [1, value, "x"]),
    "in a tuple": (lambda one: (one, 2), lambda value: (value, 2)),
    "in a dict": (lambda one: {"a": [{"b": one}]}, lambda value: {"a": [{"b": value}]}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
async def test_every_kind_in_every_place(kind: str, place: str) -> None:
    make, expect = PLACES[place]
    function, arguments = await with_values(programs.add, (make(KINDS[kind](7)), 8))
    assert function is programs.add
    assert arguments == (expect(7), 8)


async def test_arguments_without_any_stay_as_they_are() -> None:
    arguments = ([1, {"a": np.arange(3)}], "x")
    assert (await with_values(programs.add, arguments))[1] is arguments


async def test_one_that_stands_in_two_places_is_awaited_once() -> None:
    one = Reference(5)
    assert await values_of([one, {"again": one}], "arguments") == [5, {"again": 5}]
    assert one.awaited == 1


async def test_those_of_a_partial_are_awaited() -> None:
    add: Callable[..., Any] = programs.add
    function, arguments = await with_values(functools.partial(add, Reference(1)), (give(2),))
    assert isinstance(function, functools.partial)
    assert (function.args, arguments) == ((1,), (2,))


async def test_an_error_is_that_of_the_data_with_its_place() -> None:
    async def fail() -> None:
        raise ZeroDivisionError("in the task")

    waiting = asyncio.ensure_future(asyncio.Event().wait())
    with pytest.raises(ZeroDivisionError, match="in the task") as caught:
        await with_values(programs.add, (waiting, {"x": fail()}))
    assert caught.value.__notes__ == ["(the value of arguments[1]['x'], which the ranks were to get)"]
    assert waiting.cancelled()


async def test_data_that_was_cancelled_is_named() -> None:
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    with pytest.raises(ap.UsageError, match=r"arguments\[0\]: expected a value, Task was cancelled"):
        await with_values(programs.add, (task,))


async def test_a_call_that_is_cancelled_while_it_waits_ends() -> None:
    waits = asyncio.ensure_future(with_values(programs.add, (asyncio.Event().wait(),)))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits


async def test_a_task_of_the_loop_that_is_blocked_is_refused_and_one_that_is_done_is_not() -> None:
    done, waiting = asyncio.ensure_future(give(4)), asyncio.ensure_future(asyncio.Event().wait())
    await done
    _, arguments = run_in_thread(lambda: with_values(programs.add, (done,)))
    assert arguments == (4,)
    with pytest.raises(ap.UsageError, match=r"arguments\[0\]: this Task belongs to an event loop that waits"):
        run_in_thread(lambda: with_values(programs.add, (waiting,)))
    waiting.cancel()


@pytest.mark.process
async def test_ranks_and_actors_get_the_values() -> None:
    console = RecordingConsole()
    assert await ap.cluster.launch(programs.add, Reference(1), give(2), ranks=1, console=console) == [3]
