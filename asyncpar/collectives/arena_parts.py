"""What the ranks of one host do in the arena for a hierarchical all-reduce: combine parts at carriers, hand them out.

Both work in place on a flat array that is the same length on all ranks.  ``parts`` are its parts by the place of the
rank that carries them; ranks that carry none have an empty one.

Theory of operation.  These are streams in the sense of ``arena_programs``: the slot has two halves, chunk ``c`` uses
half ``c & 1``, and whoever writes chunk ``c`` has waited for everyone's ``c - 1``, which was posted after reading
``c - 2``.  Inputs in the heap are read where they are, although their owners work on them in place meanwhile: an owner
writes only to its own part while others read all but that, and only to the others' parts while others read its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncpar.collectives import arena_programs as programs
from asyncpar.collectives.arena_reading import heap_places, in_heap, let_go
from asyncpar.collectives.arrays import Array, Reduction
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program

Parts = Sequence[tuple[int, int]]


def gather_parts(turn: Turn, x: Array, parts: Parts, reduction: Reduction) -> Program:
    """Combine each part of ``x`` of all ranks, in their order, at the rank that carries it."""
    low, high = parts[turn.channel.place]
    place = turn.channel.place
    flow = programs.flow(turn, parts, x.dtype, is_shared=False)
    scratch = np.empty(min(flow.chunk, high - low) if place > 1 else 0, x.dtype)

    def take(start: int, pieces: Sequence[Array]) -> None:  # noqa: ARG001  # pieces are views into ``x``
        own = pieces[place]
        total = pieces[0]
        for at, piece in enumerate(pieces[1:], start=1):
            target = own if at >= place else scratch[: len(own)]
            reduction.combine(total, piece, target)
            total = target

    yield from programs.exchange(turn, flow, x, take)


def spread_parts(turn: Turn, x: Array, parts: Parts) -> Program:
    """Copy each part of ``x`` from the rank that carries it to all others."""
    channel = turn.channel
    place, others = channel.place, channel.others
    half = channel.slot_bytes // 2 // x.itemsize
    slots = channel.whole(turn.parity, x.dtype)
    is_in_heap = turn.place_in_heap(place) is not None
    chunks = max(1, *(-(-(high - low) // half) for low, high in parts))
    heap: list[int | None] = []
    for chunk in range(chunks):
        base = (chunk & 1) * half
        low, high = _bounds(parts[place], chunk, half)
        if not is_in_heap:
            slots[place][base : base + high - low] = x[low:high]
        turn.post(chunk + 1)
        yield others, chunk + 1
        if chunk == 0:
            heap = heap_places(turn)
        for other in others:
            low, high = _bounds(parts[other], chunk, half)
            where = heap[other]
            if low < high and where is None:
                x[low:high] = slots[other][base : base + high - low]
            elif low < high and where is not None:
                x[low:high] = in_heap(turn, other, where, x.dtype, low, high)
    yield from let_go(turn, heap, chunks + 1)


def _bounds(part: tuple[int, int], chunk: int, length: int) -> tuple[int, int]:
    low, high = part
    start = min(low + chunk * length, high)
    return start, min(start + length, high)
