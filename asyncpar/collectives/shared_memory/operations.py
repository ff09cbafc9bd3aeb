"""The programs of the collectives: which rank shows what to whom in the arena, and what becomes of it.

Each function returns what makes the program of one call, over the caller's arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncpar.collectives.arrays import Array, Reduction, contiguous
from asyncpar.collectives.shared_memory import programs
from asyncpar.collectives.shared_memory.call import MakeProgram
from asyncpar.core.config.slicing import ceil_chunks
from asyncpar.net.arena.channel import Channel, Turn
from asyncpar.net.arena.run_queue import Program

QUICK_BROADCAST_BYTES = 64 << 10
"""Broadcasts of up to so much always go through the root's slot, in one chunk, also from the heap."""


def is_quick_broadcast(payload: int, channel: Channel) -> bool:
    """Is a broadcast of ``payload`` bytes one chunk in the root's slot?"""
    return payload <= min(QUICK_BROADCAST_BYTES, channel.slot_bytes // 2)


def reduce_scatter(source: Array, target: Array, reduction: Reduction) -> MakeProgram:
    def make(turn: Turn) -> Program:
        size = turn.channel.size
        row = source[0].size if source.shape[0] else 0
        slices = [(low * row, high * row) for low, high in ceil_chunks(source.shape[0], size)]
        work = contiguous(target)
        result = work.reshape(-1)

        def take(start: int, pieces: Sequence[Array]) -> None:
            _combine(result[start : start + len(pieces[0])], pieces, reduction)

        flow = programs.flow(turn, slices, source.dtype, is_shared=False)
        yield from programs.exchange(turn, flow, contiguous(source).reshape(-1), take)
        reduction.finish(result, size)
        if work is not target:
            target[...] = work

    return make


def reduce(source: Array, target: Array | None, reduction: Reduction, root: int) -> MakeProgram:
    """``target`` is the root's."""

    def make(turn: Turn) -> Program:
        flat = contiguous(source).reshape(-1)
        flow = programs.flow(turn, [(0, flat.size)] * turn.channel.size, flat.dtype, is_shared=True, is_piped=True)
        if target is None:
            yield from programs.hand_out(turn, flow, flat, (root,))
            return
        work = contiguous(target)
        result = work.reshape(-1)

        def take(start: int, pieces: Sequence[Array]) -> None:
            own = flat[start : start + len(pieces[0])]
            ordered = [*pieces[:root], own, *pieces[root:]]
            _combine(result[start : start + len(own)], ordered, reduction)

        yield from programs.take_in(turn, flow, turn.channel.others, take)
        reduction.finish(result, turn.channel.size)
        if work is not target:
            target[...] = work

    return make


def all_gather(source: Array, target: Array) -> MakeProgram:
    def make(turn: Turn) -> Program:
        flat = contiguous(source).reshape(-1)
        work = contiguous(target)
        rows = work.reshape(turn.channel.size, -1)
        flow = programs.flow(turn, [(0, flat.size)] * turn.channel.size, flat.dtype, is_shared=True)
        yield from programs.exchange(turn, flow, flat, lambda start, pieces: _lay_down(rows, start, pieces))
        if work is not target:
            target[...] = work

    return make


def all_to_all(source: Array, target: Array) -> MakeProgram:
    def make(turn: Turn) -> Program:
        size = turn.channel.size
        work = contiguous(target)
        rows = work.reshape(size, -1)
        width = rows.shape[1]
        slices = [(place * width, (place + 1) * width) for place in range(size)]
        flow = programs.flow(turn, slices, source.dtype, is_shared=False)
        flat = contiguous(source).reshape(-1)
        yield from programs.exchange(turn, flow, flat, lambda start, pieces: _lay_down(rows, start, pieces))
        if work is not target:
            target[...] = work

    return make


def barrier(turn: Turn) -> Program:
    return programs.barrier(turn)


def broadcast(array: Array, root: int) -> MakeProgram:
    def make(turn: Turn) -> Program:
        channel = turn.channel
        work = contiguous(array)
        flat = work.reshape(-1)
        flow = programs.flow(turn, [(0, flat.size)] * channel.size, flat.dtype, is_shared=True, is_piped=True)
        if channel.place == root:
            yield from programs.hand_out(turn, flow, flat, channel.others)
            return
        yield from programs.take_in(turn, flow, (root,), lambda start, pieces: _lay_down((flat,), start, pieces))
        if work is not array:
            array[...] = work

    return make


def gather(source: Array, target: Array | None, root: int) -> MakeProgram:
    """``target`` is the root's."""

    def make(turn: Turn) -> Program:
        flat = contiguous(source).reshape(-1)
        flow = programs.flow(turn, [(0, flat.size)] * turn.channel.size, flat.dtype, is_shared=True, is_piped=True)
        if target is None:
            yield from programs.hand_out(turn, flow, flat, (root,))
            return
        work = contiguous(target)
        rows = work.reshape(turn.channel.size, -1)
        rows[root] = flat
        others = [rows[place] for place in turn.channel.others]
        yield from programs.take_in(
            turn, flow, turn.channel.others, lambda start, pieces: _lay_down(others, start, pieces)
        )
        if work is not target:
            target[...] = work

    return make


def scatter(source: Array | None, target: Array, root: int) -> MakeProgram:
    """``source`` is the root's."""

    def make(turn: Turn) -> Program:
        channel = turn.channel
        width = target.size
        slices = [(place * width, (place + 1) * width) for place in range(channel.size)]
        flow = programs.flow(turn, slices, target.dtype, is_shared=False, is_piped=True)
        if source is not None:
            yield from programs.hand_out(turn, flow, contiguous(source).reshape(-1), channel.others)
            target[...] = source[root]
            return
        work = contiguous(target)
        flat = work.reshape(-1)
        yield from programs.take_in(turn, flow, (root,), lambda start, pieces: _lay_down((flat,), start, pieces))
        if work is not target:
            target[...] = work

    return make


def _combine(result: Array, pieces: Sequence[Array], reduction: Reduction) -> None:
    """Combine ``pieces``, two or more, in order; ``result`` is none of them."""
    reduction.combine(pieces[0], pieces[1], result)
    for piece in pieces[2:]:
        reduction.combine(result, piece, result)


def _lay_down(rows: Sequence[Array] | Array, start: int, pieces: Sequence[Array]) -> None:
    for row, piece in zip(rows, pieces, strict=True):
        row[start : start + len(piece)] = piece
