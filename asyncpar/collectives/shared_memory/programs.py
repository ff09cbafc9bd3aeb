"""Programs of collectives in the arena: generators that copy, combine, post, and yield the ranks they wait for.

Theory of operation.  A program owns its rank's slot of the turn (see ``arena.channel``).  A payload that does not fit
is sent in chunks.  Every program states why no rank overwrites memory that another still reads:

- *Published once* (``combine_all``, ``barrier``): the slot is written once per turn, and the channel guards turns.
- *Streams* (``exchange``, ``hand_out``, ``take_in``): the slot has two halves; chunk ``c`` uses half ``c & 1``.  A rank
  that writes chunk ``c`` knows that every reader has read chunk ``c - 2``: in ``hand_out`` it waits for that (readers
  post round 1 at once, and round ``c + 2`` when they have read chunk ``c``); in ``exchange``, where all write and read,
  it has waited for chunk ``c - 1`` of all others, posted after reading ``c - 2``.
- *In slices* (``all_reduce``): see there.

No program ends before every rank of the group has posted a round of the same operation, even where data flows only one
way: a rank that calls something else, for example with another root, is detected by all of them.

Inputs in the heap of the arena (``Node.empty``) are not copied: the others read them in place.  Then the owner waits at
the end until all others have read it; and a rank that has read it checks, before it returns its result, that the owner
has not freed the memory in between (``Turn.is_intact``).

Sums are computed in the order of ranks, each element by one rank or by all in the same way: so they have the same bits
on every rank, which are those of the message algorithms with that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from asyncpar.collectives.arrays import Array, Combine, Reduction, contiguous
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program

_SHORTEST_PIPED = 128 << 10
"""Bytes; where some ranks only write and others only read, shorter payloads are not cut in two for overlap."""


def barrier(turn: Turn) -> Program:
    """Wait until all ranks have posted."""
    turn.post(1)
    yield turn.channel.others, 1


def combine_all(turn: Turn, source: Array, target: Array, combine: Combine, finish: FinishInPlace | None) -> Program:
    """Publish all of ``source``, and combine the sources of all ranks into ``target``: one wait.

    Both are flat arrays, which may be the same; ``source`` fits into a slot, and stays unchanged until the end.
    """
    channel = turn.channel
    views = channel.views(turn.parity, source.dtype, source.size)
    views[channel.place][...] = source
    turn.post(1)
    yield channel.others, 1
    place = channel.place  # a rank takes its own part from ``source``, which is in its caches
    combine(source if place == 0 else views[0], source if place == 1 else views[1], target)
    for view in views[2:]:
        combine(target, view, target)
    if finish is not None:
        finish(target)


class Flow(msgspec.Struct, frozen=True):
    """A stream from rank to rank, in chunks of ``chunk`` elements.

    The rank at place ``r`` reads the elements ``slices[r]`` that each writer shows; if they are the same for all, the
    flow ``is_shared``: they go through the slot once.
    """

    slices: tuple[tuple[int, int], ...]
    chunk: int
    dtype: np.dtype[Any]
    is_shared: bool

    @property
    def chunks(self) -> int:
        """Number of chunks of the longest slice, at least one: ranks meet even where there is nothing to show."""
        return max(1, *(-(-(high - low) // self.chunk) for low, high in self.slices))

    def part(self, place: int, chunk: int) -> tuple[int, int]:
        """Return the range of elements of a writer's input that the rank at ``place`` reads in ``chunk``."""
        low, high = self.slices[place]
        start = min(low + chunk * self.chunk, high)
        return start, min(start + self.chunk, high)


