"""All-reduce of a bundle of arrays in shared memory.

Theory of operation.  Sections of a ``Bundle`` are packed directly into slots and unpacked directly from there, so that
each element is copied no more often than in one large array, except for this rank's own share.  Small bundles are
published as a whole and combined by every rank, all sections in one wait (as in ``programs.combine_all``).  Larger ones
are cut into chunks, each of one section, and reduced by ``all_reduce.reduce_slices``.  It requires that the slice of
each rank lies at the same place in every chunk: here that is a fixed part of the slot per rank, as long as the longest
slice, for every dtype and length of a chunk.

This rank's own slice is packed into scratch memory, which all calls share, as it holds nothing from one wait to the
next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from asyncpar.collectives.arrays import Array, Reduction
from asyncpar.collectives.bundle import Bundle, Section, SectionRange, cut, pack, unpack
from asyncpar.collectives.shared_memory.all_reduce import AT_ONCE_BYTES, CHUNK_BYTES, Chunks, reduce_slices
from asyncpar.collectives.shared_memory.group import StepScratch
from asyncpar.core.config.slicing import ceil_chunks, ceil_div
from asyncpar.net.arena.channel import Channel, Turn
from asyncpar.net.arena.run_queue import Program

_ALIGNMENT: Final = 64
_KEPT_VIEWS: Final = 8192
"""Number of views of slots that one arrangement keeps; making them takes about as long as copying a few kilobytes."""


def arrange(
    channel: Channel, sections: Sequence[Section], reductions: Sequence[Reduction], scratch: StepScratch
) -> AtOnce | InChunks:
    """Return the arrangement that reduces bundles of ``sections`` over ``channel``."""
    whole = sum(_aligned(section.nbytes) for section in sections)
    if whole <= min(AT_ONCE_BYTES // (channel.size - 1), channel.slot_bytes):
        return AtOnce(channel, sections, reductions, scratch)
    return InChunks(channel, sections, reductions, scratch)


class AtOnce:
    """Arrangement in which all ranks publish all sections."""

    def __init__(
        self, channel: Channel, sections: Sequence[Section], reductions: Sequence[Reduction], scratch: StepScratch
    ) -> None:
        self._channel = channel
        self._sections = sections
        self._reductions = reductions
        self._slots = [_views_at(channel, parity, sections) for parity in (0, 1)]
        self._results = [scratch.take(section.count, section.dtype) for section in sections]
        self._cuts = [
            cut(result, section.lengths(section.range_of(0, section.count)))
            for result, section in zip(self._results, sections, strict=True)
        ]

    def program(self, turn: Turn, bundle: Bundle) -> Program:
        """Return the program, with one wait for all sections."""
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
    """Return, by section, the views where each rank publishes it."""
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
    """A range of one section.  ``slices`` are its ranges by the place of the rank that combines them."""

    __slots__ = ("section", "sizes", "slices", "views")

    def __init__(self, section: int, slices: Sequence[SectionRange], sizes: Sequence[int]) -> None:
        self.section = section
        self.slices = slices
        self.sizes = sizes
        self.views: list[_Views | None] = [None, None]


class _Views:
    """Views of a chunk in the slots of one parity.

    ``published`` is where this rank puts the slice of each rank, ``operands`` where each rank has put this rank's
    slice, ``combined`` where each rank leaves its combined slice, cut into the arrays that it is made of.
    """

    __slots__ = ("combined", "operands", "published")

    def __init__(self, published: Sequence[Array], operands: Sequence[Array], combined: Sequence[list[Array]]) -> None:
        self.published = published
        self.operands = operands
        self.combined = combined


class InChunks:
    """Arrangement in which each rank combines a slice of every chunk."""

    def __init__(
        self, channel: Channel, sections: Sequence[Section], reductions: Sequence[Reduction], scratch: StepScratch
    ) -> None:
        self.channel = channel
        self.sections = sections
        self.reductions = reductions
        self.scratch = scratch
        total = sum(section.nbytes for section in sections)
        whole = channel.slot_bytes // channel.size // _ALIGNMENT * _ALIGNMENT
        is_one_chunk = len(sections) == 1 and total <= min(CHUNK_BYTES, whole * channel.size)
        self._depth = 1 if is_one_chunk else 3
        self._width = channel.slot_bytes // self._depth // channel.size // _ALIGNMENT * _ALIGNMENT
        self.chunks = [
            self._chunk(index, start, stop)
            for index, section in enumerate(sections)
            for start, stop in self._bounds(section)
        ]
        self._keeps_views = sum(len(section.members) for section in sections) <= _KEPT_VIEWS

    def program(self, turn: Turn, bundle: Bundle) -> Program:
        """Reduce the arrays of ``bundle`` in place."""
        return reduce_slices(turn, _BundleChunks(self, bundle, turn.parity))

    def _bounds(self, section: Section) -> list[tuple[int, int]]:
        """Cut a section evenly into chunks that fit."""
        itemsize = section.dtype.itemsize
        most = min(self.channel.size * (self._width // itemsize), CHUNK_BYTES // itemsize)
        chunks = max(ceil_div(section.count, most), 1)
        return [bound for bound in ceil_chunks(section.count, chunks) if bound[0] < bound[1]]

    def _chunk(self, index: int, start: int, stop: int) -> _Chunk:
        section = self.sections[index]
        bounds = [(start + low, start + high) for low, high in ceil_chunks(stop - start, self.channel.size)]
        return _Chunk(
            index,
            [section.range_of(low, high) for low, high in bounds],
            [high - low for low, high in bounds],
        )

    def views(self, index: int, parity: int) -> _Views:
        """Return the views of chunk ``index`` in the slots."""
        chunk = self.chunks[index]
        views = chunk.views[parity]
        if views is None:
            views = self._make_views(index, parity)
            if self._keeps_views:
                chunk.views[parity] = views
        return views

    def _make_views(self, index: int, parity: int) -> _Views:
        channel, chunk = self.channel, self.chunks[index]
        section = self.sections[chunk.section]
        base = index % self._depth * self._width * channel.size

        def slice_at(place: int, of: int) -> Array:
            """Return the slice that the rank at ``of`` combines, in the slot of the rank at ``place``."""
            return _part(channel, parity, place, base + of * self._width, chunk.sizes[of], section.dtype)

        places = range(channel.size)
        return _Views(
            [slice_at(channel.place, of) for of in places],
            [slice_at(place, channel.place) for place in places],
            [cut(slice_at(of, of), section.lengths(chunk.slices[of])) for of in places],
        )


class _BundleChunks(Chunks):
    """The chunks of one bundle, arranged by ``arrangement``, in the slots of ``parity``."""

    def __init__(self, arrangement: InChunks, bundle: Bundle, parity: int) -> None:
        self.last = len(arrangement.chunks) - 1
        self._arrangement = arrangement
        self._bundle = bundle
        self._parity = parity

    def publish(self, chunk: int) -> None:
        arrangement = self._arrangement
        channel, part = arrangement.channel, arrangement.chunks[chunk]
        flats, published = self._bundle.flats[part.section], arrangement.views(chunk, self._parity).published
        reduction = arrangement.reductions[part.section]
        for other in channel.others:
            pack(part.slices[other].pieces(flats), published[other])
            reduction.load(published[other], published[other], channel.size)

    def begin_reading(self) -> None:
        """Do nothing: bundles are never read in place in a heap."""

    def combine(self, chunk: int) -> None:
        arrangement = self._arrangement
        part, place, size = arrangement.chunks[chunk], arrangement.channel.place, arrangement.channel.size
        views, reduction = arrangement.views(chunk, self._parity), arrangement.reductions[part.section]
        own = arrangement.scratch.take(part.sizes[place], arrangement.sections[part.section].dtype)
        pack(part.slices[place].pieces(self._bundle.flats[part.section]), own)
        reduction.load(own, own, size)
        operands = [own if at == place else operand for at, operand in enumerate(views.operands)]
        result = views.published[place]  # other ranks do not read this place of the slot before it is combined
        reduction.combine(operands[0], operands[1], result)
        for operand in operands[2:]:
            reduction.combine(result, operand, result)
        reduction.finish(result, size)

    def copy_out(self, chunk: int) -> None:
        """Unpack the slices of all ranks, this one's included."""
        part = self._arrangement.chunks[chunk]
        flats = self._bundle.flats[part.section]
        for chosen, combined in zip(part.slices, self._arrangement.views(chunk, self._parity).combined, strict=True):
            unpack(combined, chosen.pieces(flats))
