"""Recognition of stream annotations, and marks of streams among the arguments of a call.

A stream argument travels as three bytes: a msgpack extension of one byte, the number of the stream within its call.
Its items follow in messages of their own.
"""

from __future__ import annotations

import collections.abc
from collections.abc import AsyncIterable
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec

from asyncpar.actors.runtime.ref import STREAM
from asyncpar.errors import UsageError

MAX_STREAMS: Final = 64
"""Maximum number of stream arguments of one call."""

_MARK: Final = bytes([0xD4, STREAM])
_INCOMING: Final = (collections.abc.AsyncIterator, collections.abc.AsyncIterable)
_OUTGOING: Final = (*_INCOMING, collections.abc.AsyncGenerator)


class StreamType(NamedTuple):
    """A stream in an annotation: type of its items, and whether None may be passed in its place."""

    item: Any
    is_optional: bool


def incoming(annotation: Any) -> StreamType | None:
    """Parse a parameter's annotation; return None if the parameter is no stream.

    Raises ``UsageError`` for an ``AsyncGenerator``, which cannot be a parameter.
    """
    found = _stream(annotation, _OUTGOING)
    if found is not None and _stream(annotation, _INCOMING) is None:
        raise UsageError(f"expected AsyncIterator[...] or AsyncIterable[...] for a stream, got {annotation}")
    return found


def outgoing(annotation: Any) -> StreamType | None:
    """Parse the annotation of a result; return None if it is no stream."""
    return _stream(annotation, _OUTGOING)


def is_stream(value: object) -> bool:
    """Whether this argument is a stream."""
    return hasattr(type(value), "__aiter__")


def find_stream(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> int | str | None:
    """Return the place, from 1 on, or the name of the first argument that is a stream; None if there is none."""
    for place, value in enumerate(arguments, start=1):
        if is_stream(value):
            return place
    return next((name for name, value in keywords.items() if is_stream(value)), None)


def take_streams(
    endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[str, AsyncIterable[Any]]]]:
    """Return the arguments with marks in place of streams, and the streams with their names for error texts."""
    sources: list[tuple[str, AsyncIterable[Any]]] = []

    def mark(value: Any, what: str) -> Any:
        if not is_stream(value):
            return value
        if any(value is other for _, other in sources):
            raise UsageError(f"{what}: is the same stream as another argument")
        if len(sources) == MAX_STREAMS:
            raise UsageError(f"{what}: a call takes at most {MAX_STREAMS} streams")
        sources.append((what, value))
        return msgspec.Raw(_MARK + bytes([len(sources) - 1]))

    marked = tuple(mark(value, f"argument {place} of {endpoint}()") for place, value in enumerate(arguments, start=1))
    named = {name: mark(value, f"argument {name!r} of {endpoint}()") for name, value in keywords.items()}
    return marked, named, sources


def stream_number(argument: msgspec.Raw) -> int | None:
    """Return the number of the stream that ``argument`` stands for; None if it is no stream."""
    view = memoryview(argument)
    if len(view) != 3 or view[:2] != _MARK:
        return None
    number: int = view[2]
    return number


def _stream(annotation: Any, kinds: tuple[type[Any], ...]) -> StreamType | None:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _stream(get_args(annotation)[0], kinds)
    if origin in (Union, UnionType):
        inner = [item for item in get_args(annotation) if item is not NoneType]
        found = _stream(inner[0], kinds) if len(inner) == 1 else None
        return None if found is None else StreamType(found.item, True)
    if annotation in kinds or origin in kinds:
        item = next(iter(get_args(annotation)), Any)
        return StreamType(Any if isinstance(item, TypeVar) else item, False)
    return None
