"""The values of a whole tensor that a piece holds, as ranges of its C-flattened values.  Pure.

Theory of operation.  Viewed as ``view_shape``, a slice is ``count`` runs of ``length`` values, ``stride`` apart, the
first at ``first``; a flat range of the slice is a few of those runs, the outer ones trimmed.  So two pieces of one
tensor, however each was cut, are two sorted lists of ranges, and their common values are the intersection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.slicing import TensorSlice

Positions: TypeAlias = NDArray[np.int64]

_FEW = 32
"""Limit of values per run below which runs are copied by index rather than one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The runs of a whole slice."""

    first: int
    length: int
    stride: int
    count: int

    @classmethod
    def of(cls, part: TensorSlice) -> Runs:
        """Return the runs of ``part``; slices of the same values in the same order have equal runs."""
        if not part.view_shape:
            return cls(first=0, length=1, stride=1, count=1)
        inner = math.prod(part.view_shape[part.dim + 1 :])
        count = math.prod(part.view_shape[: part.dim])
        stride = part.view_shape[part.dim] * inner
        first, length = part.start * inner, (part.stop - part.start) * inner
        if count * length == 0:
            return cls(first=0, length=0, stride=0, count=0)
        if length == stride or count == 1:
            return cls(first=first, length=count * length, stride=count * length, count=1)
        return cls(first=first, length=length, stride=stride, count=count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Disjoint ranges of positions in a whole tensor, in increasing order, none empty."""

    starts: Positions
    stops: Positions

    @property
    def size(self) -> int:
        """The number of values."""
        return int((self.stops - self.starts).sum())

    def places(self, positions: Positions) -> Positions:
        """Return how many values of the spans precede each of ``positions``, which lie in them."""
        lengths = self.stops - self.starts
        before = np.cumsum(lengths) - lengths
        index = np.searchsorted(self.starts, positions, side="right") - 1
        return np.asarray(before[index] + positions - self.starts[index], np.int64)


def spans_of(part: TensorSlice, flat: tuple[int, int]) -> Spans:
    """Return the positions in the whole tensor of the values ``flat[0]`` to ``flat[1]`` of the C-flattened ``part``."""
    runs, (start, stop) = Runs.of(part), flat
    if start == stop:
        return Spans(starts=np.zeros(0, np.int64), stops=np.zeros(0, np.int64))
    first, last = start // runs.length, (stop - 1) // runs.length
    starts = np.arange(first, last + 1, dtype=np.int64) * runs.stride + runs.first
    stops = starts + runs.length
    starts[0] += start - first * runs.length
    stops[-1] -= (last + 1) * runs.length - stop
    return Spans(starts=starts, stops=stops)


def reach_of(part: TensorSlice, flat: tuple[int, int]) -> tuple[int, int]:
    """Return the first position of ``spans_of``, and the end of the last; faster than computing those."""
    runs, (start, stop) = Runs.of(part), flat
    if start == stop:
        return 0, 0
    first, last = divmod(start, runs.length), divmod(stop - 1, runs.length)
    return runs.first + first[0] * runs.stride + first[1], runs.first + last[0] * runs.stride + last[1] + 1


def intersect(left: Spans, right: Spans) -> Spans:
    """Return the common positions, cut wherever one of them is."""
    low = np.searchsorted(right.stops, left.starts, side="right")
    high = np.searchsorted(right.starts, left.stops, side="left")
    counts = np.maximum(high - low, 0)
    of_left = np.repeat(np.arange(len(counts)), counts)
    of_right = np.repeat(low - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return Spans(
        starts=np.maximum(left.starts[of_left], right.starts[of_right]),
        stops=np.minimum(left.stops[of_left], right.stops[of_right]),
    )


def subtract(left: Spans, right: Spans) -> Spans:
    """Return the positions of ``left`` that ``right`` does not have."""
    starts = np.concatenate([np.zeros(1, np.int64), right.stops])
    stops = np.concatenate([right.starts, np.full(1, np.iinfo(np.int64).max)])
    gaps = starts < stops
    return intersect(left, Spans(starts=starts[gaps], stops=stops[gaps]))


def first_gap(parts: list[Spans], size: int) -> tuple[int, int] | None:
    """Return the first range of a tensor of ``size`` values that none of ``parts`` has; None if they have all."""
    starts = np.concatenate([part.starts for part in parts] or [np.zeros(0, np.int64)])
    stops = np.concatenate([part.stops for part in parts] or [np.zeros(0, np.int64)])
    order = np.argsort(starts, kind="stable")
    reached = np.concatenate([np.zeros(1, np.int64), np.maximum.accumulate(stops[order])])
    following = np.concatenate([starts[order], np.full(1, size, np.int64)])
    gaps = np.flatnonzero(reached < following)
    return (int(reached[gaps[0]]), int(following[gaps[0]])) if gaps.size else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyPlan:
    """Values to copy: ``lengths[i]`` of them from ``sources[i]`` to ``targets[i]``; sources increase."""

    sources: Positions
    targets: Positions
    lengths: Positions

    @classmethod
    def between(cls, source: Spans, target: Spans, shared: Spans) -> CopyPlan:
        """Return the moves of ``shared``, which both have and which is cut wherever one of them is."""
        return cls(
            sources=source.places(shared.starts),
            targets=target.places(shared.starts),
            lengths=shared.stops - shared.starts,
        )

    def within(self, start: int, stop: int) -> CopyPlan:
        """Return the moves of the sources ``start`` to ``stop``, with positions counted from ``start``."""
        first = int(np.searchsorted(self.sources + self.lengths, start, side="right"))
        last = int(np.searchsorted(self.sources, stop, side="left"))
        sources, lengths = self.sources[first:last], self.lengths[first:last]
        lower, upper = np.maximum(sources, start), np.minimum(sources + lengths, stop)
        return CopyPlan(
            sources=lower - start, targets=self.targets[first:last] + lower - sources, lengths=upper - lower
        )

    def copy(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        """Copy from one flat array to the other."""
        count, total = len(self.lengths), int(self.lengths.sum())
        if count > 1 and total < _FEW * count:
            within = np.arange(total) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
            target[np.repeat(self.targets, self.lengths) + within] = source[
                np.repeat(self.sources, self.lengths) + within
            ]
            return
        for at, to, length in zip(self.sources.tolist(), self.targets.tolist(), self.lengths.tolist(), strict=True):
            target[to : to + length] = source[at : at + length]
