"""Exceptions and values of user code as text that can be encoded: never raises, whatever that code does."""

from __future__ import annotations

import traceback

_UNPRINTABLE = (Exception, SystemExit)
"""What the text of a value may raise; RecursionError is one of these."""


def text_of(value: object) -> str:
    """Return ``str(value)``, or what kind of error keeps it from being made."""
    try:
        return _encodable(str(value))
    except _UNPRINTABLE as failure:
        return f"<its text cannot be made: {_kind(failure)}>"


def traceback_of(error: BaseException) -> str:
    """Return ``error`` as Python would show it, or its text and why there is no more."""
    try:
        return _encodable("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    except _UNPRINTABLE as failure:
        return f"{_kind(error)}: {text_of(error)}\n(its traceback cannot be shown: {_kind(failure)})\n"


def _kind(error: BaseException) -> str:
    return _encodable(type(error).__qualname__)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
