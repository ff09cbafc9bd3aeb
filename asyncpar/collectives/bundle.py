"""Many arrays as one: the place of each in a flat sequence of elements, and copies to it and back.  Pure.

Theory of operation.  The arrays of one call are grouped by dtype into *sections*; in a section they follow one another,
in the order of the call, as if they were one flat array.  A ``SectionRange`` is a part of such a section: whole arrays,
and at its two ends parts of arrays.  It is computed once; packing it is then one call of ``np.concatenate`` and
unpacking it one assignment per array, both of which run in C.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, repeat
from operator import attrgetter, setitem
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from asyncpar.collectives.arrays import Array, check_array, check_writable, is_numeric
from asyncpar.errors import UsageError

_dtype_of = attrgetter("dtype")
_shape_of = attrgetter("shape")
_is_plain = attrgetter("flags.carray")
_assign: Callable[[Any, EllipsisType, Array], None] = setitem

Shapes = list[tuple[int, ...]]


class ArrayPart(NamedTuple):
    """Elements ``start`` to ``stop`` of the array at ``place`` of a section."""

    place: int
    start: int
    stop: int


class SectionRange(NamedTuple):
    """Range of a section: arrays ``first`` to ``last`` whole, and parts of the one before and the one after them."""

    first: int
    last: int
    head: ArrayPart | None
    tail: ArrayPart | None

    def pieces(self, flats: list[Array]) -> list[Array]:
        """Return the flat arrays that make up the range; ``flats`` are those of the section."""
        pieces = flats[self.first : self.last]
        if self.head is not None:
            place, start, stop = self.head
            pieces.insert(0, flats[place][start:stop])
        if self.tail is not None:
            place, start, stop = self.tail
            pieces.append(flats[place][start:stop])
        return pieces


class Section:
    """The arrays of one dtype.  ``members`` are their places in the call, ``sizes`` their numbers of elements."""

    def __init__(
        self, dtype: np.dtype[Any], members: Sequence[int], sizes: Sequence[int], *, is_whole: bool = False
    ) -> None:
        self.dtype = dtype
        self.members = tuple(members)
        self.is_whole = is_whole
        """Whether these are all arrays of the call, and all flat."""
        self._ends = [0, *accumulate(sizes)]
        self.count = self._ends[-1]

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def range_of(self, start: int, stop: int) -> SectionRange:
        """Return the range of elements ``start`` to ``stop``."""
        ends = self._ends
        if start >= stop:
            return SectionRange(0, 0, None, None)
        first = bisect_right(ends, start) - 1
        last = bisect_right(ends, stop) - 1
        begin = ends[first]
        if last == first:
            return SectionRange(first, first, ArrayPart(first, start - begin, stop - begin), None)
        head = ArrayPart(first, start - begin, ends[first + 1] - begin) if start > begin else None
        tail = ArrayPart(last, 0, stop - ends[last]) if stop > ends[last] else None
        return SectionRange(first + (head is not None), last, head, tail)

    def lengths(self, chosen: SectionRange) -> list[int]:
        """Return the numbers of elements of the pieces of ``chosen``."""
        ends = self._ends[chosen.first : chosen.last + 1]
        whole = [stop - start for start, stop in pairwise(ends)]
        head, tail = ([part.stop - part.start] if part is not None else [] for part in (chosen.head, chosen.tail))
        return [*head, *whole, *tail]


def pack(pieces: list[Array], memory: Array) -> None:
    """Copy ``pieces`` one after another into ``memory``, which is as long as all of them."""
    if pieces:
        np.concatenate(pieces, out=memory)


def unpack(views: list[Array], pieces: list[Array]) -> None:
    """Copy ``views`` into ``pieces``, one by one."""
    deque(map(_assign, pieces, repeat(...), views), maxlen=0)


def cut(memory: Array, lengths: Sequence[int]) -> list[Array]:
    """Return views of ``memory`` of these lengths that follow one another."""
    return [memory[start:stop] for start, stop in pairwise([0, *accumulate(lengths)])]


class Form(NamedTuple):
    """Dtypes and shapes of a call's arrays, in its order: all that the layout depends on.

    ``dtypes`` is a single one if all arrays have it.  ``is_plain`` means that every array is C-contiguous.
    """

    dtypes: np.dtype[Any] | tuple[np.dtype[Any], ...]
    shapes: Shapes
    is_plain: bool


def check_arrays(arrays: object) -> list[Array]:
    """Return ``arrays`` as a list; raise unless collectives can write to all of them, naming the place in the list."""
    if isinstance(arrays, np.ndarray | str | bytes) or not hasattr(arrays, "__iter__"):
        raise UsageError(f"arrays: expected a list of numpy arrays, got {type(arrays).__name__}")
    listed = list(arrays)
    if set(map(type, listed)) != {np.ndarray}:
        listed = [check_array(array, f"arrays[{place}]") for place, array in enumerate(listed)]
    return listed


def form_of(arrays: list[Array]) -> Form:
    """Return the form of ``arrays``.  Raises ``UsageError`` for arrays that cannot be reduced in place."""
    kinds = set(map(_dtype_of, arrays))
    if not all(map(is_numeric, kinds)):
        for place, array in enumerate(arrays):
            check_array(array, f"arrays[{place}]")
    is_plain = all(map(_is_plain, arrays))
    if not is_plain:  # or not writable
        for place, array in enumerate(arrays):
            check_writable(array, f"arrays[{place}]")
    dtypes = kinds.pop() if len(kinds) == 1 else tuple(map(_dtype_of, arrays))
    return Form(dtypes, list(map(_shape_of, arrays)), is_plain)


def sections_of(form: Form) -> tuple[Section, ...]:
    """Return the sections, in the order in which their dtypes first occur.

    Arrays without elements are left out; if there are no others, there is one section without arrays.
    """
    dtypes = form.dtypes if isinstance(form.dtypes, tuple) else repeat(form.dtypes)
    members: dict[np.dtype[Any], list[tuple[int, int]]] = {}
    for place, (dtype, shape) in enumerate(zip(dtypes, form.shapes, strict=False)):
        size = math.prod(shape)
        if size:
            members.setdefault(dtype, []).append((place, size))
    if not members:
        return (Section(np.dtype(np.uint8), (), ()),)
    are_flat = all(len(shape) == 1 for shape in form.shapes)
    return tuple(
        Section(dtype, *zip(*found, strict=True), is_whole=are_flat and len(found) == len(form.shapes))
        for dtype, found in members.items()
    )


class Bundle:
    """Flat arrays of one call: the caller's own memory where possible, copies elsewhere.

    Create it when the operation begins; ``close`` writes copies back.
    """

    def __init__(self, arrays: list[Array], sections: Sequence[Section]) -> None:
        self._copied: list[tuple[Array, Array]] = []
        self.flats = [
            arrays if section.is_whole else [self._flat(arrays[member]) for member in section.members]
            for section in sections
        ]

    def close(self) -> None:
        """Write the copies back into the caller's arrays."""
        for array, flat in self._copied:
            array[...] = flat.reshape(array.shape)

    def _flat(self, array: Array) -> Array:
        if array.ndim == 1:
            return array
        flat = array.reshape(-1)
        if not array.flags.c_contiguous:
            self._copied.append((array, flat))
        return flat
