"""All-reduce in shared memory.

Short payloads are published as a whole and combined by every rank, in one wait (``programs.combine_all``).  In longer
ones each rank combines a slice of every chunk, and copies the others' slices (``reduce_slices``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from asyncpar.collectives.arrays import Array, Combine, Reduction, contiguous
from asyncpar.collectives.parts import TakePart
from asyncpar.collectives.shared_memory import programs
from asyncpar.collectives.shared_memory.call import MakeProgram
from asyncpar.collectives.shared_memory.programs import FinishInPlace
from asyncpar.net.arena.channel import Channel, Turn
from asyncpar.net.arena.run_queue import Program

_ALIGNMENT: Final = 64

AT_ONCE_BYTES = 512 << 10
"""Maximum number of bytes that ranks read from the others in all-reduces with a single wait."""


CHUNK_BYTES = 1 << 20
"""Size of the chunks of larger all-reduces, which stay in the cache between the two waits."""

_READ_AFTER: Final = 2
"""A rank that copies out a chunk knows that all others have copied out the chunk this many before it."""


def is_at_once(payload: int, channel: Channel) -> bool:
    """Return whether an all-reduce of ``payload`` bytes takes a single wait."""
    return payload <= min(AT_ONCE_BYTES // (channel.size - 1), channel.slot_bytes)


def all_reduce_program(source: Array, target: Array, reduction: Reduction, take: TakePart | None = None) -> MakeProgram:
    """Return the program; ``take`` receives finished parts of the result, and writes them to ``target``."""

    def make(turn: Turn) -> Program:
        size = turn.channel.size
        finish = (lambda result: reduction.finish(result, size)) if reduction.divides else None
        if is_at_once(source.nbytes, turn.channel):
            work = target if target.flags.c_contiguous else contiguous(target)
            flat = contiguous(source).reshape(-1)
            if reduction.scales:
                reduction.load(source, work, size)
                flat = work.reshape(-1)
            yield from programs.combine_all(turn, flat, work.reshape(-1), reduction.combine, finish)
            if take is not None:
                take(work.reshape(-1), 0, work.size)
        else:
            reduction.load(source, target, size)
            work = contiguous(target)
            most = CHUNK_BYTES // source.itemsize
            chunks = _ArrayChunks(turn, work.reshape(-1), most, reduction.combine, finish, take)
            yield from reduce_slices(turn, chunks)
            chunks.hand_over(chunks.last)
        if work is not target and take is None:
            target[...] = work

    return make


class Chunks(ABC):
    """The payload of ``reduce_slices``, in chunks numbered from 0 to ``last``.

    Every rank has the same chunks.  Each chunk consists of a slice per rank, which that rank combines.
    """

    last: int

    @abstractmethod
    def publish(self, chunk: int) -> None:
        """Copy the slices that others combine into this rank's slot."""

    @abstractmethod
    def begin_reading(self) -> None:
        """Begin to read: all ranks have published their first chunk."""

    @abstractmethod
    def combine(self, chunk: int) -> None:
        """Combine this rank's slice of all ranks, and leave the result in this rank's slot."""

    @abstractmethod
    def copy_out(self, chunk: int) -> None:
        """Copy the slices that the others have combined."""


def reduce_slices(turn: Turn, chunks: Chunks) -> Program:
    """All-reduce ``chunks``: each rank combines its slice of every chunk, and copies the slices of the others.

    ``2 (size - 1) / size`` of the payload moves between caches, as in a ring.  A chunk is published (its slices that
    others combine), combined (this rank's own slice) and copied out, in that order on each rank; chunk ``c + 1`` is
    published before chunk ``c`` is combined, and ``c`` combined before ``c - 1`` is copied out, so that ranks seldom
    wait for each other.  The slot has room for three chunks, of which chunk ``c`` uses number ``c % 3`` (or for one, if
    there is only one chunk).  Nothing is overwritten that is still read:

    - Slices published for ``c + 1`` replace those of ``c - 2``, which every rank has combined: this rank waited for
      that before it copied ``c - 2`` out.
    - The combined slice of ``c`` replaces that of ``c - 3``, which every rank has copied out before it published ``c``:
      this rank waited for that before it combines ``c``.
    - The slice of each rank lies at the same place in every chunk, the last and shorter one included.
    """
    others, last = turn.channel.others, chunks.last
    chunks.publish(0)
    turn.post(1)
    yield others, 1
    chunks.begin_reading()
    for chunk in range(last + 1):
        if chunk < last:
            chunks.publish(chunk + 1)
            turn.post(2 * chunk + 2)
        if chunk > 0:
            yield others, 2 * chunk
        chunks.combine(chunk)
        turn.post(2 * chunk + 3)
        if chunk > 0:
            yield others, 2 * chunk + 1
            chunks.copy_out(chunk - 1)
    yield others, 2 * last + 3
    chunks.copy_out(last)
    if turn.uses_heaps:
        yield from programs.release_heaps(turn, 2 * last + 4)


