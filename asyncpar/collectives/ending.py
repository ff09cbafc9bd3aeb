"""How operations end badly: who is told, and what the caller gets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from asyncpar.collectives.causes import reason_of
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.protocol import Reason
from asyncpar.core.observe.reporting import text_of
from asyncpar.errors import OperationMismatch, PeerError, PeerLost


@dataclass(slots=True)
class Why:
    """Why the operations of a block are cancelled: ``text``, and the ``rank`` of the world whose fault it is."""

    text: str = ""
    rank: int | None = None

    def take(self, error: BaseException) -> None:
        """Operations that are cancelled from now on are because of ``error``."""
        if self.text or isinstance(error, asyncio.CancelledError | GeneratorExit | BaseExceptionGroup):
            return
        if isinstance(error, PeerError):
            self.text, self.rank = error.cause or text_of(error), error.rank
        else:
            self.text = f"{type(error).__name__}: {text_of(error)}"


_WHY: ContextVar[Why | None] = ContextVar("why operations are cancelled", default=None)


@contextmanager
def telling_why() -> Iterator[Why]:
    """Tell other ranks what ``Why`` has taken, when operations of the block or of its tasks are cancelled."""
    why, before = Why(), _WHY.get()
    _WHY.set(why)
    try:
        yield why
    finally:
        _WHY.set(before)  # and not reset: a generator may be closed in another context


def ended(operation: Operation, error: BaseException) -> BaseException:
    """Clean up after ``error``, tell the others if they cannot know, and return what the caller gets."""
    if isinstance(error, GeneratorExit) and not operation.context.loop.is_running():
        return error  # the loop has ended under the call; there is nobody left to tell
    if operation.failure is not None and not isinstance(error, asyncio.CancelledError):
        operation.discard()
        return operation.failure
    if isinstance(error, asyncio.CancelledError):
        now, why = operation.context.now(), operation.why_cancelled or reason_of(error)
        message, culprit = operation.describe_wait(now), operation.find_culprit(now)
        error.args = (message,)
        error.add_note(message)
        missing = operation.waits_for() if culprit is None else [culprit.rank]
        error.missing_ranks = missing  # type: ignore[attr-defined]  # for who turns it into PeerTimeout
        if operation.failure is None:
            told = _WHY.get()
            if told is not None and told.text:
                operation.tell_failure("failed", told.text, lost=told.rank)
            else:
                operation.tell_failure("cancelled", why)
    elif isinstance(error, OperationMismatch):
        operation.tell_failure("mismatch", f"{operation.label}: {error}")
    elif isinstance(error, PeerLost):
        operation.tell_failure("lost", error.cause or str(error), lost=error.rank)
        operation.discard()
        return operation.lost(error)
    elif isinstance(error, GeneratorExit):
        operation.tell_failure("failed", "GeneratorExit: the call was closed")
    else:
        operation.tell_failure("failed", reason_of(error))
    operation.discard()
    return error


def give_up(operation: Operation, error: BaseException | None = None) -> None:
    """Nobody will await the call, because of ``error`` perhaps.  From any thread."""
    loop = operation.context.loop
    if not operation.has_started and not operation.is_over and not loop.is_closed():
        loop.call_soon_threadsafe(_give_up_now, operation, error)


def _give_up_now(operation: Operation, error: BaseException | None) -> None:
    """A call was never awaited: its peers must not wait for it."""
    if operation.has_started or operation.is_over:
        return
    told = _WHY.get()  # that of the code that gave up: the loop runs this in a copy of its context
    if told is not None and told.text:
        operation.tell_failure("failed", told.text, lost=told.rank)
    elif error is None:
        operation.tell_failure("failed", "it was called there, but never awaited")
    else:
        reason: Reason = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
        operation.tell_failure(reason, f"{reason_of(error)}, before it began")
    operation.discard()


def refuse(operation: Operation, error: BaseException) -> None:
    """The caller of ``operation`` gets ``error`` instead of a call: it ends on the others, too."""
    operation.tell_failure("refused", text_of(error) or type(error).__name__)
    operation.discard()


def thrown(error: tuple[Any, ...]) -> BaseException | None:
    """Return the exception of the arguments of ``throw``, None if there is only its type."""
    return next((part for part in error if isinstance(part, BaseException)), None)
