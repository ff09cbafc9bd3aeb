"""Values that JSON preserves exactly.  Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, Final

from asyncpar.errors import UsageError

_DEEPEST: Final = 64


def plain(value: object, where: str, *, depth: int = 0) -> Any:
    """Return a copy of ``value`` as JSON returns it: tuples become lists, everything else is unchanged.

    Integers may be of any size (as in the states of generators).  Raises ``UsageError`` naming the place of anything
    that JSON would not preserve: NaN, keys that are not strings, arrays, objects.
    """
    if depth > _DEEPEST:
        raise UsageError(f"{where}: expected values nested at most {_DEEPEST} deep")
    match value:
        case None | bool() | str():
            return str(value) if isinstance(value, str) else value
        case int():
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case list() | tuple():
            return [plain(item, f"{where}[{index}]", depth=depth + 1) for index, item in enumerate(value)]
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise UsageError(f"{where}: expected texts as keys, got {key!r:.80}")
            return {str(key): plain(item, f"{where}.{key}", depth=depth + 1) for key, item in value.items()}
    raise UsageError(
        f"{where}: expected what JSON keeps exactly (finite numbers, texts, lists, dicts), got {value!r:.80}"
    )


def plain_dict(value: object, where: str) -> dict[str, Any]:
    """Return a copy of the dict ``value``; see ``plain``."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: expected a dict, got {value!r:.80}")
    copied: dict[str, Any] = plain(value, where)
    return copied


def encode_plain(value: object) -> bytes:
    """Return the canonical text of a plain value: equal values have equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode_plain(content: bytes) -> Any:
    """Return the value of a text.  Raises ``ValueError`` for an invalid text."""
    try:
        return json.loads(content, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def digest_of(content: bytes | memoryview) -> str:
    """Return the SHA-256 of ``content`` in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def first_difference(left: object, right: object, where: str, sides: tuple[str, str]) -> str | None:
    """Describe the first difference of two plain values, and the value of each of the two ``sides``; None if equal."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            place = f"{where}.{key}"
            if key not in left or key not in right:
                absent, present = (0, right) if key not in left else (1, left)
                return f"{place} is {present[key]!r:.80} for {sides[1 - absent]}, and {sides[absent]} has none"
            found = first_difference(left[key], right[key], place, sides)
            if found is not None:
                return found
        return None
    if encode_plain(left) == encode_plain(right):
        return None
    return f"{where} is {left!r:.80} for {sides[0]}, and {right!r:.80} for {sides[1]}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a finite number")
