"""Discovery of a task's deadline from the timeouts that it has entered.

Theory of operation.  asyncio keeps no list of the timeouts of a task.  But a *suspended* coroutine exposes its
references, including the block stack, and an ``async with asyncio.timeout(...)`` keeps its ``Timeout.__aexit__`` there
until it is left: as a bound method up to Python 3.13, as a function followed by the ``Timeout`` from 3.14 on.  So the
chain of coroutines and generators that a task awaits shows every timeout that the task is in, in the order in which
they were entered.  A task that another one awaits, directly, by ``wait_for`` or ``gather`` or as a child of a task
group, ends with that one, so its timeouts count, too; those that were entered inside the task group do not.

An iteration has the deadline of its loop: the timeouts that were entered before an ``async for`` end it as a whole, but
one that is entered around a single step ends only that step.  So only those count that lie below the iterator on the
block stack of the frame that runs the loop and alone knows the iterator.

All of this reads debugging internals of CPython, which may change with any version.  So ``check_interpreter`` tries it
on a coroutine of its own, once per process, and refuses an interpreter on which it does not work: otherwise endpoints
there would silently miss deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import platform
import sys
import warnings
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Iterator
from functools import cache, partial
from types import (
    AsyncGeneratorType,
    BuiltinMethodType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
    coroutine,
)
from typing import Any, Final, TypeAlias

from asyncpar.errors import UsageError

Frame: TypeAlias = Coroutine[Any, Any, Any] | AsyncGenerator[Any, Any] | Generator[Any, Any, Any]
Iteration: TypeAlias = "weakref.ReferenceType[AsyncGeneratorType[Any, Any]]"

_FRAMES: Final = (CoroutineType, AsyncGeneratorType, GeneratorType)
_NEWEST: Final = (3, 14)
"""The newest Python on which all tests were run."""
_MAX_DEPTH: Final = 1000
_MAX_TASKS: Final = 16


@cache
def check_interpreter() -> None:
    """Raise ``UsageError`` unless this interpreter supports ``find_deadline``.  Warn of an unknown version."""
    if sys.version_info[:2] > _NEWEST:
        warnings.warn(
            f"asyncpar is tested on Python 3.11 to {_NEWEST[0]}.{_NEWEST[1]}, this is {platform.python_version()}: "
            "deadlines of callers that wait by asyncio.gather, wait_for or task groups may not reach endpoints",
            RuntimeWarning,
            stacklevel=2,
        )
    context = _ProbedContext()
    probe = _probed_loop(context)
    probe.send(None)
    loops = [item for item in gc.get_referents(probe) if isinstance(item, AsyncGeneratorType)]
    contexts = [list(_contexts(probe)), *(list(_contexts(probe, below=loop)) for loop in loops)]
    probe.close()
    if contexts != [[context], [context]]:
        raise UsageError(
            f"Python {platform.python_version()} ({platform.python_implementation()}) does not show the timeouts of "
            "suspended coroutines in a way that asyncpar knows, so endpoints would not see the deadlines of their "
            f"callers; use CPython 3.11 to {_NEWEST[0]}.{_NEWEST[1]}"
        )


class _ProbedContext:
    async def __aenter__(self) -> None: ...
    async def __aexit__(self, *_: object) -> None: ...


async def _probed_steps() -> AsyncGenerator[None, None]:
    yield


async def _probed_loop(context: _ProbedContext) -> None:
    async with context:
        async for _ in _probed_steps():
            await _probed_pause()


@coroutine
def _probed_pause() -> Generator[None, None, None]:
    yield


def find_deadline(task: asyncio.Task[Any], iterator: Iteration | None = None) -> float | None:
    """Return the loop time at which the first timeout cancels the awaitable of ``task``; None if none is found.

    With ``iterator``, return the time at which the first timeout ends the loop over it, which ``task`` runs.  ``task``
    is suspended.
    """
    times: list[float] = []
    if iterator is not None:
        around = _entered_around(task, iterator)
        if around is None:
            return None
        times = around
        for awaiting, group in _who_awaits(task):
            _collect_from(awaiting, group, times, {id(task)})
    else:
        _collect(task, times, set())
    return min(times, default=None)


def _collect(task: asyncio.Task[Any], times: list[float], seen: set[int]) -> None:
    """Add the times of ``task`` and of tasks that end with it or end it."""
    if id(task) in seen or len(seen) >= _MAX_TASKS or task.done():
        return
    seen.add(id(task))
    times += _entered(task, until=None) or ()
    for awaiting, group in _who_awaits(task):
        _collect_from(awaiting, group, times, seen)


def _collect_from(task: asyncio.Task[Any], group: asyncio.TaskGroup | None, times: list[float], seen: set[int]) -> None:
    """Add the times of ``task``, which awaits another one, directly or by ``group``."""
    if group is None:
        _collect(task, times, seen)
        return
    outside = _entered(task, until=group)
    if outside is not None and id(task) not in seen and len(seen) < _MAX_TASKS:
        seen.add(id(task))
        times += outside
        for awaiting, outer in _who_awaits(task):
            _collect_from(awaiting, outer, times, seen)


def _entered_around(task: asyncio.Task[Any], iterator: Iteration) -> list[float] | None:
    """Return the times of the timeouts around the loop of ``task`` over ``iterator``; None if it runs no such loop."""
    generator = iterator()
    if generator is None:
        return None
    times: list[float] = []
    for frame in _frames(task):
        if isinstance(frame, AsyncGeneratorType):
            times = []  # outer timeouts may be around one step of this generator
        places = sum(item is generator for item in gc.get_referents(frame))
        if places:
            known = (
                _references_of_an_inspection() + places + generator.ag_running
            )  # references of the loop, and of its step
            if places != _places_of_loop(frame) or _count_references(iterator) != known:
                return None
            times += _times(_contexts(frame, below=generator))
            return times
        times += _times(_contexts(frame))
    return None


def _count_references(iterator: Iteration) -> int:
    """Return the number of references to a live iterator, including those of this inspection."""
    generator = iterator()
    return sys.getrefcount(generator)


@cache
def _references_of_an_inspection() -> int:
    """Return the count for a generator to which only one variable refers."""
    generator = _probed_steps()
    assert isinstance(generator, AsyncGeneratorType)
    return _count_references(weakref.ref(generator))


def _places_of_loop(frame: Frame) -> int:
    """Return the number of references of a loop of ``frame`` to its iterator: two in a comprehension."""
    is_comprehension = isinstance(frame, CoroutineType) and frame.cr_code.co_varnames[:1] == (".0",)
    return 2 if is_comprehension else 1


def _times(contexts: Iterable[object]) -> Iterator[float]:
    for context in contexts:
        if isinstance(context, asyncio.Timeout) and (when := context.when()) is not None:
            yield when


def _entered(task: asyncio.Task[Any], until: asyncio.TaskGroup | None) -> list[float] | None:
    """Return the times at which the timeouts of ``task`` fire; with ``until``, only of those entered before it.

    None if ``until`` is not found.
    """
    times: list[float] = []
    for frame in _frames(task):
        for context in _contexts(frame):
            if until is not None and context is until:
                return times
            times += _times([context])
        if until is not None and _is_leaving(frame, until):
            return times
        when = _wait_for_time(frame)
        if when is not None:
            times.append(when)
    return times if until is None else None


def _frames(task: asyncio.Task[Any]) -> Iterator[Frame]:
    """Yield the frames in which ``task`` is suspended, outermost first."""
    found: object = task.get_coro()
    for _ in range(_MAX_DEPTH):
        if isinstance(found, CoroutineType):
            yield found
            found = found.cr_await
        elif isinstance(found, AsyncGeneratorType):
            yield found
            found = found.ag_await
        elif isinstance(found, GeneratorType):
            yield found
            found = found.gi_yieldfrom
        elif found is None or isinstance(found, asyncio.Future):
            return
        elif (awaited := getattr(found, "cr_await", None)) is not None:  # a coroutine in compiled code, as gRPC's are
            found = awaited
        else:  # an object between a coroutine and an async generator's next item, or the like
            found = next((item for item in gc.get_referents(found) if isinstance(item, _FRAMES)), None)


def _contexts(frame: object, below: object = None) -> Iterator[object]:
    """Yield the asynchronous context managers that ``frame`` has entered, in order; only those before ``below``."""
    exits: object = None
    for item in gc.get_referents(frame):
        if below is not None and item is below:
            return
        if exits is not None and getattr(type(item), "__aexit__", None) is exits:
            yield from _unfold(item)
        elif type(item) is MethodType and _is_exit(item.__func__):
            yield from _unfold(item.__self__)
        exits = item if _is_exit(item) else None


def _is_exit(function: object) -> bool:
    return isinstance(function, FunctionType) and function.__name__ == "__aexit__"


def _unfold(context: object) -> Iterator[object]:
    """Yield ``context``, or the contexts that it has entered itself if it is one of contextlib's own."""
    if isinstance(context, asyncio.Timeout):
        yield context
    elif isinstance(context, contextlib.AsyncExitStack):
        for _, leave in getattr(context, "_exit_callbacks", ()):
            if isinstance(leave, MethodType):
                yield from _unfold(leave.__self__)
    elif isinstance(context, contextlib._AsyncGeneratorContextManager):
        yield from _contexts(context.gen)
    else:
        yield context


