"""Detection of code that blocks an event loop, with a report of its stack while it does.

Theory of operation.  A daemon thread examines the loop's thread every ``INSPECTION_SECONDS``, or less often if stalls
are only reported to others that wait for this rank (see ``LoopWatch.start_quietly``).  A loop that sleeps in its
selector, or runs only its own code, is not disturbed: examining it costs microseconds and wakes no thread.  If other
code runs, the thread schedules a callback on the loop, which runs after everything that is ready now.  Until then the
thread compares task and outermost frame, to see whether the same step still runs: an overloaded loop is late, but not
blocked.  A step that lasts longer than allowed is reported with the stack of the loop's thread.  So a stall is reported
at most ``INSPECTION_SECONDS`` after it has become too long, and shorter ones are never reported.

A callback that is itself compiled code (``loop.call_soon(time.sleep, 1)`` on uvloop) cannot be distinguished from
sleeping.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from asyncpar.core.observe.recorder import NO_TICKET, Recorder
from asyncpar.core.observe.records import EventKind
from asyncpar.core.observe.reporting import text_of
from asyncpar.core.observe.whereabouts import user_place
from asyncpar.errors import UsageError

BLOCKED_AFTER: Final = 0.1
"""Seconds for which code may block the loop before that is reported."""

INSPECTION_SECONDS: Final = 0.05
_STEP_SECONDS: Final = 0.01
LONG_SECONDS: Final = 1.0
"""Seconds after which a stall is reported to ranks that wait for this one."""

_QUIET_INSPECTION_SECONDS: Final = 0.25
_LONGEST: Final = 3600.0
_PACKAGE: Final = str(Path(__file__).parents[2]) + os.sep
_LOG: Final = logging.getLogger("asyncpar.runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A report that the event loop is blocked (``is_over`` False), or has resumed after that.

    ``seconds`` is the least time so far, or in all; ``what`` describes whose code it is, as far as known, and ``stack``
    is the formatted stack of the loop's thread, taken when ``blocked_after`` had passed.
    """

    rank: int
    seconds: float
    what: str
    stack: str
    is_over: bool

    def __str__(self) -> str:
        length = f"for {self.seconds:.2f} s"
        if self.is_over:
            return f"rank {self.rank}: the event loop goes on; {self.what} had blocked it {length}"
        return f"rank {self.rank}: {self.what} has blocked the event loop {length}; it is at\n{self.stack}"


OnBlocked = Callable[[Blocked], None]
"""Receives stalls in the watching thread, since the loop cannot call it.  It must be quick."""

Describe = Callable[[FrameType], str | None]
"""Describes, in the watching thread, whose code runs at a frame; returns None if that is not known."""


def check_blocked_after(seconds: object) -> float | None:
    """Return ``seconds``; None for None and 0: no watch.  Raises ``UsageError`` for anything but a valid number."""
    if seconds is None or seconds == 0:
        return None
    if not isinstance(seconds, int | float) or not 0.0 < seconds <= _LONGEST:
        raise UsageError(f"blocked_after: expected up to {_LONGEST:.0f} seconds, or 0 for no watch, got {seconds!r}")
    return float(seconds)


