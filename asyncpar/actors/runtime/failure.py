"""Errors of actors in messages: type, text and traceback.  No code is sent."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from asyncpar.actors.runtime import message
from asyncpar.core.observe.reporting import text_of, traceback_of
from asyncpar.errors import (
    ActorDown,
    AsyncparError,
    MailboxFull,
    NotFound,
    PeerLost,
    PeerTimeout,
    RemoteError,
    UsageError,
)
from asyncpar.net.wire import payload
from asyncpar.net.wire.array import type_name

MAX_TEXT: Final = 64 * 1024
"""Maximum number of characters of a message or traceback that are sent."""
_BRIEF: Final = 1000


def error_text(error: BaseException) -> str:
    """Return the text of ``error``, fit to be sent."""
    return sendable(text_of(error))


def sendable(text: str) -> str:
    """Make ``text`` encodable and keep it within ``MAX_TEXT``: the end of a traceback is the most useful."""
    if len(text) > MAX_TEXT:
        text = "..." + text[-MAX_TEXT:]
    return text.encode("utf-8", "backslashreplace").decode()


def brief(error: BaseException | None) -> str:
    """Return type and text of ``error``, short enough to be sent to everyone who waits."""
    if error is None:
        return "for no reason that is known"
    text = error_text(error)
    return f"{type_name(type(error))}: {text if len(text) <= _BRIEF else text[:_BRIEF] + '...'}"


_OWN: Final = [
    "call_streams",
    "calls",
    "cell",
    "executor",
    "lifecycle",
    "mailbox",
    "outbound",
    "stream_ends",
]
_OWN_FILES: Final = frozenset({payload.__file__, *(str(Path(__file__).parent / f"{name}.py") for name in _OWN)})


class FailureText(NamedTuple):
    """Text, type and traceback of an exception."""

    text: str
    type_name: str
    traceback: str


def describe_error(error: BaseException) -> FailureText:
    """Return ``error`` as text; its traceback begins in the user's code."""
    begin_in_user_code(error)
    return FailureText(error_text(error), sendable(type_name(type(error))), sendable(traceback_of(error)))


def begin_in_user_code(error: BaseException) -> None:
    """Remove the frames above the user's code from the traceback of ``error``."""
    BaseException.with_traceback(error, _skip_own(error.__traceback__))  # attributes of an exception may be frozen


def describe_failure(call: int, error: BaseException) -> message.FailureMessage:
    """Describe the failure of ``call`` by the exception of an endpoint."""
    return message.FailureMessage(call, message.RAISED, *describe_error(error))


def describe_unsendable(call: int, error: Exception, what: str = "") -> message.FailureMessage:
    """Describe the failure of ``call`` by a result, called ``what``, that cannot be sent; without our own stack."""
    text = f"{what}: {error_text(error)}" if what else error_text(error)
    return message.FailureMessage(call, message.RAISED, text, type_name(type(error)), "")


def _skip_own(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
        frames = frames.tb_next
    return frames


def lost_during(error: PeerLost, operation: str) -> PeerLost:
    """Return ``error`` for one operation that it ended."""
    text = f"{operation}: {error}"
    return type(error)(text, rank=error.rank, host=error.host, operation=operation, cause=error.cause)


def error_of(failure: message.FailureMessage, rank: int, operation: str) -> AsyncparError:
    """Return the error that a caller must raise for ``failure``."""
    text = f"rank {rank}: {operation}: {failure.text}"
    match failure.reason:
        case message.USAGE:
            return UsageError(f"{operation}: {failure.text}")
        case message.ABSENT:
            return NotFound(f"{operation}: {failure.text}")
        case message.STOPPED:
            return ActorDown(text, rank=rank, operation=operation)
        case message.FULL:
            return MailboxFull(text, rank=rank, operation=operation)
        case message.DEADLINE:
            return PeerTimeout(text, rank=rank, operation=operation)
        case message.CLOSED:
            return PeerLost(text, rank=rank, operation=operation, cause=failure.text)
        case _:
            return RemoteError(failure.text, rank=rank, type_name=failure.type_name, remote_traceback=failure.traceback)
