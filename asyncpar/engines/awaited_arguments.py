"""Arguments that have no value yet: a future of Dask, an object reference of Ray, a task.

Engines accept them as their users expect, also in lists, tuples and dicts: the function gets the value.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from asyncpar.errors import UsageError

T = TypeVar("T")


async def with_values(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], Any]:
    """Replace awaitables in ``function``, if it is a ``partial``, and in ``arguments`` by their values; return both.

    All are awaited together, each once.  Raises the error of the first that fails, with a note naming its position;
    ``UsageError`` for one that was cancelled, and for one of a loop that waits for this call.
    """
    if isinstance(function, functools.partial):
        inner, own = await with_values(function.func, (function.args, function.keywords))
        function = functools.partial(inner, *own[0], **own[1])
    return function, await values_of(arguments, "arguments")


async def values_of(given: T, name: str) -> T:
    """Return ``given`` with all awaitables in it replaced by their values; see ``with_values``.

    Returns ``given`` itself if there are none.
    """
    waiting = dict[int, tuple[str, Any]]()
    for place, found in _find(given, name):
        waiting.setdefault(id(found), (place, found))
    if not waiting:
        return given
    tasks = [asyncio.ensure_future(_value(found, place)) for place, found in waiting.values()]
    try:
        values = dict(zip(waiting, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for _, found in waiting.values():
            if inspect.iscoroutine(found):
                found.close()  # a coroutine that has not begun
    replaced: T = _replace(given, values)
    return replaced


def _find(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield all awaitables in ``value``, with their positions."""
    if _is_awaited(value):
        yield place, value
    elif type(value) is dict:
        for key, one in value.items():
            yield from _find(one, f"{place}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, one in enumerate(value):
            yield from _find(one, f"{place}[{index}]")


def _is_awaited(value: Any) -> bool:
    return isinstance(value, concurrent.futures.Future) or (inspect.isawaitable(value) and not isinstance(value, type))


def _replace(value: Any, values: dict[int, Any]) -> Any:
    """Return ``value`` with its awaitables replaced by their ``values``."""
    if id(value) in values and _is_awaited(value):
        return values[id(value)]
    if type(value) is dict:
        return {key: _replace(one, values) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace(one, values) for one in value)
    return value


async def _value(found: Any, place: str) -> Any:
    """Return the value of the awaitable ``found``."""
    try:
        return await _as_awaitable(found, place)
    except (asyncio.CancelledError, concurrent.futures.CancelledError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UsageError(
            f"{place}: expected a value, {type(found).__name__} was cancelled before it had one"
        ) from error
    except Exception as error:
        error.add_note(f"(the value of {place}, which the ranks were to get)")
        raise


def _as_awaitable(found: Any, place: str) -> Awaitable[Any]:
    """Return an awaitable of this loop for the value of ``found``, which may belong to another loop."""
    if isinstance(found, concurrent.futures.Future):
        return asyncio.wrap_future(found)
    if isinstance(found, asyncio.Future) and found.get_loop() is not asyncio.get_running_loop():
        if not found.done():
            raise UsageError(
                f"{place}: this {type(found).__name__} belongs to an event loop that waits for this call; await it "
                "before, or await launch(...)"
            )
        return _done(found)
    if "distributed" in sys.modules:
        from asyncpar.engines.dask_client import value_of_future

        return value_of_future(found)
    awaitable: Awaitable[Any] = found
    return awaitable


async def _done(future: asyncio.Future[T]) -> T:
    return future.result()