class LoopWatch:
    """Watches the running loop from ``start`` to ``stop``, both called on it.  ``blocked_after`` None: it never starts.

    Stalls are logged as warnings of the logger ``asyncpar.runtime`` and passed to subscribers.  A loop that keeps its
    own time (``clock_domain``) is not watched: the behaviour of a simulation must not depend on how fast it runs.
    """

    def __init__(self, *, rank: int, blocked_after: float | None = BLOCKED_AFTER, describe: Describe) -> None:
        self._rank = rank
        self._blocked_after = 0.0 if blocked_after is None else blocked_after
        self._describe = describe
        self._subscribers: list[OnBlocked] = []
        self._thread: threading.Thread | None = None
        self._news = threading.Event()
        self._is_stopping = False
        self._is_answered = False
        self._limit = self._blocked_after
        self._is_logged = False
        self._on_long: Callable[[str], None] = lambda _: None

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def subscribe(self, callback: OnBlocked) -> Callable[[], None]:
        """Report every stall from now on to ``callback``; the returned function unsubscribes it."""
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return unsubscribe

    def start_quietly(self, on_long: Callable[[str], None] | None) -> None:
        """Start to watch for long stalls alone: ``on_long`` receives the place of the code, and "" at the end.

        It is called in the watching thread.  Nothing is logged until ``start``.  Without ``on_long``, the watch starts
        only if ``blocked_after`` is set.
        """
        if on_long is not None:
            self._on_long = on_long
        elif not self._blocked_after:
            return
        self._limit = LONG_SECONDS
        self._begin()

    def start(self) -> None:
        """Start to watch and to log stalls, unless already started."""
        self._is_logged = True
        self.sharpen()
        if self._blocked_after:
            self._begin()

    def sharpen(self) -> None:
        """Report stalls of ``blocked_after`` to subscribers, not only long ones; logging stays as it is."""
        if self._blocked_after:
            self._limit = self._blocked_after

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        if self._thread is None and getattr(loop, "clock_domain", None) is None:
            sleeper = Sleeper(threading.get_ident(), loop)
            loop.call_soon(sleeper.learn)
            self._thread = threading.Thread(
                target=self._watch, args=(loop, sleeper), name="asyncpar loop watch", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop watching.  Idempotent."""
        if self._thread is not None:
            self._is_stopping = True
            self._news.set()
            self._thread.join()
            self._thread = None

    # -- in the watching thread --------------------------------------------------------------------------------------

    def _watch(self, loop: asyncio.AbstractEventLoop, sleeper: Sleeper) -> None:
        while not self._news.wait(
            INSPECTION_SECONDS if self._limit == self._blocked_after else _QUIET_INSPECTION_SECONDS
        ):
            if sleeper.is_awake() and not self._ask(loop, sleeper):
                return

    def _ask(self, loop: asyncio.AbstractEventLoop, sleeper: Sleeper) -> bool:
        """Wait until the loop resumes, and report a stall; return False if there is nothing more to watch."""
        self._is_answered = False
        try:
            loop.call_soon_threadsafe(self._answer, sleeper)
        except RuntimeError:  # the loop is closed
            return False
        seen, since = sleeper.activity(), sleeper.time()
        while not self._news.wait(_STEP_SECONDS):
            activity, now = sleeper.activity(), sleeper.time()
            if activity is None or activity != seen:
                seen, since = activity, now
            elif now - since >= self._limit:
                del seen, activity  # holds a frame, and its locals
                self._report(since, sleeper)
                break
        if not self._is_answered:
            return False
        self._news.clear()
        return not self._is_stopping

    def _answer(self, sleeper: Sleeper) -> None:
        """Note, on the loop, that it resumes, perhaps in another ``run`` (for cleaning up, say)."""
        sleeper.learn()
        self._is_answered = True
        self._news.set()

    def _report(self, since: float, sleeper: Sleeper) -> None:
        """Report a stall, wait for its end, and report that."""
        is_logged = self._is_logged
        what, stack = self._inspect(sleeper)
        seconds = sleeper.time() - since
        if self._news.is_set():
            return  # the loop resumed meanwhile: the stack is not that of the stall
        self._notify(
            Blocked(rank=self._rank, seconds=seconds, what=what, stack=stack, is_over=False), is_logged=is_logged
        )
        if not self._news.wait(max(0.0, LONG_SECONDS - seconds)):
            self._on_long(sleeper.place() or what)
            self._news.wait()
            self._on_long("")
        seconds = sleeper.time() - since
        self._notify(
            Blocked(rank=self._rank, seconds=seconds, what=what, stack=stack, is_over=True), is_logged=is_logged
        )

    def _inspect(self, sleeper: Sleeper) -> tuple[str, str]:
        try:
            return sleeper.show(self._describe)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a moving stack may raise: report the stall
            return "some code", f"  (its stack cannot be shown: {type(error).__name__}({text_of(error)!r}))"

    def _notify(self, blocked: Blocked, *, is_logged: bool) -> None:
        if is_logged:
            _LOG.warning("%s", blocked)
        for callback in list(self._subscribers):
            try:
                callback(blocked)
            except (Exception, SystemExit):  # noqa: BLE001  # user code; the watch goes on
                _LOG.exception("rank %d: a callback for a blocked event loop raised", self._rank)


Activity = tuple["asyncio.Task[Any] | None", FrameType]


class Sleeper:
    """The thread of a loop, seen from another thread: whether it sleeps, and its stack if not."""

    def __init__(self, thread: int, loop: asyncio.AbstractEventLoop) -> None:
        self._thread = thread
        self._loop = loop
        self._own: frozenset[CodeType] = frozenset()
        self._waits = f"/proc/self/task/{threading.get_native_id()}/schedstat"

    def learn(self) -> None:
        """Record the frames below this call, which is made by the loop, as the loop's own."""
        own: set[CodeType] = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            own.add(frame.f_code)
            frame = frame.f_back
        self._own = frozenset(own)

    def time(self) -> float:
        """Return the seconds since some moment, less those in which the thread only waited for a processor.

        On an overloaded machine code is slow without blocking the loop.  If the system does not report how long threads
        wait, all time counts.
        """
        try:
            with open(self._waits, "rb") as file:
                waited = int(file.read().split()[1])
        except (OSError, IndexError, ValueError):
            waited = 0
        return time.monotonic() - waited * 1e-9

    def is_awake(self) -> bool:
        """Return whether code other than the loop's own runs."""
        frame = sys._current_frames().get(self._thread)
        return frame is not None and self._is_foreign(frame)

    def activity(self) -> Activity | None:
        """Return the task and the outermost frame of the running step; None if the loop sleeps."""
        frame = sys._current_frames().get(self._thread)
        if frame is None or not self._is_foreign(frame):
            return None
        while (caller := frame.f_back) is not None and caller.f_code not in self._own:
            frame = caller  # read once: the frame may end meanwhile, and has no caller then
        return asyncio.current_task(self._loop), frame

    def place(self) -> str:
        """Return the place of the program's code, such as ``train.py:57``; "" if it is not on the stack."""
        frame = sys._current_frames().get(self._thread)
        return user_place(frame)

    def _is_foreign(self, frame: FrameType) -> bool:
        code = frame.f_code
        return bool(self._own) and code not in self._own and code.co_filename != selectors.__file__

    def show(self, describe: Describe) -> tuple[str, str]:
        """Return whose code runs, and the formatted stack of the thread without the loop's part of it.

        If asyncpar's own code runs, that is stated, and on whose behalf.
        """
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "a thread that has ended", ""
        task = asyncio.current_task(self._loop)
        what = describe(frame) or ("a callback" if task is None else f"task {task.get_name()!r}")
        if frame.f_code.co_filename.startswith(_PACKAGE):  # as when an array is copied
            what = f"asyncpar itself ({Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}) for {what}"
        frames = [each for each, _ in traceback.walk_stack(frame) if each.f_code not in self._own]
        while len(frames) > 1 and frames[-1].f_code.co_filename.startswith(_PACKAGE):
            frames.pop()  # how asyncpar came to call the program's code
        return what, format_frames(frames)


def format_frames(frames: list[FrameType]) -> str:
    """Format the stack ``frames``, innermost first.  Frames of other threads may have no line."""
    lines = [(frame, frame.f_lineno or frame.f_code.co_firstlineno) for frame in reversed(frames)]
    return "".join(traceback.StackSummary.extract(lines).format()).rstrip()


_FRAME: Final = re.compile(r'File "(.+)", line (\d+), in (\S+)')


class BlockedEvents:
    """Writes the reports of a loop watch (``record``) to ``recorder``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._ticket = NO_TICKET

    def record(self, blocked: Blocked) -> None:
        """Begin an event when the loop is blocked, and end it when the loop resumes.  Called in the watching thread.

        Its ``sequence`` is the time in microseconds for which the loop had been blocked when that was detected.
        """
        if blocked.is_over:
            self._recorder.end(self._ticket)
            return
        frames = _FRAME.findall(blocked.stack)
        site = 0
        if frames:
            file, line, function = frames[-1]
            site = self._recorder.place(file, int(line), function)
        word = self._recorder.name("blocked loop", {"by": blocked.what})
        self._ticket = self._recorder.begin(EventKind.BLOCKED, word, sequence=round(blocked.seconds * 1e6), site=site)
