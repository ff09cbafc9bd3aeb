"""Find where the program of this process is now: the place in the user's code, from its stack or its tasks."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from asyncpar.core.observe.recorder import is_internal

_LIBRARY: Final = str(Path(threading.__file__).parent)
_MOST_TASKS: Final = 200
_DEEPEST: Final = 200


def describe_program(loop: asyncio.AbstractEventLoop) -> str:
    """Return what the program does, as in ``is in user code at train.py:57``; "" if that is not known.

    Called by the thread of ``loop``: if that is the main thread, the first of its tasks that has code of the user
    counts, else the stack of the main thread.
    """
    main = threading.main_thread()
    if main.ident is None or main.ident == threading.get_ident():
        return _describe_tasks(loop)
    frame = sys._current_frames().get(main.ident)
    return describe_frame(frame)


def describe_frame(frame: FrameType | None) -> str:
    """Return what the code of ``frame`` does for the user's code that has called it."""
    is_inside = frame is not None and is_internal(frame.f_code)
    place = user_place(frame)
    return f"{'waits' if is_inside else 'is in user code'} at {place}" if place else ""


def user_place(frame: FrameType | None) -> str:
    """Return the place of the user's code that has called that of ``frame``; "" if there is none."""
    while frame is not None:
        if _is_users(frame.f_code):
            return place_of(frame)
        frame = frame.f_back
    return ""


def place_of(frame: FrameType) -> str:
    """Return ``train.py:57``."""
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    tasks = sorted(asyncio.all_tasks(loop), key=_age)[:_MOST_TASKS]
    return next((text for task in tasks if (text := describe_task(task))), "")


def describe_thread(name: str) -> str:
    """Return what the first thread whose name begins with ``name`` does in code of the user; "" if none does."""
    threads = [thread.ident for thread in threading.enumerate() if thread.name.startswith(name)]
    frames = sys._current_frames()
    return next((text for ident in threads if ident and (text := describe_frame(frames.get(ident)))), "")


def _age(task: asyncio.Task[Any]) -> tuple[bool, int]:
    """Return what orders tasks by their age as far as their names tell it."""
    number = task.get_name().removeprefix("Task-")
    return (False, int(number)) if number.isdecimal() else (True, 0)


def describe_task(task: asyncio.Task[Any]) -> str:
    """Return where a task waits, as in ``sleeps at train.py:57``; "" if it is not in code of the user."""
    waiting: Any = task.get_coro()
    place, sleeps = "", False
    for _ in range(_DEEPEST):
        frame = _first(waiting, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            break
        if _is_users(frame.f_code):
            place = place_of(frame)
        sleeps = frame.f_code is asyncio.sleep.__code__
        waiting = _first(waiting, "cr_await", "gi_yieldfrom", "ag_await")
    return f"{'sleeps' if sleeps else 'waits'} at {place}" if place else ""


def _first(value: object, *names: str) -> Any:
    return next((found for name in names if (found := getattr(value, name, None)) is not None), None)


def _is_users(code: CodeType) -> bool:
    file = code.co_filename
    return not is_internal(code) and not file.startswith((_LIBRARY, "<frozen"))
