"""Bytes that lie in several places and travel as one payload."""

from __future__ import annotations

from collections.abc import Iterable


class Segments:
    """Views on bytes (contiguous, format ``B``), read one after the other as if they were one.

    Behaves like a memoryview where lanes need it: length, slices, ``bytes``.  Nothing is copied but by ``bytes`` and
    ``copy_into``.
    """

    __slots__ = ("_length", "views")

    def __init__(self, views: Iterable[memoryview]) -> None:
        self.views = tuple(view for view in views if len(view))
        self._length = sum(map(len, self.views))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: slice) -> Segments:
        start, stop, step = place.indices(self._length)
        assert step == 1, "segments are cut, not picked apart"
        views: list[memoryview] = []
        for view in self.views:
            if stop <= 0:
                break
            if start < len(view):
                views.append(view[max(start, 0) : stop])
            start -= len(view)
            stop -= len(view)
        return Segments(views)

    def __bytes__(self) -> bytes:
        return b"".join(self.views)

    def copy_into(self, memory: memoryview) -> None:
        """Write all bytes into ``memory``, which has as many."""
        place = 0
        for view in self.views:
            memory[place : place + len(view)] = view
            place += len(view)


Payload = memoryview | Segments
"""What a frame carries: bytes in one place, or in several."""


def views_of(payload: Payload) -> tuple[memoryview, ...]:
    """Return the contiguous pieces of ``payload``, in order."""
    return (payload,) if isinstance(payload, memoryview) else payload.views


def write_payload(payload: Payload, memory: memoryview) -> None:
    """Copy ``payload`` into ``memory``, which has as many bytes."""
    if isinstance(payload, memoryview):
        memory[:] = payload
    else:
        payload.copy_into(memory)
