"""Plain values as canonical bytes: equal values have equal bytes, which decode to the same types.  Pure."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from asyncpar.errors import ProtocolError, UsageError

_DEEPEST = 32


def encode_plain(value: object, name: str) -> bytes:
    """Encode ``value`` as bytes that do not depend on the order in which dicts were filled.

    Accepts None, booleans, integers of any size, floats (by their bits), text, bytes, small arrays, and lists, tuples
    and dicts of these.  Raises ``UsageError`` for anything else, naming its position, which begins with ``name``: it
    has no digest that would be equal on all ranks.
    """
    return json.dumps(_mark(value, name, 0), separators=(",", ":"), ensure_ascii=True).encode()


def decode_plain(content: bytes) -> Any:
    """Decode the value in ``content``.  Raises ``ProtocolError`` if it is not an encoded value."""
    try:
        return _unmark(json.loads(content))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"plain value: the bytes are damaged: {error}") from error


def _mark(value: object, name: str, depth: int) -> object:
    if depth > _DEEPEST:
        raise UsageError(f"{name}: expected values nested {_DEEPEST} deep at most, or a value that holds itself")
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return ["i", str(value)]
    if type(value) is float:
        return ["f", value.hex()]
    if type(value) is bytes:
        return ["b", value.hex()]
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        kind = "l" if type(value) is list else "t"
        return [kind, [_mark(part, f"{name}[{place}]", depth + 1) for place, part in enumerate(value)]]
    if type(value) is dict:
        pairs = [
            [_mark(key, f"{name} (a key)", depth + 1), _mark(part, f"{name}[{key!r}]", depth + 1)]
            for key, part in value.items()
        ]
        return ["d", sorted(pairs, key=lambda pair: json.dumps(pair[0]))]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        kind = "a" if isinstance(value, np.ndarray) else "s"
        return [kind, array.dtype.newbyteorder("<").str, list(np.shape(value)), _little(array).tobytes().hex()]
    raise UsageError(
        f"{name}: expected plain data (numbers, text, bytes, lists, tuples, dicts), an array, a numpy Generator, or an "
        f"object with state() and restore() or state_dict() and load_state_dict(), got {type(value).__qualname__}; "
        "it could not be compared with that of the other ranks"
    )


def _little(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _unmark(marked: Any) -> Any:
    if not isinstance(marked, list):
        return marked
    kind, content = marked[0], marked[1]
    match kind:
        case "i":
            return int(content)
        case "f":
            return float.fromhex(content)
        case "b":
            return bytes.fromhex(content)
        case "l":
            return [_unmark(part) for part in content]
        case "t":
            return tuple(_unmark(part) for part in content)
        case "d":
            return {_unmark(key): _unmark(part) for key, part in content}
        case "a" | "s":
            array = np.frombuffer(bytes.fromhex(marked[3]), np.dtype(content)).reshape(marked[2])
            array = array.astype(array.dtype.newbyteorder("="))
            return array if kind == "a" else array[()]
    raise ValueError(f"unknown kind {kind!r}")
