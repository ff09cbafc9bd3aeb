"""Reports from this rank to the agent that started it: progress, signs of life, and the exception that ends it.

The channel is an inherited pipe (``ASYNCPAR_REPORT_FD``) that carries JSON objects, one per line.  Progress is written
only when the pipe has room, so that a slow agent never slows a rank; writing a failure blocks, for a second at most.
Without an agent every call is free and does nothing.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from numbers import Integral, Real
from types import TracebackType
from typing import SupportsFloat

from asyncpar.core.observe.rank_reports import (
    BeatRecord,
    BlockedRecord,
    FailureReport,
    Phase,
    PhaseRecord,
    ProgressRecord,
    WaitRecord,
    encode_record,
)
from asyncpar.core.observe.reported import reported
from asyncpar.core.observe.waits import WaitNotice
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import OperationMismatch, PeerError, UsageError

_UNPRINTABLE = (Exception, SystemExit)
"""Exceptions that making the text of a value may raise; RecursionError is one of these."""


def text_of(value: object) -> str:
    """Return ``str(value)``, or the kind of error that prevents it."""
    try:
        return _encodable(str(value))
    except _UNPRINTABLE as failure:
        return f"<its text cannot be made: {_kind(failure)}>"


def traceback_of(error: BaseException) -> str:
    """Return ``error`` as Python would show it, or its text and the reason why there is no more."""
    try:
        return _encodable("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    except _UNPRINTABLE as failure:
        return f"{_kind(error)}: {text_of(error)}\n(its traceback cannot be shown: {_kind(failure)})\n"


def _kind(error: BaseException) -> str:
    return _encodable(type(error).__qualname__)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def open_closed_streams() -> None:
    """Open the null device on each of the descriptors 0, 1 and 2 that is closed.

    Otherwise the next file or socket gets that number: libuv aborts the process over it (``uv__close``), and the output
    of a child ends up in it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


_VARIABLE = "ASYNCPAR_REPORT_FD"
_ATOMIC_BYTES = 4096  # PIPE_BUF of Linux: a write of up to this size is atomic
_LONGEST_TRACEBACK = 32_000
_LONGEST_VALUE = 60
_LONGEST_NAME = 1000
_MOST_FIELDS = 16
_LONGEST_CHAIN = 100
_FAILURE_PATIENCE = 1.0

Clock = Callable[[], float]


