"""All-reduce in shared memory, of one array or of a bundle of arrays.

Short payloads are published as a whole and combined by every rank, in one wait (``combine_all``, ``AtOnce``).  In
longer ones each rank combines a slice of every chunk, and copies the others' slices (``reduce_slices``, ``InChunks``).

Sections of a ``Bundle`` are packed straight into slots and unpacked straight from there, so that each element is copied
no more often than one large array's would be, but for this rank's own share.  Each chunk is of one section.  The
argument of ``reduce_slices`` why nothing is overwritten that is still read asks that the slice that the rank at some
place combines lies at the same place in every chunk: here that is a fixed part of the slot per place, as long as the
longest slice, whatever a chunk's dtype and length.  What is packed for this rank's own slice goes into scratch memory.
That is shared by all calls, as it holds nothing from one wait to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from asyncpar.collectives.arrays import Array, Combine, Reduction, contiguous
from asyncpar.collectives.bundle import Bundle, Section, Stretch, cut, pack, unpack
from asyncpar.collectives.shared_memory import programs
from asyncpar.collectives.shared_memory.call import MakeProgram
from asyncpar.collectives.shared_memory.programs import Finish, heap_places, in_heap, let_go
from asyncpar.collectives.staging import Scratch
from asyncpar.core.config.slicing import ceil_chunks, ceil_div
from asyncpar.net.arena.channel import Channel, Turn
from asyncpar.net.arena.run_queue import Program

_ALIGNMENT: Final = 64

AT_ONCE_BYTES = 512 << 10
"""All-reduces whose ranks read up to this much from the others in all do so in one wait."""


CHUNK_BYTES = 1 << 20
"""Larger ones go in chunks of this size, which stay in the cache between the two waits."""


def is_at_once(payload: int, channel: Channel) -> bool:
    """Is an all-reduce of ``payload`` bytes done in one wait?"""
    return payload <= min(AT_ONCE_BYTES // (channel.size - 1), channel.slot_bytes)


def all_reduce_program(source: Array, target: Array, reduction: Reduction) -> MakeProgram:
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
        else:
            reduction.load(source, target, size)
            work = contiguous(target)
            most = CHUNK_BYTES // source.itemsize
            yield from reduce_slices(turn, work.reshape(-1), most, reduction.combine, finish)
        if work is not target:
            target[...] = work

    return make


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


_KEPT_VIEWS: Final = 8192
"""Views of slots that one arrangement keeps; making them takes about as long as copying a few kilobytes."""


def arrange(
    channel: Channel, sections: Sequence[Section], reductions: Sequence[Reduction], scratch: Scratch
) -> AtOnce | InChunks:
    """Return how bundles of ``sections`` are reduced over ``channel``."""
    whole = sum(_aligned(section.nbytes) for section in sections)
    if whole <= min(AT_ONCE_BYTES // (channel.size - 1), channel.slot_bytes):
        return AtOnce(channel, sections, reductions, scratch)
    return InChunks(channel, sections, reductions, scratch)


class AtOnce:
    """Everyone publishes everything."""

    def __init__(
        self, channel: Channel, sections: Sequence[Section], reductions: Sequence[Reduction], scratch: Scratch
    ) -> None:
        self._channel = channel
        self._sections = sections
        self._reductions = reductions
        self._slots = [_views_at(channel, parity, sections) for parity in (0, 1)]
        self._results = [scratch.take(section.count, section.dtype) for section in sections]
        self._cuts = [
            cut(result, section.lengths(section.stretch(0, section.count)))
            for result, section in zip(self._results, sections, strict=True)
        ]

    def program(self, turn: Turn, bundle: Bundle) -> Program:
        """One wait for all sections."""
        channel = self._channel
        slots = self._slots[turn.parity]
        for flats, views, reduction in zip(bundle.flats, slots, self._reductions, strict=True):
            own = views[channel.place]
            pack(flats, own)
            reduction.load(own, own, channel.size)
        turn.post(1)
        yield channel.others, 1
        for flats, views, result, cuts, reduction in zip(
            bundle.flats, slots, self._results, self._cuts, self._reductions, strict=True
        ):
            reduction.combine(views[0], views[1], result)
            for view in views[2:]:
                reduction.combine(result, view, result)
            reduction.finish(result, channel.size)
            unpack(cuts, flats)


def _views_at(channel: Channel, parity: int, sections: Sequence[Section]) -> list[list[Array]]:
    """Return, by section, where each rank publishes it."""
    found: list[list[Array]] = []
    offset = 0
    for section in sections:
        count, dtype = section.count, section.dtype
        found.append([_part(channel, parity, place, offset, count, dtype) for place in range(channel.size)])
        offset += _aligned(section.nbytes)
    return found


def _part(channel: Channel, parity: int, place: int, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return ``count`` elements of the slot of the rank at ``place``, from byte ``offset``."""
    return channel.slots[place][parity][offset : offset + count * dtype.itemsize].view(dtype)


def _aligned(size: int) -> int:
    return ceil_div(size, _ALIGNMENT) * _ALIGNMENT


class _Chunk:
    """A range of one section.  ``slices`` are its stretches by the place of the rank that combines them."""

    __slots__ = ("section", "sizes", "slices", "views")

    def __init__(self, section: int, slices: Sequence[Stretch], sizes: Sequence[int]) -> None:
        self.section = section
        self.slices = slices
        self.sizes = sizes
        self.views: list[_Views | None] = [None, None]


