"""Reasons, as text for other ranks, why an operation was cancelled or failed.

Theory of operation.  A task that is cancelled does not learn the cause: a deadline, a task group whose other task has
failed, or a call of ``cancel``.  But ``Task.cancel`` cancels what the task waits for at once, so that the canceller is
on the stack at that moment.  ``Cancellable`` in ``operation.py`` stands between a task and the future that it waits
for, and calls ``why_cancelled``, which inspects the stack.  A canceller that it does not recognize is reported as a
``CancelledError``, with its message.
"""

from __future__ import annotations

import asyncio
import sys
from types import CodeType, FrameType
from typing import Final

from asyncpar.core.observe.reporting import text_of

DEADLINE_PASSED: Final = "TimeoutError: its deadline has passed"
"""The cause of a cancellation by ``asyncio.timeout`` or ``asyncio.wait_for``."""

_MAX_DEPTH: Final = 60


def reason_of(error: BaseException) -> str:
    """Return type and text of ``error``, or of the exception that is its message if it is a cancellation with one."""
    if isinstance(error, asyncio.CancelledError) and error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def why_cancelled(message: object) -> str:
    """Return the cause, from the stack of the code that cancels the task: the caller is the task's awaitable."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MAX_DEPTH):
        if frame is None:
            break
        explain = _EXPLANATIONS.get(frame.f_code)
        found = None if explain is None else explain(frame)
        if found is not None:
            return found
        frame = frame.f_back
    return reason_of(asyncio.CancelledError() if message is None else asyncio.CancelledError(message))


def _deadline(_: FrameType) -> str | None:
    return DEADLINE_PASSED


def _wait_for(frame: FrameType) -> str | None:
    """Python 3.11 only: later ones use a ``Timeout``."""
    waiter = frame.f_locals.get("waiter")
    is_due = isinstance(waiter, asyncio.Future) and waiter.done() and not waiter.cancelled()
    return _deadline(frame) if is_due else None


def _task_group(frame: FrameType) -> str | None:
    errors = getattr(frame.f_locals.get("self"), "_errors", None)
    return f"CancelledError: another task of its group has failed: {reason_of(errors[0])}" if errors else None


def _interrupt(_: FrameType) -> str | None:
    return "KeyboardInterrupt"


def _code_of(owner: object, name: str) -> CodeType | None:
    return getattr(getattr(owner, name, None), "__code__", None)


_EXPLANATIONS: Final = {
    code: explain
    for code, explain in (
        (_code_of(asyncio.Timeout, "_on_timeout"), _deadline),
        (_code_of(asyncio, "wait_for"), _wait_for),
        (_code_of(asyncio.TaskGroup, "_abort"), _task_group),
        (_code_of(asyncio.Runner, "_on_sigint"), _interrupt),
    )
    if code is not None
}
"""Explanations by functions of asyncio that cancel tasks."""
