"""What the collectives do in the arena: generators that copy, combine, post, and yield whom they wait for.

Theory of operation.  A program owns its rank's slot of the turn (see ``arena.channel``).  A payload that does not fit
travels in chunks.  Every program says why nobody overwrites what another rank still reads:

- *Published once* (``combine_all``, ``barrier``): the slot is written once per turn, and the channel guards turns.
- *Streams* (``exchange``, ``hand_out``, ``take_in``): the slot has two halves; chunk ``c`` uses half ``c & 1``.  A rank
  that writes chunk ``c`` knows that everyone who reads has read chunk ``c - 2``: in ``hand_out`` it waits for that; in
  ``exchange``, where all write and read, it has waited for everyone's chunk ``c - 1``, posted after reading ``c - 2``.
- *In two phases* (``reduce_slices``): see there.

Inputs that lie in the heap of the arena (``Node.empty``) are not copied: the others read them where they are.  Then the
owner waits at the end until everyone has read; and whoever has read makes sure, before it calls its result a result,
that the owner had not given the memory back in between (``Turn.is_intact``).

Sums are made in the order of ranks, each element by one rank or by all in the same way: so they are the same bits on
every rank, and the bits that the message algorithms with that order produce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.arena.channel import Turn
from asyncpar.arena.driver import Program
from asyncpar.collectives.reduction import Array, Combine

Finish = Callable[[Array], None]
"""Turns combined values into the result, in place."""


def barrier(turn: Turn) -> Program:
    """Wait until everyone is here."""
    turn.post(1)
    yield turn.channel.others, 1


def combine_all(turn: Turn, source: Array, target: Array, combine: Combine, finish: Finish | None) -> Program:
    """Everyone publishes all of ``source``, and combines everything into ``target``: one wait.

    Flat arrays, which may be the same; ``source`` fits into a slot.
    """
    channel = turn.channel
    views = channel.views(turn.parity, source.dtype, source.size)
    views[channel.place][...] = source
    turn.post(1)
    yield channel.others, 1
    combine(views[0], views[1], target)
    for view in views[2:]:
        combine(target, view, target)
    if finish is not None:
        finish(target)


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
    yield from _let_go(turn, chunks.heap, 2 * last + 4)


_ALIGNMENT = 64


class _Chunks:
    """The array of ``reduce_slices``, chunk by chunk, and where its parts lie in slots and heaps."""

    def __init__(self, turn: Turn, x: Array, most: int) -> None:
        channel = turn.channel
        self.count = -(-x.size // most)
        self.heap: list[int | None] = [turn.place_in_heap(place) for place in range(channel.size)]
        self._turn = turn
        self._x = x
        self._chunk = -(-x.size // self.count)
        self._width = -(-self._chunk // channel.size)
        self._slots = channel.whole(turn.parity, x.dtype)
        self._third = len(self._slots[0]) // 3

    def find_heaps(self) -> None:
        """Everyone has posted: learn whose input lies in a heap."""
        self.heap = _heap_places(self._turn)

    def publish(self, chunk: int) -> None:
        """Copy the slices that others combine into this rank's slot."""
        place = self._turn.channel.place
        if self.heap[place] is None:
            start, stop = self._bounds(chunk)
            low, high = self._slice(chunk, place)
            base = self._base(chunk)
            slot = self._slots[place]
            slot[base : base + low - start] = self._x[start:low]
            slot[base + high - start : base + stop - start] = self._x[high:stop]

    def combine(self, chunk: int, combine: Combine, finish: Finish | None) -> None:
        """Combine this rank's slice of all ranks."""
        place = self._turn.channel.place
        low, high = self._slice(chunk, place)
        own = self._x[low:high]
        mine = self._in_slot(chunk, place, low, high)
        pieces = [self._piece(chunk, other, low, high) for other in range(len(self.heap))]
        _combine_in_order(pieces, place, own, mine, combine)
        if finish is not None:
            finish(own)
        if self.heap[place] is None:
            mine[...] = own

    def copy_out(self, chunk: int) -> None:
        """Copy the slices that the others have combined."""
        for other in self._turn.channel.others:
            low, high = self._slice(chunk, other)
            self._x[low:high] = self._piece(chunk, other, low, high)

    def _bounds(self, chunk: int) -> tuple[int, int]:
        start = chunk * self._chunk
        return start, min(start + self._chunk, self._x.size)

    def _slice(self, chunk: int, place: int) -> tuple[int, int]:
        """Return which elements of the array the rank at ``place`` combines."""
        start, stop = self._bounds(chunk)
        low = min(start + place * self._width, stop)
        return low, min(low + self._width, stop)

    def _base(self, chunk: int) -> int:
        return chunk % 3 * self._third

    def _in_slot(self, chunk: int, place: int, low: int, high: int) -> Array:
        offset = self._base(chunk) - chunk * self._chunk
        return self._slots[place][offset + low : offset + high]

    def _piece(self, chunk: int, place: int, low: int, high: int) -> Array:
        """Return elements ``low`` to ``high`` of the array, as the rank at ``place`` shows them."""
        heap = self.heap[place]
        if heap is None:
            return self._in_slot(chunk, place, low, high)
        return _in_heap(self._turn, place, heap, self._x.dtype, low, high)


def _combine_in_order(pieces: Sequence[Array], place: int, own: Array, scratch: Array, combine: Combine) -> None:
    """Leave ``pieces`` combined in ``own``, which is also the operand at ``place``; ``scratch`` is as long."""
    pieces = [own if index == place else piece for index, piece in enumerate(pieces)]
    total = pieces[0]
    for index, piece in enumerate(pieces[1:], start=1):
        target = own if index >= place else scratch
        combine(total, piece, target)
        total = target


