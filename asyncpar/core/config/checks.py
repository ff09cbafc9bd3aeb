"""Checks of single settings, and default values that are distinguishable from equal values set by a user.  Pure."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TypeVar

from asyncpar.errors import UsageError

Choice = TypeVar("Choice", bound=StrEnum)


class DefaultInt(int):
    """A default value: equal to a number that a user sets, but recognizable as a default, even copied or pickled."""


class DefaultFloat(float):
    """See ``DefaultInt``."""


def is_default(value: object) -> bool:
    """Return whether ``value`` was left at its default, which is a ``DefaultInt`` or ``DefaultFloat``."""
    return isinstance(value, DefaultInt | DefaultFloat)


def check_count(name: str, value: object, *, least: int = 1) -> int:
    """Return ``value`` if it is a whole number of at least ``least``; raise ``UsageError`` naming it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name}: expected a whole number, got {value!r}")
    if value < least:
        wanted = "a positive number" if least == 1 else f"{least} or more"
        raise UsageError(f"{name}: expected {wanted}, got {value}")
    return value


def check_positive(name: str, value: object, unit: str) -> float:
    """Return ``value`` if it is a finite number above 0; raise ``UsageError`` naming it and ``unit`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise UsageError(f"{name}: expected a positive number of {unit}, got {value!r}")
    return value


def check_choice(name: str, kind: type[Choice], value: object) -> Choice:
    """Return the member of ``kind`` that ``value`` is or spells; otherwise raise ``UsageError`` that lists them."""
    if not isinstance(value, str) or value not in list(kind):
        raise UsageError(f"{name}: expected one of {', '.join(kind)}, got {value!r}")
    return kind(value)
