"""All-reduce of long arrays in the arena: each rank combines a slice of every chunk; all copy the other slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.collectives.arena_reading import Finish, heap_places, in_heap, let_go
from asyncpar.collectives.arrays import Array, Combine
from asyncpar.net.arena.channel import Channel, Turn
from asyncpar.net.arena.run_queue import Program

_ALIGNMENT = 64


def reduce_slices(turn: Turn, x: Array, most: int, combine: Combine, finish: Finish | None) -> Program:
    """All-reduce ``x`` in place, at most ``most`` elements at a time: each rank combines a slice, all copy the others'.

    ``2 (size - 1) / size`` of the payload crosses between caches, as in a ring.  The slot has room for three chunks.
    A chunk is published (its slices that others combine), combined (this rank's own slice) and copied out, in that
    order on each rank; chunk ``c + 1`` is published before chunk ``c`` is combined, and ``c`` combined before
    ``c - 1`` is copied out, so that ranks seldom wait for each other.  Nothing is overwritten that is still read:

    - Slices published for ``c + 1`` replace those of ``c - 2``, which everyone has combined: that was waited for
      before ``c - 2`` was copied out.
    - The combined slice of ``c`` replaces that of ``c - 3``, which everyone has copied out before publishing ``c``:
      that was waited for before ``c`` is combined.
    - Slices lie at the same places in every chunk, the last and shorter one included.
    """
    channel = turn.channel
    chunks = _Chunks(turn, x, min(most, channel.slot_bytes // 3 // x.itemsize // _ALIGNMENT * _ALIGNMENT))
    others, last = channel.others, chunks.count - 1
    chunks.publish(0)
    turn.post(1)
    yield others, 1
    chunks.find_heaps()
    for chunk in range(chunks.count):
        if chunk < last:
            chunks.publish(chunk + 1)
            turn.post(2 * chunk + 2)
        if chunk > 0:
            yield others, 2 * chunk
        chunks.combine(chunk, combine, finish)
        turn.post(2 * chunk + 3)
        if chunk > 0:
            yield others, 2 * chunk + 1
            chunks.copy_out(chunk - 1)
    yield others, 2 * last + 3
    chunks.copy_out(last)
    yield from let_go(turn, chunks.heap, 2 * last + 4)


@dataclass(frozen=True, slots=True)
class _Third:
    """Where the parts of a chunk lie in one third of the slots; bounds are in elements from the start of the chunk."""

    published: tuple[tuple[int, int, Array], ...]
    """What others combine: bounds, and where it goes in this rank's slot."""
    own: tuple[int, int]
    """What this rank combines."""
    inputs: tuple[Array, ...]
    """What it combines, as every rank has published it; at this rank's place, where the result goes."""
    results: tuple[tuple[int, int, int, Array], ...]
    """What others have combined: their place, bounds, and where it is in their slot."""


def _third(channel: Channel, parity: int, dtype: np.dtype[Any], base: int, width: int, length: int) -> _Third:
    """Return the places of ``length`` elements, in slices of ``width``, in the third that starts at ``base``."""
    slots = channel.whole(parity, dtype)
    place = channel.place
    bounds = [(min(other * width, length), min((other + 1) * width, length)) for other in range(channel.size)]
    low, high = bounds[place]
    return _Third(
        published=tuple(
            (start, stop, slots[place][base + start : base + stop])
            for start, stop in ((0, low), (high, length))
            if start < stop
        ),
        own=(low, high),
        inputs=tuple(slot[base + low : base + high] for slot in slots),
        results=tuple(
            (other, *bounds[other], slots[other][base + bounds[other][0] : base + bounds[other][1]])
            for other in channel.others
            if bounds[other][0] < bounds[other][1]
        ),
    )


class _Chunks:
    """The array of ``reduce_slices``, chunk by chunk."""

    def __init__(self, turn: Turn, x: Array, most: int) -> None:
        channel = turn.channel
        self.count = -(-x.size // most)
        self.heap: list[int | None] = [turn.place_in_heap(place) for place in range(channel.size)]
        self._is_in_heap = self.heap[channel.place] is not None
        self._turn = turn
        self._x = x
        self._chunk = -(-x.size // self.count)
        self._last = x.size - (self.count - 1) * self._chunk
        self._found: list[_Third | None] = [None] * 6

    def find_heaps(self) -> None:
        """Everyone has posted: learn whose input lies in a heap."""
        self.heap = heap_places(self._turn)

    def publish(self, chunk: int) -> None:
        """Copy the slices that others combine into this rank's slot."""
        if not self._is_in_heap:
            first = chunk * self._chunk
            for start, stop, slot in self._places(chunk).published:
                slot[...] = self._x[first + start : first + stop]

    def combine(self, chunk: int, combine: Combine, finish: Finish | None) -> None:
        """Combine this rank's slice of all ranks."""
        places = self._places(chunk)
        place = self._turn.channel.place
        first = chunk * self._chunk
        low, high = first + places.own[0], first + places.own[1]
        own = self._x[low:high]
        pieces = [
            piece if where is None else in_heap(self._turn, other, where, own.dtype, low, high)
            for other, (piece, where) in enumerate(zip(places.inputs, self.heap, strict=True))
        ]
        mine = places.inputs[place]
        _combine_in_order(pieces, place, own, mine, combine)
        if finish is not None:
            finish(own)
        if not self._is_in_heap:
            mine[...] = own

    def copy_out(self, chunk: int) -> None:
        """Copy the slices that the others have combined."""
        first = chunk * self._chunk
        x = self._x
        for other, start, stop, slot in self._places(chunk).results:
            where = self.heap[other]
            low, high = first + start, first + stop
            x[low:high] = slot if where is None else in_heap(self._turn, other, where, x.dtype, low, high)

    def _places(self, chunk: int) -> _Third:
        third, is_last = chunk % 3, chunk == self.count - 1
        places = self._found[third + 3 * is_last]
        if places is None:
            length = self._last if is_last else self._chunk
            key = ("third", self._turn.parity, self._x.dtype, third, self._chunk, length)
            places = self._turn.channel.kept(key, lambda: self._find_places(third, length))
            self._found[third + 3 * is_last] = places
        return places

    def _find_places(self, third: int, length: int) -> _Third:
        channel = self._turn.channel
        base = third * (channel.slot_bytes // self._x.itemsize // 3)
        width = -(-self._chunk // channel.size)
        return _third(channel, self._turn.parity, self._x.dtype, base, width, length)


def _combine_in_order(pieces: Sequence[Array], place: int, own: Array, scratch: Array, combine: Combine) -> None:
    """Leave ``pieces`` combined in ``own``, which is also the operand at ``place``; ``scratch`` is as long."""
    total = own if place == 0 else pieces[0]
    for index in range(1, len(pieces)):
        target = own if index >= place else scratch
        combine(total, own if index == place else pieces[index], target)
        total = target