class _Views:
    """Where a chunk lies in the slots of one parity.

    ``published`` is where this rank puts the slice of each rank, ``operands`` where each rank has put this rank's
    slice, ``combined`` where each rank leaves its slice when it is combined, cut into the arrays that it is made of.
    """

    __slots__ = ("combined", "operands", "published")

    def __init__(self, published: Sequence[Array], operands: Sequence[Array], combined: Sequence[list[Array]]) -> None:
        self.published = published
        self.operands = operands
        self.combined = combined


class InChunks:
    """Each rank combines a slice of every chunk."""

    def __init__(
        self, channel: Channel, sections: Sequence[Section], reductions: Sequence[Reduction], scratch: Scratch
    ) -> None:
        self._channel = channel
        self._sections = sections
        self._reductions = reductions
        self._scratch = scratch
        total = sum(section.nbytes for section in sections)
        whole = channel.slot_bytes // channel.size // _ALIGNMENT * _ALIGNMENT
        is_one_chunk = len(sections) == 1 and total <= min(CHUNK_BYTES, whole * channel.size)
        self._depth = 1 if is_one_chunk else 3
        self._width = channel.slot_bytes // self._depth // channel.size // _ALIGNMENT * _ALIGNMENT
        self._chunks = [
            self._chunk(index, start, stop)
            for index, section in enumerate(sections)
            for start, stop in self._bounds(section)
        ]
        self._keeps_views = sum(len(section.members) for section in sections) <= _KEPT_VIEWS

    def program(self, turn: Turn, bundle: Bundle) -> Program:
        """As ``reduce_slices``: publish, combine, copy out, one chunk behind the other."""
        others, last = self._channel.others, len(self._chunks) - 1
        parity = turn.parity
        self._publish(0, parity, bundle)
        turn.post(1)
        yield others, 1
        for chunk in range(last + 1):
            if chunk < last:
                self._publish(chunk + 1, parity, bundle)
                turn.post(2 * chunk + 2)
            if chunk > 0:
                yield others, 2 * chunk
            self._combine(chunk, parity, bundle)
            turn.post(2 * chunk + 3)
            if chunk > 0:
                yield others, 2 * chunk + 1
                self._copy_out(chunk - 1, parity, bundle)
        yield others, 2 * last + 3
        self._copy_out(last, parity, bundle)

    def _publish(self, index: int, parity: int, bundle: Bundle) -> None:
        """Pack the slices that others combine into this rank's slot."""
        chunk = self._chunks[index]
        flats, published = bundle.flats[chunk.section], self._views(index, parity).published
        reduction = self._reductions[chunk.section]
        for other in self._channel.others:
            pack(chunk.slices[other].pieces(flats), published[other])
            reduction.load(published[other], published[other], self._channel.size)

    def _combine(self, index: int, parity: int, bundle: Bundle) -> None:
        """Combine this rank's slice of all ranks, in their order."""
        chunk, place = self._chunks[index], self._channel.place
        views, reduction = self._views(index, parity), self._reductions[chunk.section]
        own = self._scratch.take(chunk.sizes[place], self._sections[chunk.section].dtype)
        pack(chunk.slices[place].pieces(bundle.flats[chunk.section]), own)
        reduction.load(own, own, self._channel.size)
        operands = [own if at == place else operand for at, operand in enumerate(views.operands)]
        result = views.published[place]  # whose place in the slot nobody reads before it is combined
        reduction.combine(operands[0], operands[1], result)
        for operand in operands[2:]:
            reduction.combine(result, operand, result)
        reduction.finish(result, self._channel.size)

    def _copy_out(self, index: int, parity: int, bundle: Bundle) -> None:
        """Unpack the slices of all ranks, this one's included."""
        chunk = self._chunks[index]
        flats = bundle.flats[chunk.section]
        for stretch, combined in zip(chunk.slices, self._views(index, parity).combined, strict=True):
            unpack(combined, stretch.pieces(flats))

    def _bounds(self, section: Section) -> list[tuple[int, int]]:
        """Cut a section evenly into chunks that fit."""
        itemsize = section.dtype.itemsize
        most = min(self._channel.size * (self._width // itemsize), CHUNK_BYTES // itemsize)
        chunks = max(ceil_div(section.count, most), 1)
        return [bound for bound in ceil_chunks(section.count, chunks) if bound[0] < bound[1]]

    def _chunk(self, index: int, start: int, stop: int) -> _Chunk:
        section = self._sections[index]
        bounds = [(start + low, start + high) for low, high in ceil_chunks(stop - start, self._channel.size)]
        return _Chunk(
            index,
            [section.stretch(low, high) for low, high in bounds],
            [high - low for low, high in bounds],
        )

    def _views(self, index: int, parity: int) -> _Views:
        chunk = self._chunks[index]
        views = chunk.views[parity]
        if views is None:
            views = self._make_views(index, parity)
            if self._keeps_views:
                chunk.views[parity] = views
        return views

    def _make_views(self, index: int, parity: int) -> _Views:
        channel, chunk = self._channel, self._chunks[index]
        section = self._sections[chunk.section]
        base = index % self._depth * self._width * channel.size

        def slice_at(place: int, of: int) -> Array:
            """Where the rank at ``place`` has the slice that the rank at ``of`` combines."""
            return _part(channel, parity, place, base + of * self._width, chunk.sizes[of], section.dtype)

        places = range(channel.size)
        return _Views(
            [slice_at(channel.place, of) for of in places],
            [slice_at(place, channel.place) for place in places],
            [cut(slice_at(of, of), section.lengths(chunk.slices[of])) for of in places],
        )
