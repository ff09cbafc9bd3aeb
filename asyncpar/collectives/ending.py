"""How operations end badly: who is told, and what the caller gets."""

from __future__ import annotations

import asyncio

from asyncpar.collectives.operation import Operation
from asyncpar.errors import OperationMismatch, PeerLost


def ended(operation: Operation, error: BaseException) -> BaseException:
    """Clean up after ``error``, tell the others if they cannot know, and return what the caller gets."""
    if isinstance(error, GeneratorExit) and not operation.table.loop.is_running():
        return error  # the loop has ended under the call; there is nobody left to tell
    if operation.failure is not None and not isinstance(error, asyncio.CancelledError):
        operation.discard()
        return operation.failure
    if isinstance(error, asyncio.CancelledError):
        now = operation.table.now()
        message, culprit = operation.describe_wait(now), operation.find_culprit(now)
        error.args = (message,)
        error.add_note(message)
        missing = operation.waits_for() if culprit is None else [culprit.rank]
        error.missing_ranks = missing  # type: ignore[attr-defined]  # for who turns it into PeerTimeout
        if operation.failure is None:
            operation.tell_failure("cancelled", "")
    elif isinstance(error, OperationMismatch):
        operation.tell_failure("mismatch", f"{operation.label}: {error}")
    elif isinstance(error, PeerLost):
        operation.tell_failure("lost", error.cause or str(error), lost=error.rank)
        operation.discard()
        return operation.lost(error)
    else:
        operation.tell_failure("failed", f"{type(error).__name__}: {error}")
    operation.discard()
    return error


def give_up(operation: Operation) -> None:
    """Nobody will await the call.  From any thread."""
    loop = operation.table.loop
    if not operation.has_started and not operation.is_over and not loop.is_closed():
        loop.call_soon_threadsafe(_give_up_now, operation)


def _give_up_now(operation: Operation) -> None:
    """A call was never awaited: its peers must not wait for it."""
    if not operation.has_started and not operation.is_over:
        operation.tell_failure("failed", "it was called there, but never awaited")
        operation.discard()
