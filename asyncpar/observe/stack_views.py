"""Stacks as plain values for the wire: frames, tasks, threads and processes.  Pure."""

from __future__ import annotations

import os
import re
import threading
from itertools import takewhile
from pathlib import Path
from typing import Final

import msgspec

from asyncpar.core.observe.waits import describe_place

_DUMPED_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$", re.MULTILINE)
_DUMPED_FRAME: Final = re.compile(r'^\s*File "(.*)", line (\d+) in (.*)$')
_COLLECTING: Final = "Garbage-collecting"
_PACKAGE: Final = str(Path(__file__).parents[1])
_LIBRARY: Final = str(Path(threading.__file__).parent)
_LOOP: Final = (f"{_LIBRARY}{os.sep}asyncio{os.sep}", f"{_LIBRARY}{os.sep}selectors.py")


class FrameView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One frame; ``is_user`` means code of the program, not of asyncpar, asyncio or the interpreter."""

    file: str
    line: int
    function: str
    source: str = ""
    is_user: bool = False

    @property
    def site(self) -> str:
        """``train.py:57``."""
        return f"{Path(self.file).name}:{self.line}"


class CallView(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an actor: ``number`` is that of its caller, ``rank`` the other end."""

    rank: int
    number: int
    actor: str
    endpoint: str


class TaskView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task; ``frames`` go from the outermost to the one where it waits.

    ``waits`` describes the wait, ``ranks``, ``tasks`` and ``ask`` are the ranks, the other tasks of this process and
    the answer that it waits for; ``serves`` is the call that it works for.
    """

    name: str
    frames: tuple[FrameView, ...]
    waits: str = ""
    ranks: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    ask: CallView | None = None
    serves: CallView | None = None
    is_running: bool = False

    @property
    def user_frame(self) -> FrameView | None:
        """The innermost frame of the program."""
        return next((frame for frame in reversed(self.frames) if frame.is_user), None)


class ThreadView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A thread; ``frames`` go from the outermost to the current one."""

    name: str
    frames: tuple[FrameView, ...]
    is_main: bool = False

    @property
    def place(self) -> str:
        """The place of the program in it, as in ``train.py:57``; "" if only an event loop or a library runs in it."""
        for frame in reversed(self.frames):
            if frame.is_user:
                return frame.site
            if frame.file.startswith(_LOOP):
                return ""
        return ""

    @property
    def doing(self) -> str:
        """The program's work there, in the words in which ranks report it; "" if the place is not known."""
        return describe_place(self.place, is_inside=bool(self.frames) and self.frames[-1].file.startswith(_PACKAGE))


class ProcessStacks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stacks of a process at one moment; ``more_tasks`` are not among ``tasks``."""

    pid: int
    rank: int
    time: float
    threads: tuple[ThreadView, ...] = ()
    tasks: tuple[TaskView, ...] = ()
    more_tasks: int = 0
    text: str = ""
    """Stacks as text, if nothing else was available."""


def parse_dump(dump: str) -> tuple[str, tuple[ThreadView, ...]]:
    """Parse the output of ``faulthandler``: the error at its begin ("": none), and the threads, the main one first.

    It has no further details of frames, so installed files do not count as code of the program.
    """
    begins = list(_DUMPED_THREAD.finditer(dump))
    fatal = next((line for line in dump.splitlines() if line.startswith("Fatal Python error")), "")
    threads = []
    for number, begin in enumerate(begins):
        until = begins[number + 1].start() if number + 1 < len(begins) else len(dump)
        lines = dump[begin.end() : until].strip("\n").splitlines()
        found = [match for match in takewhile(bool, map(_DUMPED_FRAME.match, lines)) if match is not None]
        frames = tuple(
            FrameView(file=match[1], line=int(match[2]), function=match[3], is_user=is_of_user(match[1]))
            for match in reversed(found)
        )
        is_main = number == len(begins) - 1  # it goes from the newest to the oldest
        name = "MainThread" if is_main else begin[0].rstrip(":").partition(" (")[0]
        threads.append(ThreadView(name=name, frames=frames, is_main=is_main))
    return fatal, tuple(sorted(threads, key=lambda thread: not thread.is_main))


def crash_line(dump: str) -> str:
    """Describe in one line the error that ``faulthandler`` recorded as the process ended, and its place; "" if none.

    If that is in a library, the calling place in the program is named, too.
    """
    lines = iter(dump.splitlines())
    fatal = next((line for line in lines if line.startswith("Fatal Python error")), "")
    during = next((line for line in lines if line.startswith("Current thread")), "")
    first = next(lines, "") if fatal and during else ""
    if first.strip() == _COLLECTING:
        fatal, first = f"{fatal}, while garbage is collected", next(lines, "")
    inner = _DUMPED_FRAME.match(first)
    if inner is None:
        return fatal
    text = f"{fatal}, in {inner[3]} at {inner[1]}:{inner[2]}"
    frames = takewhile(bool, map(_DUMPED_FRAME.match, lines))
    caller = next((frame for frame in frames if frame is not None and is_of_user(frame[1])), None)
    return (
        text if is_of_user(inner[1]) or caller is None else f"{text}, called in {caller[3]} at {caller[1]}:{caller[2]}"
    )


def is_of_user(file: str) -> bool:
    """Return whether ``file`` belongs to the program, judging by its name: installed files do not."""
    return not file.startswith((_PACKAGE, _LIBRARY, "<frozen")) and "/site-packages/" not in file
