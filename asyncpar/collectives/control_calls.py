"""Calls of this rank that machines behind control frames answer: their futures, their frames, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Generic, TypeVar

from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.net.transport.links import Links
from asyncpar.net.wire.frame import FrameKind, Key

T = TypeVar("T")

Place = tuple[int, int]
"""Number of a group or series, and number of the operation in it."""


class ControlCalls(Generic[T]):
    """The calls that wait, by place; frames of ``kind`` go between the machines of the ranks of a place."""

    def __init__(self, links: Links, kind: FrameKind) -> None:
        self._links = links
        self._kind = kind
        self._waiting: dict[Place, asyncio.Future[T]] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self._waiting

    def __iter__(self) -> Iterator[Place]:
        """Iterate over the places with waiting calls."""
        return iter(tuple(self._waiting))

    def open(self, place: Place) -> asyncio.Future[T]:
        """Return the future that receives the result of the call of ``place``, or its error."""
        future = self._waiting[place] = asyncio.get_running_loop().create_future()
        return future

    def settle(self, place: Place, result: T) -> None:
        """Complete the call of ``place`` with ``result``, if it waits."""
        future = self._waiting.pop(place, None)
        if future is not None and not future.done():
            future.set_result(result)

    def fail(self, place: Place, error: Exception) -> None:
        """End the call of ``place`` with ``error``, if it waits."""
        future = self._waiting.pop(place, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def leave(self, place: Place) -> None:
        """Stop waiting for ``place``."""
        self._waiting.pop(place, None)

    def close(self, error: PeerLost) -> None:
        """End all calls with ``error``, which nobody may await: this rank leaves."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()

    def send(self, rank: int, place: Place, content: bytes) -> None:
        """Send the machine of ``rank`` a message about ``place``."""
        self._links.control(rank, self._kind, Key(*place, 0), content)

    def check_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        """Raise ``ProtocolError`` unless a frame of ``rank`` may be about a new place of ``ranks``."""
        if not {rank, self._links.rank} <= set(ranks) or len(set(ranks)) != len(ranks):
            raise ProtocolError(f"{self._kind.name} frame: ranks {rank} and {self._links.rank} are not among {ranks}")
