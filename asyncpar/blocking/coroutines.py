"""Coroutines that are begun by hand and continue as tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from asyncpar.collectives.call import Call

_FREQUENT_TURNS = 4


def go_far(coroutine: Coroutine[Any, Any, Any]) -> tuple[Coroutine[Any, Any, Any], bool, Any]:
    """Run ``coroutine``, which ``runs_anywhere``, without a task; return the rest, whether it is over, and its result.

    A bare yield gives the loop its turn, which it does not need while it waits.
    """
    try:
        wanted = coroutine.send(None)
        for _ in range(_FREQUENT_TURNS):
            if wanted is not None:
                break
            wanted = coroutine.send(None)
    except StopIteration as over:
        return coroutine, True, over.value
    return _Begun(coroutine, wanted), False, None


def runs_anywhere(coroutine: Coroutine[Any, Any, Any]) -> bool:
    """Return whether ``coroutine`` can run without a task, and in other threads than the loop's.

    Only operations in shared memory can, those of a rank alone, and code that comes ``After`` them: other code might
    ask for its current task, or begin generators, which only the loop's own thread registers with it.
    """
    call = coroutine.call if type(coroutine) is After else coroutine
    return isinstance(call, Call) and call.runs_anywhere


class After(Coroutine[Any, Any, Any]):
    """Await ``call``, and return the result of ``finish``, a plain function, applied to its result."""

    __slots__ = ("_finish", "call")

    def __init__(self, call: Coroutine[Any, Any, Any], finish: Callable[[Any], Any]) -> None:
        self.call = call
        self._finish = finish

    def send(self, value: Any) -> Any:
        try:
            return self.call.send(value)
        except StopIteration as over:
            result = over.value
        raise StopIteration(self._finish(result))

    def throw(self, *error: Any) -> Any:
        try:
            return self.call.throw(*error)
        except StopIteration as over:
            result = over.value
        raise StopIteration(self._finish(result))

    def close(self) -> None:
        self.call.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._finish((yield from self.call.__await__()))

    def __getattr__(self, name: str) -> Any:
        """Provide the attributes of the call, for tracebacks and warnings."""
        return getattr(self.call, name)


class _Begun(Coroutine[Any, Any, Any]):
    """``coroutine``, which has been begun by hand and waits for ``wanted``."""

    __slots__ = ("_coroutine", "_is_known", "_wanted")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], wanted: Any) -> None:
        self._coroutine = coroutine
        self._wanted = wanted
        self._is_known = False

    def send(self, value: Any) -> Any:
        if self._is_known:
            return self._coroutine.send(value)
        self._is_known = True
        wanted, self._wanted = self._wanted, None
        return wanted

    def throw(self, *error: Any) -> Any:
        self._is_known = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("what has been begun by hand can only go on as a task")

    def __getattr__(self, name: str) -> Any:
        """Provide the attributes of the coroutine, for tracebacks and warnings."""
        return getattr(self._coroutine, name)


def forget_frames(error: BaseException) -> None:
    """Remove the frames of code that ``runs_anywhere`` from ``error`` and its causes.

    They refer to their callers, possibly the thread that waits for the result: with all its variables, among them the
    error itself, until Python's garbage collector runs.
    """
    seen: set[int] = set()
    found = [error]
    while found:
        one = found.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            found += [other for other in (one.__cause__, one.__context__) if other is not None]


async def end_tasks(seconds: float) -> None:
    """Cancel all other tasks of the loop, and those that they create, and wait up to ``seconds`` for their ends."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while left := _all_tasks(loop) - {asyncio.current_task()}:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=max(0.0, end - loop.time()))
        if loop.time() >= end:
            break
    await loop.shutdown_asyncgens()


def _all_tasks(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    """Return the tasks of the running ``loop``, including those that visiting threads made.

    From Python 3.14 on, each thread has a list of the tasks that it made, and ``all_tasks`` inspects all lists only if
    the loop is not the one that runs in this thread.
    """
    asyncio._set_running_loop(None)
    try:
        return asyncio.all_tasks(loop)
    finally:
        asyncio._set_running_loop(loop)