def flow(
    turn: Turn, slices: Sequence[tuple[int, int]], dtype: np.dtype[Any], *, is_shared: bool, is_piped: bool = False
) -> Flow:
    """Return the flow whose chunks fill half a slot, or less if it ``is_piped``: some only write, others only read."""
    half = turn.channel.slot_bytes // 2 // dtype.itemsize
    chunk = max(half if is_shared else half // (turn.channel.size - 1), 1)
    if is_piped:
        longest = max(high - low for low, high in slices)
        chunk = min(chunk, max(-(-longest // 2), _SHORTEST_PIPED // dtype.itemsize))
    return Flow(tuple(slices), chunk, dtype, is_shared)


Take = Callable[[int, Sequence[Array]], None]
"""Called for each chunk with the offset in this rank's slice, and the pieces that each rank (or writer) shows there."""


def exchange(turn: Turn, flow: Flow, source: Array, take: Take) -> Program:
    """Have all ranks write and read; ``take`` receives pieces by place, this rank's own among them."""
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
            heap = turn.places_in_heaps()
        low, high = flow.part(place, chunk)
        pieces = [
            source[low:high] if other == place else _shown(turn, flow, chunk, other, heap[other])
            for other in range(channel.size)
        ]
        take(chunk * flow.chunk, pieces)
    yield from release_heaps(turn, chunks + 1)


def hand_out(turn: Turn, flow: Flow, source: Array, readers: Sequence[int]) -> Program:
    """Write, and do not read.  Returns when every rank of the group is in the same operation."""
    chunks = flow.chunks
    if turn.place_in_heap(turn.channel.place) is not None:
        turn.post(chunks)
        yield readers, chunks + 1
    else:
        for chunk in range(chunks):
            if chunk >= 2:
                yield readers, chunk
            _publish(turn, flow, source, chunk, readers)
            turn.post(chunk + 1)
    yield turn.channel.others, 1


def take_in(turn: Turn, flow: Flow, writers: Sequence[int], take: Take) -> Program:
    """Read, and write nothing; ``take`` receives pieces in the order of ``writers``.

    Returns when every rank of the group is in the same operation.
    """
    chunks = flow.chunks
    heap: list[int | None] = []
    turn.post(1)
    for chunk in range(chunks):
        yield writers, chunk + 1
        if chunk == 0:
            heap = [turn.place_in_heap(writer) for writer in writers]
            turn.places_read = tuple(writer for writer, where in zip(writers, heap, strict=True) if where is not None)
        shown = [_shown(turn, flow, chunk, writer, where) for writer, where in zip(writers, heap, strict=True)]
        take(chunk * flow.chunk, shown)
        if turn.places_read or chunk + 2 < chunks:
            turn.post(chunk + 2)
    yield turn.channel.others, 1


def _publish(turn: Turn, flow: Flow, source: Array, chunk: int, readers: Sequence[int]) -> None:
    """Copy the elements that ``readers`` read in ``chunk`` into this rank's slot."""
    channel = turn.channel
    for reader in readers[:1] if flow.is_shared else readers:
        low, high = flow.part(reader, chunk)
        at = _at(turn, flow, chunk, channel.place, reader)
        channel.whole(turn.parity, flow.dtype)[channel.place][at : at + high - low] = source[low:high]


def _shown(turn: Turn, flow: Flow, chunk: int, writer: int, heap: int | None) -> Array:
    """Return the elements that the rank at ``writer`` shows this one in ``chunk``."""
    channel = turn.channel
    low, high = flow.part(channel.place, chunk)
    if heap is not None:
        return turn.heap_array(writer, heap, flow.dtype, low, high)
    at = _at(turn, flow, chunk, writer, channel.place)
    return channel.whole(turn.parity, flow.dtype)[writer][at : at + high - low]


def _at(turn: Turn, flow: Flow, chunk: int, writer: int, reader: int) -> int:
    """Return the offset in the slot of ``writer`` of the elements that ``reader`` reads in ``chunk``."""
    half = turn.channel.slot_bytes // 2 // flow.dtype.itemsize
    return (chunk & 1) * half + (0 if flow.is_shared else (reader - (reader > writer)) * flow.chunk)


FinishInPlace = Callable[[Array], None]
"""Turns combined values into the result, in place."""


def release_heaps(turn: Turn, round_: int) -> Program:
    """If the heap of any rank was read, wait until all have read it."""
    if not turn.uses_heaps:
        return
    turn.post(round_)
    if turn.place_in_heap(turn.channel.place) is not None:
        yield turn.channel.others, round_


def combine_pieces(result: Array, pieces: Sequence[Array], reduction: Reduction) -> None:
    """Combine ``pieces``, two or more, in order; ``result`` is none of them."""
    reduction.combine(pieces[0], pieces[1], result)
    for piece in pieces[2:]:
        reduction.combine(result, piece, result)


def lay_down(rows: Sequence[Array] | Array, start: int, pieces: Sequence[Array]) -> None:
    """Copy ``pieces``, one per row, into ``rows`` from ``start`` on."""
    for row, piece in zip(rows, pieces, strict=True):
        row[start : start + len(piece)] = piece


def broadcast(array: Array, root: int) -> Callable[[Turn], Program]:
    """Return a factory of the program of a broadcast of ``array`` from the rank at ``root``."""

    def make(turn: Turn) -> Program:
        channel = turn.channel
        work = contiguous(array)
        flat = work.reshape(-1)
        flows = flow(turn, [(0, flat.size)] * channel.size, flat.dtype, is_shared=True, is_piped=True)
        if channel.place == root:
            yield from hand_out(turn, flows, flat, channel.others)
            return
        yield from take_in(turn, flows, (root,), lambda start, pieces: lay_down((flat,), start, pieces))
        if work is not array:
            array[...] = work

    return make
