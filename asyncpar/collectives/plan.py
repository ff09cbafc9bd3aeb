"""Bind schedules to memory: layouts of chunks, and messages with peers, tags and slices.  Pure.

Theory of operation.  A long payload is cut into *pieces*, and the whole schedule runs once per piece, so that one piece
is sent while another is reduced.  There are two ways to cut.  *Along the buffer*: a piece is a range of elements, and
chunks are parts of it; for operations in which all elements are alike.  *Along the chunks*: chunks are given (one per
rank), and a piece is the same range of elements of each of them.

Chunks live in *regions*: flat arrays, numbered.  A ``Slice`` is a range of elements of one region.  Cut along the
buffer or spread over the chunks, slices are in the user's memory; *packed*, they follow one another in a scratch region
that is as large as one piece.

Messages between two ranks are numbered in the order of the schedule, which both know; the tag of a message is that
number times the number of pieces, plus the piece.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from asyncpar.collectives.algorithms.steps import Copy, RankSchedule, Recv, Round, Send, Span, Spans
from asyncpar.core.config.slicing import ceil_chunks, ceil_div
from asyncpar.errors import UsageError

SEGMENT_BYTES = 1 << 20
"""Maximum number of bytes of one chunk in one message."""

_SPLIT_BYTES = 256 << 10
"""A chunk of at least this many bytes is cut at least in two, so that sending and reducing overlap."""

PACKED_BYTES = 4 << 20
"""Maximum number of bytes of scratch for one piece."""

SEGMENT_LIMITS: Final = (4 << 10, 2 << 20)
_SEGMENT: Final = re.compile(r"([1-9]\d{0,6})([km])", re.ASCII)
_UNITS: Final = {"k": 1 << 10, "m": 1 << 20}


def parse_segment(text: str) -> int:
    """Parse a segment size such as ``256k`` or ``1m`` into bytes; it must be 4k to 2m, else ``UsageError``."""
    match = _SEGMENT.fullmatch(text)
    least, most = SEGMENT_LIMITS
    if match is None or not least <= (size := int(match[1]) * _UNITS[match[2]]) <= most:
        raise UsageError(f"algorithm: expected messages of 4k to 2m, such as ring/256k, got {text!r}")
    return size


def split_segment(algorithm: str) -> tuple[str, int | None]:
    """Split ``algorithm``, such as ``ring/256k``, into its name and the maximum bytes of a chunk in one message."""
    name, slash, segment = algorithm.partition("/")
    return name, parse_segment(segment) if slash else None


class Slice(NamedTuple):
    """Elements ``start`` to ``stop`` of a region."""

    region: int
    start: int
    stop: int


NOWHERE = Slice(-1, 0, 0)
"""The place of a chunk that this rank does not hold."""


class ChunkLayout(Protocol):
    """The place of each chunk of a piece."""

    @property
    def pieces(self) -> int: ...

    def place(self, piece: int) -> tuple[Slice, ...]:
        """Return the slice of each chunk."""
        ...


def count_pieces(chunk_bytes: int, segment: int = SEGMENT_BYTES) -> int:
    """Return the number of pieces that chunks of this size are cut into: equal on all ranks, at least one."""
    pieces = ceil_div(chunk_bytes, segment)
    return 2 if pieces == 1 and chunk_bytes >= _SPLIT_BYTES else max(pieces, 1)


class AlongBuffer:
    """``count`` elements in region 0, cut into pieces, and each piece into ``chunks``.

    ``is_packed`` places each piece at the start of the region, which is then a scratch region.  ``segment`` is the
    maximum number of bytes of a chunk in one piece.
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
        """Return the range of elements of the buffer that ``piece`` covers."""
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
        """Maximum number of elements of a chunk in one piece."""
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
    """Return the segment size with which a packed piece of ``chunks`` chunks stays within ``PACKED_BYTES``."""
    return max(min(SEGMENT_BYTES, PACKED_BYTES // max(chunks, 1)), 4096)


PHASE_TAGS = 1 << 27
"""Number of tags for one run of a schedule; a second run in the same operation begins at this tag."""

_KEPT_PIECES = 64
"""Plans with more pieces bind them on demand, so that a plan stays small."""


class BoundSend(msgspec.Struct, frozen=True):
    """Send the elements of ``slices`` to ``peer`` (a rank of the world)."""

    peer: int
    tag: int
    slices: tuple[Slice, ...]


class BoundRecv(msgspec.Struct, frozen=True):
    """Receive the elements of ``slices``, ``count`` in all, from ``peer`` (a rank of the world).

    ``is_lower`` means that the peer comes before this rank, and so does its operand.  ``is_early`` means that the
    receive may be posted a round early, because nothing touches its memory in that round.
    """

    peer: int
    tag: int
    slices: tuple[Slice, ...]
    count: int
    reduce: bool
    is_lower: bool
    is_early: bool


class BoundRound(msgspec.Struct, frozen=True):
    """The messages of one round."""

    sends: tuple[BoundSend, ...]
    receives: tuple[BoundRecv, ...]
    copies: tuple[tuple[tuple[Slice, ...], tuple[Slice, ...]], ...]
    early: tuple[BoundRecv, ...]
    """Receives of the next round that may be posted in this one."""


class Plan:
    """A schedule bound to a layout, for one rank of a group whose ranks in the world are ``ranks``."""

    def __init__(
        self, schedule: RankSchedule, layout: ChunkLayout, *, rank: int, ranks: Sequence[int], phase: int = 0
    ) -> None:
        self.pieces = layout.pieces
        self.steps = len(schedule.rounds)
        self._schedule = schedule
        self._layout = layout
        self._rank = rank
        self._ranks = ranks
        self._first_tag = phase * PHASE_TAGS
        self._early = [_may_be_early(schedule.rounds, index) for index in range(len(schedule.rounds))]
        self.bound: dict[int, tuple[BoundRound, ...]] = {}
        """The rounds of pieces that are already bound; ``bind`` makes the others."""

    def bind(self, piece: int) -> tuple[BoundRound, ...]:
        """Return the rounds of ``piece``."""
        rounds = self.bound.get(piece)
        if rounds is None:
            rounds = self._bind(piece)
            if self.pieces <= _KEPT_PIECES:
                self.bound[piece] = rounds
        return rounds

    def _bind(self, piece: int) -> tuple[BoundRound, ...]:
        place = self._layout.place(piece)
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        rounds = self._schedule.rounds
        receives = [
            self._bind_receives(steps, place, received, piece, is_early)
            for steps, is_early in zip(rounds, self._early, strict=True)
        ]
        return tuple(
            BoundRound(
                sends=self._bind_sends(steps, place, sent, piece),
                receives=receives[index],
                copies=_bind_copies(steps, place),
                early=tuple(receive for receive in receives[index + 1] if receive.is_early)
                if index + 1 < len(rounds)
                else (),
            )
            for index, steps in enumerate(rounds)
        )

    def _tag(self, ordinal: int, piece: int) -> int:
        tag = ordinal * self.pieces + piece
        assert tag < PHASE_TAGS, f"message {ordinal} of piece {piece} has no tag"
        return self._first_tag + tag

    def _bind_sends(
        self, steps: Round, place: Sequence[Slice], counts: dict[int, int], piece: int
    ) -> tuple[BoundSend, ...]:
        sends: list[BoundSend] = []
        for step in steps:
            if isinstance(step, Send):
                ordinal = counts.get(step.peer, 0)
                counts[step.peer] = ordinal + 1
                sends.append(BoundSend(self._ranks[step.peer], self._tag(ordinal, piece), _slices(step.chunks, place)))
        return tuple(sends)

    def _bind_receives(
        self, steps: Round, place: Sequence[Slice], counts: dict[int, int], piece: int, is_early: bool
    ) -> tuple[BoundRecv, ...]:
        receives: list[BoundRecv] = []
        for step in steps:
            if isinstance(step, Recv):
                ordinal = counts.get(step.peer, 0)
                counts[step.peer] = ordinal + 1
                slices = _slices(step.chunks, place)
                receives.append(
                    BoundRecv(
                        peer=self._ranks[step.peer],
                        tag=self._tag(ordinal, piece),
                        slices=slices,
                        count=sum(stop - start for _, start, stop in slices),
                        reduce=step.reduce,
                        is_lower=step.peer < self._rank,
                        is_early=is_early or step.reduce,
                    )
                )
        return tuple(receives)


def _slices(chunks: Spans, place: Sequence[Slice]) -> tuple[Slice, ...]:
    """Return the slices of ``chunks`` in order, with neighbours joined and empty ones left out."""
    slices: list[Slice] = []
    for span in chunks:
        for chunk in range(*span):
            region, start, stop = place[chunk]
            if start == stop:
                continue
            if slices and slices[-1].region == region and slices[-1].stop == start:
                slices[-1] = Slice(region, slices[-1].start, stop)
            else:
                slices.append(Slice(region, start, stop))
    return tuple(slices)


def _bind_copies(steps: Round, place: Sequence[Slice]) -> tuple[tuple[tuple[Slice, ...], tuple[Slice, ...]], ...]:
    return tuple(
        (_slices((step.source,), place), _slices((step.target,), place)) for step in steps if isinstance(step, Copy)
    )


def _may_be_early(rounds: Sequence[Round], index: int) -> bool:
    """Return whether the plain receives of round ``index`` may be posted in the round before."""
    if index == 0:
        return False
    written = {
        chunk for step in rounds[index] if isinstance(step, Recv) and not step.reduce for chunk in _of(step.chunks)
    }
    touched: set[int] = set()
    for step in rounds[index - 1]:
        if isinstance(step, Copy):
            touched.update(range(*step.source), range(*step.target))
        else:
            touched.update(_of(step.chunks))
    return not written & touched


def _of(chunks: tuple[Span, ...]) -> list[int]:
    return [chunk for span in chunks for chunk in range(*span)]