class Reporter:
    """One rank's end of the channel.  May be used from any thread; never raises because of the agent."""

    def __init__(self, descriptor: int | None, *, clock: Clock = time.monotonic) -> None:
        self._descriptor = descriptor
        self._clock = clock
        self._lock = threading.Lock()
        self._failed = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Reporter:
        """Return the reporter of this process, which discards everything if no agent started it.

        Raises ``UsageError`` if the variable is set but names no open descriptor.
        """
        text = environment.get(_VARIABLE, "")
        if not text:
            return cls(None)
        if not (text.isascii() and text.isdecimal()):
            raise UsageError(f"{_VARIABLE}: expected the number of a descriptor, got {text!r}")
        try:
            os.set_inheritable(int(text), False)
            os.set_blocking(int(text), False)
        except OSError as error:
            raise UsageError(
                f"{_VARIABLE}: descriptor {text} is not open ({os_reason(error)}); a program that a rank starts is no "
                "rank: start it without the ASYNCPAR_ variables"
            ) from error
        return cls(int(text))

    @property
    def is_connected(self) -> bool:
        """Whether the launcher listens."""
        return self._descriptor is not None

    def progress(
        self,
        *,
        description: str,
        completed: SupportsFloat,
        total: SupportsFloat | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        """Report the progress of this rank, with short figures in ``fields``.  Dropped when the agent is behind."""
        figures = {_cut(name): _cut(value) for name, value in list((fields or {}).items())[:_MOST_FIELDS]}
        reported.note_progress(_cut(description), float(completed), None if total is None else float(total), figures)
        self._show(description, completed, total, fields or {})

    def show_values(self, *, description: str, completed: SupportsFloat, total: SupportsFloat | None) -> None:
        """Report the program's values, beside progress that is already known."""
        self._show(description, completed, total, {})

    def _show(
        self,
        description: str,
        completed: SupportsFloat,
        total: SupportsFloat | None,
        fields: Mapping[str, object],
    ) -> None:
        if self._descriptor is None:
            return
        together: dict[str, object] = {
            **fields,
            **{name: reported.values[name] for name in reported.values if name not in fields},
        }
        shown = {_cut(key): _cut(value) for key, value in list(together.items())[:_MOST_FIELDS]}
        line = encode_record(
            ProgressRecord(_cut(description), float(completed), None if total is None else float(total), shown)
        )
        if len(line) <= _ATOMIC_BYTES:
            self._write(line, patience=0.0)

    def phase(self, phase: Phase) -> None:
        """Report the phase that this rank enters."""
        self._write(encode_record(PhaseRecord(phase)), patience=0.0)

    def beat(self) -> None:
        """Send a heartbeat."""
        self._write(_BEAT, patience=0.0)

    def waiting(self, notice: WaitNotice | None, *, has_failed: bool = False) -> None:
        """Report that this rank has waited for long; None: it goes on, or what it waited for ``has_failed``."""
        self._write(encode_record(WaitRecord(notice, has_failed)))

    def blocked(self, where: str) -> None:
        """Report that the code at ``where`` blocks the event loop; "": the loop resumes."""
        self._write(encode_record(BlockedRecord(_encodable(where)[:_LONGEST_NAME])))

    def failure(self, error: BaseException) -> None:
        """Report the exception that ends this rank.  Only the first one counts."""
        if self._descriptor is None or self._failed:
            return
        self._failed = True
        text = traceback_of(error)
        peer = find_peer_error(error)
        headline = _unwrapped(error)
        call = next((each.call for each in _chain(error) if isinstance(each, OperationMismatch)), "")
        report = FailureReport(
            time=min(self._clock(), _first_seen(error)),
            type_name=text_of(type(headline).__name__)[:_LONGEST_NAME],
            message=text_of(headline)[:_LONGEST_TRACEBACK],
            traceback=text[-_LONGEST_TRACEBACK:],
            is_peer_error=peer is not None,
            blames=_blamed(error, peer),
            call=_encodable(call)[:_LONGEST_NAME],
        )
        self._write(encode_record(report), patience=_FAILURE_PATIENCE)

    def _write(self, line: bytes, *, patience: float = 0.0) -> None:
        descriptor = self._descriptor
        if descriptor is None:
            return
        with self._lock:
            deadline = time.monotonic() + patience
            rest = memoryview(line)
            while rest:
                try:
                    rest = rest[os.write(descriptor, rest) :]
                except BlockingIOError:
                    left = deadline - time.monotonic()
                    if left <= 0.0:
                        return
                    room = select.poll()
                    room.register(descriptor, select.POLLOUT)
                    room.poll(left * 1000)
                except OSError:  # the agent is gone, and with it every reader
                    self._descriptor = None
                    return


_SEEN = "__asyncpar_seen__"


@cache
def process_reporter() -> Reporter:
    """Return the reporter of this process, for code without access to a node."""
    return Reporter.from_environment(os.environ)


def mark_seen(error: BaseException | None) -> None:
    """Record the time at which ``error`` was first seen: leaving a world because of it takes time."""
    if error is not None and not hasattr(error, _SEEN):
        with suppress(Exception):  # a class of the user, which may refuse it
            setattr(error, _SEEN, time.monotonic())


def _first_seen(error: BaseException) -> float:
    times = [seen for each in _chain(error) if isinstance(seen := getattr(each, _SEEN, None), float)]
    return min(times, default=math.inf)


def _blamed(error: BaseException, peer: PeerError | None) -> int | None:
    """Return the rank blamed by ``peer``, or by another error that was being handled when ``error`` was raised."""
    if peer is None:
        peer = next((each for each in _chain(error) if isinstance(each, PeerError)), None)
    return None if peer is None else peer.rank


def _chain(error: BaseException) -> list[BaseException]:
    """Return ``error``, the errors that it was raised from or while handling, and the members of groups."""
    chain: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting and len(chain) < _LONGEST_CHAIN:
        each = waiting.pop()
        if each is None or any(each is known for known in chain):
            continue
        chain.append(each)
        waiting += [each.__context__, each.__cause__]
        waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return chain


def _unwrapped(error: BaseException) -> BaseException:
    """Return the error without the groups of one around it, as task groups raise them."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def find_peer_error(error: BaseException) -> PeerError | None:
    """Return the ``PeerError`` that explains ``error``, None if something else does.

    That is ``error`` itself, the error that it was explicitly raised from, or, in a group, a member, provided that all
    members are explained this way.
    """
    return _find_peer_error(error, ())


def _find_peer_error(error: BaseException, seen: tuple[BaseException, ...]) -> PeerError | None:
    if isinstance(error, PeerError):
        return error
    if len(seen) >= _LONGEST_CHAIN or any(error is earlier for earlier in seen):  # causes may form a cycle
        return None
    seen = (*seen, error)
    if isinstance(error, BaseExceptionGroup):
        members = [_find_peer_error(member, seen) for member in error.exceptions]
        return None if None in members else members[0]
    return None if error.__cause__ is None else _find_peer_error(error.__cause__, seen)


def record_failures(reporter: Reporter) -> None:
    """Report the exception that ends the main thread to ``reporter``, then let the previous hook show it.

    A hook of ours that is already installed stays.
    """
    if not isinstance(sys.excepthook, _FailureHook):
        sys.excepthook = _FailureHook(reporter, sys.excepthook)


class _FailureHook:
    """A ``sys.excepthook`` that reports an exception before the ``previous`` one shows it."""

    def __init__(
        self,
        reporter: Reporter,
        previous: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    ) -> None:
        self._reporter = reporter
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self._reporter.failure(error)
        self._previous(kind, error, where)


_BEAT = encode_record(BeatRecord())


def _cut(value: object) -> str:
    """Return ``value`` as short text without line breaks; floats have four digits."""
    if isinstance(value, Real) and not isinstance(value, Integral):
        with suppress(Exception):  # user code: a number that cannot be converted
            return f"{float(value):.4g}"
    return " ".join(text_of(value).split())[:_LONGEST_VALUE]
