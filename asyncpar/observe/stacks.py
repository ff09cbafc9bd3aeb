"""Stacks of a process, captured in another of its threads: its threads, its tasks, and their awaitables.

Nothing is stopped, and no debugger is used: threads are captured by ``sys._current_frames``, tasks by the coroutines
that they await (``cr_await``), and by the future at the end (``_fut_waiter``).  Variables of asyncpar's own frames show
which operation or which actor's answer a task waits for, and for which call of which rank it works.
"""

from __future__ import annotations

import asyncio
import gc
import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

from asyncpar.actors.runtime.calls import Delivery, PendingCall
from asyncpar.collectives.operation import Operation
from asyncpar.core.observe.recorder import is_internal
from asyncpar.core.observe.reporting import text_of
from asyncpar.core.observe.whereabouts import is_user_code
from asyncpar.observe.stack_views import CallView, FrameView, TaskView, ThreadView

MOST_TASKS: Final = 512
MOST_FRAMES: Final = 64
_LONGEST: Final = 200
_TRIES: Final = 8

Seen = TypeVar("Seen")


class PlacedFrame(NamedTuple):
    """A frame, and its line at the time of the capture."""

    frame: FrameType
    line: int | None


def capture_threads() -> tuple[ThreadView, ...]:
    """Return all threads of this process except the calling one, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    stacks = at_one_moment(
        lambda: {ident: _walk(frame) for ident, frame in sys._current_frames().items() if ident != own}
    )
    return tuple(
        ThreadView(
            name=names.get(ident, f"thread {ident}"),
            frames=tuple(view_frames(stacks[ident])),
            is_main=ident == main,
        )
        for ident in sorted(stacks, key=lambda ident: ident != main)
    )


def _walk(frame: FrameType | None) -> list[PlacedFrame]:
    """Return the frames of a thread, the outermost first."""
    frames = []
    while frame is not None:
        frames.append(PlacedFrame(frame, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def at_one_moment(read: Callable[[], Seen]) -> Seen:
    """Return the result of ``read`` once two calls in a row agree.

    Threads run on between two instructions of this one: lines that are read one after the other may never have been
    current together.  A call begins with a whole time slice of the interpreter, which is longer than two calls.  After
    a few tries the last result counts.
    """
    seen = read()
    for _ in range(_TRIES):
        before, seen = seen, read()
        if before == seen:
            break
        time.sleep(0)  # the next slice begins here
    return seen


def capture_tasks(loop: asyncio.AbstractEventLoop) -> tuple[tuple[TaskView, ...], int]:
    """Return the tasks of ``loop``, those with code of the program first, and the number of others."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name()))
    views = [view_task(task, loop) for task in tasks[:MOST_TASKS]]
    views.sort(key=lambda view: view.user_frame is None)
    return tuple(views), len(tasks) - len(views)


def view_frames(frames: Sequence[PlacedFrame]) -> list[FrameView]:
    """Return views of ``frames``, only the innermost ones if there are too many."""
    views = []
    for frame, known in frames[-MOST_FRAMES:]:
        code, line = frame.f_code, known or frame.f_code.co_firstlineno
        is_user = is_user_code(code)
        source = linecache.getline(code.co_filename, line).strip()[:_LONGEST] if is_user else ""
        views.append(
            FrameView(file=code.co_filename, line=line, function=code.co_qualname, source=source, is_user=is_user)
        )
    return views


def view_task(task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> TaskView:
    """Return the view of ``task`` of ``loop``: its place, and its wait."""
    placed = at_one_moment(lambda: [PlacedFrame(each, each.f_lineno) for each in await_chain(task.get_coro())])
    frames = [each.frame for each in placed]
    is_running = asyncio.current_task(loop) is task
    waiter = getattr(task, "_fut_waiter", None)
    operation, ask, serves = _find_parts(frames, waiter)
    tasks = tuple(_awaited_tasks(waiter))
    waits, ranks = "", tuple[int, ...]()
    if operation is not None:
        waits, ranks = operation.label, tuple(operation.waits_for())
    elif ask is not None:
        waits, ranks = f"{ask.endpoint} of {ask.actor!r}", (ask.rank,)
    elif tasks:
        waits = f"task {', '.join(tasks[:8])}"
    elif not is_running:
        waits = _describe_wait(frames, waiter)
    return TaskView(
        name=task.get_name(),
        frames=tuple(view_frames(placed)),
        waits=waits,
        ranks=ranks,
        tasks=tasks,
        ask=ask,
        serves=serves,
        is_running=is_running,
    )


def await_chain(awaitable: Any) -> Iterable[FrameType]:
    """Yield the frames from a coroutine to its innermost wait, through generators and wrapped coroutines."""
    for _ in range(MOST_FRAMES * 4):
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if isinstance(frame, FrameType):
            yield frame
        following = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
        if following is None:
            following = getattr(awaitable, "_steps", None)  # a call of ours
        if following is None and type(awaitable).__name__ in ("coroutine_wrapper", "async_generator_asend"):
            following = next(iter(gc.get_referents(awaitable)), None)
            if (frame := getattr(following, "ag_frame", None)) is not None:
                yield frame
                following = getattr(following, "ag_await", None)
        if following is None:
            return
        awaitable = following


def _find_parts(frames: list[FrameType], waiter: Any) -> tuple[Operation | None, CallView | None, CallView | None]:
    """Return the operation and the ask that the frames wait for, and the call that they work for."""
    operation = getattr(waiter, "_operation", None)
    ask = serves = None
    for frame in frames:
        if not is_internal(frame.f_code):
            continue
        for value in list(frame.f_locals.values()):
            match value:
                case Operation():
                    operation = value
                case PendingCall():
                    ask = CallView(
                        rank=value.ref.rank, number=value.call, actor=value.ref.name, endpoint=value.endpoint
                    )
                case Delivery():
                    serves = CallView(
                        rank=value.sender, number=value.call or 0, actor=value.actor, endpoint=value.endpoint
                    )
                case _:
                    held = getattr(type(value), "_operation", None) and getattr(value, "_operation", None)
                    operation = held if isinstance(held, Operation) else operation
    return (operation if isinstance(operation, Operation) and not operation.is_over else None), ask, serves


def _awaited_tasks(waiter: Any) -> Iterable[str]:
    """Yield the names of tasks that end ``waiter``: itself, those that it gathers, or those of ``asyncio.wait``."""
    if isinstance(waiter, asyncio.Task):
        yield waiter.get_name()
    for child in getattr(waiter, "_children", ()) or ():
        if isinstance(child, asyncio.Task) and not child.done():
            yield child.get_name()


def _describe_wait(frames: list[FrameType], waiter: Any) -> str:
    """Describe the wait of a task outside of asyncpar by its innermost call: ``sleep``, ``Queue.get``."""
    inner = frames[-1].f_code if frames else None
    if inner is not None and not is_user_code(inner):
        return inner.co_qualname
    return "" if waiter is None else text_of(type(waiter).__name__)
