"""An exception as text that can travel: what kind, what it said, where it was raised.  Never code."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Final, NamedTuple

from asyncpar.runtime import cell, execution, handler, message, side, stream_out, stream_served, thread
from asyncpar.wire.array import type_name

MAX_TEXT: Final = 64 * 1024
"""Most characters of a message or traceback that travel."""

_OWN_FILES: Final = frozenset(
    module.__file__ for module in (cell, execution, handler, side, stream_out, stream_served, thread)
)


class FailureText(NamedTuple):
    """What can be said of an exception."""

    text: str
    type_name: str
    traceback: str


def describe_error(error: BaseException) -> FailureText:
    """Return ``error`` as text; its traceback begins in the user's code."""
    error.__traceback__ = _skip_own(error.__traceback__)
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return FailureText(_clean(_text(error)), _clean(type_name(type(error))), _clean("".join(lines)))


def describe_failure(call: int, error: BaseException) -> message.Failure:
    """Return the failure of ``call`` for what an endpoint raised."""
    return message.Failure(call, message.RAISED, *describe_error(error))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # user code: an exception that cannot even be printed
        return f"<its text cannot be made: {type(failure).__name__}>"


def _clean(text: str) -> str:
    """Make ``text`` encodable and keep it within ``MAX_TEXT``: the end of a traceback says most."""
    if len(text) > MAX_TEXT:
        text = "..." + text[-MAX_TEXT:]
    return text.encode("utf-8", "backslashreplace").decode()


def _skip_own(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
        frames = frames.tb_next
    return frames