class _Third(msgspec.Struct, frozen=True):
    """Views of the parts of a chunk in one third of the slots; bounds are in elements from the start of the chunk."""

    published: tuple[tuple[int, int, Array], ...]
    """The parts that others combine: bounds, and the view of this rank's slot."""
    own: tuple[int, int]
    """The bounds of the part that this rank combines."""
    inputs: tuple[Array, ...]
    """That part as published by every rank; at this rank's place, the memory of the result."""
    results: tuple[tuple[int, int, int, Array], ...]
    """The parts that others have combined: their place, bounds, and the view of their slot."""


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


class _ArrayChunks(Chunks):
    """The chunks of the flat array ``x``, which is reduced in place; each has at most ``most`` elements.

    ``take`` receives each chunk that this rank has copied out, and that no rank reads any more: in the heap, where
    others read ``x`` itself, that is known two chunks later.
    """

    def __init__(
        self,
        turn: Turn,
        x: Array,
        most: int,
        combine: Combine,
        finish: FinishInPlace | None,
        take: TakePart | None = None,
    ) -> None:
        slot = turn.channel.slot_bytes // 3 // x.itemsize // _ALIGNMENT * _ALIGNMENT
        count = -(-x.size // min(most, slot))
        self.last = count - 1
        self._turn = turn
        self._x = x
        self._combine = combine
        self._finish = finish
        self._take = take
        self._taken = 0
        self._is_in_heap = turn.place_in_heap(turn.channel.place) is not None
        self._heaps: Sequence[int | None] = ()
        self._chunk = -(-x.size // count)
        self._last_chunk = x.size - self.last * self._chunk
        self._found: list[_Third | None] = [None] * 6

    def publish(self, chunk: int) -> None:
        if not self._is_in_heap:
            first = chunk * self._chunk
            for start, stop, slot in self._places(chunk).published:
                slot[...] = self._x[first + start : first + stop]

    def begin_reading(self) -> None:
        self._heaps = self._turn.places_in_heaps()

    def combine(self, chunk: int) -> None:
        places = self._places(chunk)
        turn, place = self._turn, self._turn.channel.place
        first = chunk * self._chunk
        low, high = first + places.own[0], first + places.own[1]
        own = self._x[low:high]
        pieces = [
            piece if where is None else turn.heap_array(other, where, own.dtype, low, high)
            for other, (piece, where) in enumerate(zip(places.inputs, self._heaps, strict=True))
        ]
        mine = places.inputs[place]
        _combine_in_order(pieces, place, own, mine, self._combine)
        if self._finish is not None:
            self._finish(own)
        if not self._is_in_heap:
            mine[...] = own

    def copy_out(self, chunk: int) -> None:
        first = chunk * self._chunk
        turn, x = self._turn, self._x
        for other, start, stop, slot in self._places(chunk).results:
            where = self._heaps[other]
            low, high = first + start, first + stop
            x[low:high] = slot if where is None else turn.heap_array(other, where, x.dtype, low, high)
        if self._take is not None:
            self.hand_over(chunk - _READ_AFTER if self._is_in_heap else chunk)

    def hand_over(self, last: int) -> None:
        """Pass the remaining chunks up to ``last`` to ``take``, unless their content may be wrong."""
        while self._take is not None and self._taken <= last and self._turn.is_intact():
            first = self._taken * self._chunk
            self._take(self._x, first, min(first + self._chunk, self._x.size))
            self._taken += 1

    def _places(self, chunk: int) -> _Third:
        third, is_last = chunk % 3, chunk == self.last
        places = self._found[third + 3 * is_last]
        if places is None:
            length = self._last_chunk if is_last else self._chunk
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
    """Leave ``pieces`` combined in ``own``, which is also the operand at ``place``; ``scratch`` is equally long."""
    total = own if place == 0 else pieces[0]
    for index in range(1, len(pieces)):
        target = own if index >= place else scratch
        combine(total, own if index == place else pieces[index], target)
        total = target