def _is_leaving(frame: Frame, group: asyncio.TaskGroup) -> bool:
    """Whether ``frame`` is the ``__aexit__`` of ``group`` that waits for its tasks."""
    if not isinstance(frame, CoroutineType) or frame.cr_code is not asyncio.TaskGroup.__aexit__.__code__:
        return False
    return any(item is group for item in gc.get_referents(frame))


def _wait_for_time(frame: Frame) -> float | None:
    """Return the time at which ``frame`` ends its wait, if it is an ``asyncio.wait_for`` that uses no ``Timeout``."""
    if not isinstance(frame, CoroutineType) or frame.cr_code is not asyncio.wait_for.__code__:
        return None
    handle: Any = None if frame.cr_frame is None else frame.cr_frame.f_locals.get("timeout_handle")
    if handle is None or handle.cancelled():
        return None
    when: float = handle.when()
    return when


def _who_awaits(
    future: asyncio.Future[Any], depth: int = 0
) -> Iterator[tuple[asyncio.Task[Any], asyncio.TaskGroup | None]]:
    """Yield the tasks whose end ends ``future``, and the task group by which they own it, if they do so by one."""
    for callback in gc.get_referents(future) if depth < _MAX_TASKS else ():
        owner = getattr(callback, "__self__", None) if isinstance(callback, MethodType | BuiltinMethodType) else None
        if isinstance(owner, asyncio.Task):  # its wake-up call: it awaits ``future`` itself
            yield owner, None
        elif isinstance(owner, asyncio.TaskGroup):
            parent = getattr(owner, "_parent_task", None)
            if isinstance(parent, asyncio.Task):
                yield parent, owner
        else:
            for waited_for in _outer_futures(callback):
                yield from _who_awaits(waited_for, depth + 1)


def _outer_futures(callback: object) -> Iterator[asyncio.Future[Any]]:
    """Yield the futures that ``wait_for`` or ``gather`` ends by ``callback``; ``shield`` and ``wait`` have none."""
    if isinstance(callback, partial) and getattr(callback.func, "__name__", "") == "_release_waiter":
        candidates: tuple[Any, ...] = callback.args
    elif isinstance(callback, FunctionType) and callback.__qualname__ == "gather.<locals>._done_callback":
        candidates = tuple(cell.cell_contents for cell in callback.__closure__ or () if not _is_empty(cell))
    else:
        return
    yield from (candidate for candidate in candidates if isinstance(candidate, asyncio.Future))


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
