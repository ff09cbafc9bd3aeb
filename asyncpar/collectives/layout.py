"""Where chunks lie in memory, piece by piece.  Pure.

Theory of operation.  A long payload is cut into *pieces*, and the whole schedule runs once per piece, so that one piece
can travel while another is reduced.  There are two ways to cut.  *Along the buffer*: a piece is a range of elements,
and chunks are parts of it; for operations in which all elements are alike.  *Along the chunks*: chunks are given (one
per rank), and a piece is the same range of elements of each of them.

Chunks live in *regions*: flat arrays, numbered.  A ``Slice`` says which elements of which region.  Cut along the
buffer or spread over the chunks, they are where the user has them; *packed*, they lie one after another in a scratch
region that is as large as one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from asyncpar.core.config.slicing import ceil_chunks, ceil_div

SEGMENT_BYTES = 1 << 20
"""Most bytes of one message of one chunk."""

_SPLIT_BYTES = 256 << 10
"""A chunk of at least this size is cut in two at least, so that sending and reducing overlap."""

PACKED_BYTES = 4 << 20
"""Most bytes of scratch for one piece."""


class Slice(NamedTuple):
    """Elements ``start`` to ``stop`` of a region."""

    region: int
    start: int
    stop: int


NOWHERE = Slice(-1, 0, 0)
"""The place of a chunk that this rank does not hold."""


class Layout(Protocol):
    """Says where each chunk of a piece lies."""

    @property
    def pieces(self) -> int: ...

    def place(self, piece: int) -> tuple[Slice, ...]:
        """Return the slice of each chunk."""
        ...


def count_pieces(chunk_bytes: int, segment: int = SEGMENT_BYTES) -> int:
    """Return how many pieces chunks of this size are cut into: equal on all ranks, at least one."""
    pieces = ceil_div(chunk_bytes, segment)
    return 2 if pieces == 1 and chunk_bytes >= _SPLIT_BYTES else max(pieces, 1)


class AlongBuffer:
    """``count`` elements in region 0, cut into pieces, and each piece into ``chunks``.

    ``is_packed`` places each piece at the start of the region, which is then a scratch region.  ``segment`` is the most
    bytes of a chunk in one piece.
    """

    def __init__(
        self, *, count: int, chunks: int, itemsize: int, is_packed: bool = False, segment: int = SEGMENT_BYTES
    ) -> None:
        chunk_bytes = ceil_div(count, max(chunks, 1)) * itemsize
        bounds = ceil_chunks(count, count_pieces(chunk_bytes, segment))
        self._bounds = [bound for bound in bounds if bound[0] < bound[1]] or [(0, 0)]
        self._chunks = chunks
        self._is_packed = is_packed

    @property
    def pieces(self) -> int:
        return len(self._bounds)

    def bounds(self, piece: int) -> tuple[int, int]:
        """Return the elements of the buffer that ``piece`` covers."""
        return self._bounds[piece]

    def place(self, piece: int) -> tuple[Slice, ...]:
        start, stop = self._bounds[piece]
        base = 0 if self._is_packed else start
        return tuple(Slice(0, base + low, base + high) for low, high in ceil_chunks(stop - start, self._chunks))


class AlongChunks:
    """Chunks at given slices; a piece is the same part of each.

    ``longest`` is the number of elements of the longest chunk on any rank; all ranks must agree on it.
    """

    def __init__(self, slices: Sequence[Slice], *, longest: int, itemsize: int, segment: int = SEGMENT_BYTES) -> None:
        self._slices = tuple(slices)
        pieces = count_pieces(longest * itemsize, segment)
        self._step = max(ceil_div(longest, pieces), 1)
        self._pieces = max(ceil_div(longest, self._step), 1)

    @property
    def pieces(self) -> int:
        return self._pieces

    @property
    def step(self) -> int:
        """Elements of a chunk in one piece, at most."""
        return self._step

    def place(self, piece: int) -> tuple[Slice, ...]:
        return tuple(self._part(piece, chunk) for chunk in self._slices)

    def _part(self, piece: int, chunk: Slice) -> Slice:
        start = min(chunk.start + piece * self._step, chunk.stop)
        return Slice(chunk.region, start, min(start + self._step, chunk.stop))


class PackedChunks:
    """The pieces of another layout along chunks, packed into region 0 one chunk after another."""

    def __init__(self, spread: AlongChunks) -> None:
        self.spread = spread

    @property
    def pieces(self) -> int:
        return self.spread.pieces

    def place(self, piece: int) -> tuple[Slice, ...]:
        packed: list[Slice] = []
        end = 0
        for _, start, stop in self.spread.place(piece):
            packed.append(Slice(0, end, end + stop - start))
            end += stop - start
        return tuple(packed)


def packed_segment(chunks: int) -> int:
    """Return the segment size with which a packed piece of ``chunks`` chunks stays within bounds."""
    return max(min(SEGMENT_BYTES, PACKED_BYTES // max(chunks, 1)), 4096)
