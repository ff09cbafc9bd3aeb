"""Search for the current place of this process's program: a line of user code, from its stack or its tasks."""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
import threading
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from asyncpar.core.observe.recorder import is_internal
from asyncpar.core.observe.waits import describe_place

_STANDARD: Final = (str(Path(threading.__file__).parent) + os.sep, "<frozen")
_PACKAGES: Final = f"{os.sep}site-packages{os.sep}"
_COMPILED: Final = (".pxi", ".pyx")
_LOOP: Final = (str(Path(asyncio.__file__).parent) + os.sep, selectors.__file__)
_MOST_TASKS: Final = 200
_DEEPEST: Final = 200


def is_user_code(code: CodeType) -> bool:
    """Return whether it is code of the program, not of a library or of the interpreter."""
    return not is_internal(code) and _is_of_program(code.co_filename)


@lru_cache(maxsize=4096)
def _is_of_program(file: str) -> bool:
    """Return whether ``file`` is of the program; of installed packages, only the one that was started is."""
    if _PACKAGES in file:
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        package = "" if spec is None else spec.name.partition(".")[0]
        return bool(package) and f"{_PACKAGES}{package}{os.sep}" in file
    return not file.startswith(_STANDARD) and not file.endswith(_COMPILED)


def describe_program(loop: asyncio.AbstractEventLoop) -> str:
    """Describe what the program does, as in ``is in user code at train.py:57``; "" if it is not known.

    May be called by any thread: the code that the main thread runs counts; if it only runs an event loop, or calls this
    itself, the first task of ``loop`` with user code counts.
    """
    main = threading.main_thread()
    if main.ident is None or main.ident == threading.get_ident():
        return _describe_tasks(loop)
    frame = sys._current_frames().get(main.ident)
    return _describe_running(frame) or _describe_tasks(loop)


def _describe_running(frame: FrameType | None) -> str:
    """Return the result of ``describe_frame``, "" if the program only waits for its event loop."""
    inner = frame
    while frame is not None and not is_user_code(frame.f_code):
        if frame.f_code.co_filename.startswith(_LOOP):
            return ""
        frame = frame.f_back
    return describe_frame(inner)


def describe_frame(frame: FrameType | None) -> str:
    """Describe what the code of ``frame`` does for the user's code that called it."""
    return describe_place(user_place(frame), is_inside=frame is not None and is_internal(frame.f_code))


def user_place(frame: FrameType | None) -> str:
    """Return the place of the user's code that called the code of ``frame``; "" if there is none."""
    while frame is not None:
        if is_user_code(frame.f_code):
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
    """Describe the user code in the first thread whose name begins with ``name``; "" if there is none."""
    threads = [thread.ident for thread in threading.enumerate() if thread.name.startswith(name)]
    frames = sys._current_frames()
    return next((text for ident in threads if ident and (text := describe_frame(frames.get(ident)))), "")


def _age(task: asyncio.Task[Any]) -> tuple[bool, int]:
    """Return a key that orders tasks by age as far as their names reveal it."""
    number = task.get_name().removeprefix("Task-")
    return (False, int(number)) if number.isdecimal() else (True, 0)


def describe_task(task: asyncio.Task[Any]) -> str:
    """Describe where a task waits, as in ``sleeps at train.py:57``; "" if it is not in user code."""
    waiting: Any = task.get_coro()
    place, sleeps = "", False
    for _ in range(_DEEPEST):
        frame = _first(waiting, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            break
        if is_user_code(frame.f_code):
            place = place_of(frame)
        sleeps = frame.f_code is asyncio.sleep.__code__
        waiting = _first(waiting, "cr_await", "gi_yieldfrom", "ag_await")
    return f"{'sleeps' if sleeps else 'waits'} at {place}" if place else ""


def _first(value: object, *names: str) -> Any:
    return next((found for name in names if (found := getattr(value, name, None)) is not None), None)