def _heap_places(turn: Turn) -> list[int | None]:
    """Return where every rank's input lies in its heap; all of them must have posted."""
    channel = turn.channel
    places = [turn.place_in_heap(other) for other in range(channel.size)]
    turn.places_read = tuple(other for other in channel.others if places[other] is not None)
    return places


def _in_heap(turn: Turn, place: int, heap: int, dtype: np.dtype[Any], low: int, high: int) -> Array:
    """Return elements ``low`` to ``high`` of the input that the rank at ``place`` has at ``heap``."""
    channel = turn.channel
    segment = channel.arena.segments[channel.ranks[place]]
    return segment.heap_array(heap + low * dtype.itemsize, high - low, dtype)


def _let_go(turn: Turn, heap: Sequence[int | None], round_: int) -> Program:
    """If anyone's heap was read, wait until all have read it."""
    if all(where is None for where in heap):
        return
    turn.post(round_)
    if heap[turn.channel.place] is not None:
        yield turn.channel.others, round_


@dataclass(frozen=True, slots=True)
class Flow:
    """What streams from rank to rank, in chunks of ``chunk`` elements.

    The rank at place ``r`` reads the elements ``slices[r]`` of what each writer shows; if they are the same for all,
    the flow ``is_shared``: they go through the slot once.
    """

    slices: tuple[tuple[int, int], ...]
    chunk: int
    dtype: np.dtype[Any]
    is_shared: bool

    @property
    def chunks(self) -> int:
        """Chunks that the longest slice makes."""
        return max(-(-(high - low) // self.chunk) for low, high in self.slices)

    def part(self, place: int, chunk: int) -> tuple[int, int]:
        """Return which elements of a writer's input the rank at ``place`` reads in ``chunk``."""
        low, high = self.slices[place]
        start = min(low + chunk * self.chunk, high)
        return start, min(start + self.chunk, high)


def flow(turn: Turn, slices: Sequence[tuple[int, int]], dtype: np.dtype[Any], *, is_shared: bool) -> Flow:
    """Return the flow whose chunks fill half a slot."""
    half = turn.channel.slot_bytes // 2 // dtype.itemsize
    return Flow(tuple(slices), max(half if is_shared else half // turn.channel.size, 1), dtype, is_shared)


Take = Callable[[int, Sequence[Array]], None]
"""Called for each chunk with the offset in this rank's slice, and what each rank (or writer) shows there."""


def exchange(turn: Turn, flow: Flow, source: Array, take: Take) -> Program:
    """Everyone writes and reads; ``take`` gets pieces by place, this rank's own among them."""
    channel = turn.channel
    place, others = channel.place, channel.others
    is_in_heap = turn.place_in_heap(place) is not None
    chunks = flow.chunks
    heap: list[int | None] = []
    for chunk in range(chunks):
        if not is_in_heap:
            _publish(turn, flow, source, chunk, others)
        turn.post(chunk + 1)
        yield others, chunk + 1
        if chunk == 0:
            heap = _heap_places(turn)
        low, high = flow.part(place, chunk)
        pieces = [
            source[low:high] if other == place else _shown(turn, flow, chunk, other, heap[other])
            for other in range(channel.size)
        ]
        take(chunk * flow.chunk, pieces)
    yield from _let_go(turn, heap, chunks + 1)


def hand_out(turn: Turn, flow: Flow, source: Array, readers: Sequence[int]) -> Program:
    """This rank alone writes."""
    chunks = flow.chunks
    if turn.place_in_heap(turn.channel.place) is not None:
        turn.post(chunks)
        yield readers, chunks
        return
    for chunk in range(chunks):
        if chunk >= 2:
            yield readers, chunk - 1
        _publish(turn, flow, source, chunk, readers)
        turn.post(chunk + 1)


def take_in(turn: Turn, flow: Flow, writers: Sequence[int], take: Take) -> Program:
    """This rank reads, and writes nothing; ``take`` gets pieces in the order of ``writers``."""
    heap: list[int | None] = []
    for chunk in range(flow.chunks):
        yield writers, chunk + 1
        if chunk == 0:
            heap = [turn.place_in_heap(writer) for writer in writers]
            turn.places_read = tuple(writer for writer, where in zip(writers, heap, strict=True) if where is not None)
        shown = [_shown(turn, flow, chunk, writer, where) for writer, where in zip(writers, heap, strict=True)]
        take(chunk * flow.chunk, shown)
        turn.post(chunk + 1)


def _publish(turn: Turn, flow: Flow, source: Array, chunk: int, readers: Sequence[int]) -> None:
    """Copy what ``readers`` read in ``chunk`` into this rank's slot."""
    channel = turn.channel
    for reader in readers[:1] if flow.is_shared else readers:
        low, high = flow.part(reader, chunk)
        at = _at(turn, flow, chunk, reader)
        channel.whole(turn.parity, flow.dtype)[channel.place][at : at + high - low] = source[low:high]


def _shown(turn: Turn, flow: Flow, chunk: int, writer: int, heap: int | None) -> Array:
    """Return what the rank at ``writer`` shows this one in ``chunk``."""
    channel = turn.channel
    low, high = flow.part(channel.place, chunk)
    if heap is not None:
        return _in_heap(turn, writer, heap, flow.dtype, low, high)
    at = _at(turn, flow, chunk, channel.place)
    return channel.whole(turn.parity, flow.dtype)[writer][at : at + high - low]


def _at(turn: Turn, flow: Flow, chunk: int, reader: int) -> int:
    """Return where in a slot the elements begin that ``reader`` reads in ``chunk``."""
    half = turn.channel.slot_bytes // 2 // flow.dtype.itemsize
    return (chunk & 1) * half + (0 if flow.is_shared else reader * flow.chunk)
