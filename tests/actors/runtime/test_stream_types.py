"""Annotations of streams, and endpoints that cannot have them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Annotated, Any, Optional, TypeVar

import msgspec
import numpy as np
import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.stream_types import (
    MAX_STREAMS,
    StreamType,
    find_stream,
    incoming,
    outgoing,
    stream_number,
    take_streams,
)
from asyncpar.errors import UsageError

T = TypeVar("T")


async def numbers() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (AsyncIterator[int], StreamType(int, False)),
        (AsyncIterable[np.ndarray], StreamType(np.ndarray, False)),
        (AsyncIterator, StreamType(Any, False)),
        (AsyncIterator[T], StreamType(Any, False)),  # type: ignore[valid-type]
        (AsyncIterator[int] | None, StreamType(int, True)),
        (Optional[AsyncIterable[int]], StreamType(int, True)),  # noqa: UP045
        (Annotated[AsyncIterator[int], "note"], StreamType(int, False)),
        (AsyncIterator[int] | int | None, None),
        (list[int], None),
        (Any, None),
        (int, None),
    ],
    ids=str,
)
def test_the_annotation_says_what_is_a_stream(annotation: Any, expected: StreamType | None) -> None:
    assert incoming(annotation) == expected
    assert outgoing(annotation) == expected


def test_only_a_result_can_be_a_generator() -> None:
    assert outgoing(AsyncGenerator[int, None]) == StreamType(int, False)
    with pytest.raises(UsageError, match=r"expected AsyncIterator\[...\] or AsyncIterable\[...\] for a stream"):
        incoming(AsyncGenerator[int, None])


def test_streams_are_taken_out_of_the_arguments_and_found_by_number() -> None:
    first, second = numbers(), numbers()
    arguments, keywords, sources = take_streams("f", (1, first), {"name": second, "other": "x"})
    assert (arguments[0], keywords["other"]) == (1, "x")
    assert [stream_number(msgspec.Raw(arguments[1])), stream_number(msgspec.Raw(keywords["name"]))] == [0, 1]
    assert sources == [("argument 2 of f()", first), ("argument 'name' of f()", second)]
    assert [find_stream((1, first), {}), find_stream((), {"a": 1, "name": second}), find_stream((1,), {"a": 2})] == [
        2,
        "name",
        None,
    ]


@pytest.mark.parametrize("value", [5, "abc", b"\x11\x00", [0], msgspec.msgpack.Ext(16, b"\0"), None])
def test_other_arguments_have_no_number(value: object) -> None:
    assert stream_number(msgspec.Raw(msgspec.msgpack.encode(value))) is None


def test_a_call_takes_a_limited_number_of_streams() -> None:
    with pytest.raises(UsageError, match=rf"argument {MAX_STREAMS + 1} of f\(\): a call takes at most {MAX_STREAMS}"):
        take_streams("f", tuple(numbers() for _ in range(MAX_STREAMS + 1)), {})


class Threaded(Actor):
    @endpoint
    def read(self, items: AsyncIterator[int]) -> int:
        return 0


class Generating(Actor):
    @endpoint
    async def read(self, items: AsyncGenerator[int, None]) -> int:
        return 0


class Misnamed(Actor):
    @endpoint
    async def items(self) -> int:  # type: ignore[misc]
        yield 1


class Returning(Actor):
    @endpoint
    async def items(self) -> AsyncIterator[int]:
        return numbers()


@pytest.mark.parametrize(
    ("actor_class", "text"),
    [
        (Threaded, "Threaded.read: argument 'items' .* a stream can only be read by async def"),
        (Generating, r"Generating.read: argument 'items' .* expected AsyncIterator\[...\] or AsyncIterable"),
        (Misnamed, r"Misnamed.items: it yields; expected AsyncIterator\[...\] as its result, got <class 'int'>"),
        (Returning, r"Returning.items: it is to return .*AsyncIterator\[int\], but does not yield"),
    ],
)
async def test_what_cannot_stream_is_refused_when_the_actor_is_spawned(
    open_ranks: Any, actor_class: type[Actor], text: str
) -> None:
    async with open_ranks(1) as ranks:
        with pytest.raises(UsageError, match=text):
            await ranks.systems[0].spawn(actor_class)
