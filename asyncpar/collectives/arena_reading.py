"""Reading what other ranks show: in their slots, or where it lies in their heaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program

Finish = Callable[[Array], None]
"""Turns combined values into the result, in place."""


def heap_places(turn: Turn) -> list[int | None]:
    """Return where every rank's input lies in its heap; all of them must have posted."""
    channel = turn.channel
    places = [turn.place_in_heap(other) for other in range(channel.size)]
    turn.places_read = tuple(other for other in channel.others if places[other] is not None)
    return places


def in_heap(turn: Turn, place: int, heap: int, dtype: np.dtype[Any], low: int, high: int) -> Array:
    """Return elements ``low`` to ``high`` of the input that the rank at ``place`` has at ``heap``."""
    channel = turn.channel
    segment = channel.arena.segments[channel.ranks[place]]
    return segment.heap_array(heap + low * dtype.itemsize, high - low, dtype)


def let_go(turn: Turn, heap: Sequence[int | None], round_: int) -> Program:
    """If anyone's heap was read, wait until all have read it."""
    if all(where is None for where in heap):
        return
    turn.post(round_)
    if heap[turn.channel.place] is not None:
        yield turn.channel.others, round_
