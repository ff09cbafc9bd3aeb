"""What an exception says, as text that can travel, whatever user code made of the exception."""

from __future__ import annotations

from typing import Final

from asyncpar.observe.error_text import text_of
from asyncpar.wire.array import type_name

MAX_TEXT: Final = 64 * 1024
"""Most characters of a message or traceback that travel."""
_BRIEF: Final = 1000


def error_text(error: BaseException) -> str:
    """Return what ``error`` says, fit to be sent."""
    return sendable(text_of(error))


def sendable(text: str) -> str:
    """Make ``text`` encodable and keep it within ``MAX_TEXT``: the end of a traceback says most."""
    if len(text) > MAX_TEXT:
        text = "..." + text[-MAX_TEXT:]
    return text.encode("utf-8", "backslashreplace").decode()


def brief(error: BaseException | None) -> str:
    """Return type and text of ``error``, short enough to be said to everyone who waits."""
    if error is None:
        return "for no reason that is known"
    text = error_text(error)
    return f"{type_name(type(error))}: {text if len(text) <= _BRIEF else text[:_BRIEF] + '...'}"
