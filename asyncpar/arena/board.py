"""The memory in which the ranks of a group agree on the order of operations that are matched by name.

Theory of operation.  Every rank has a *board* in its own segment, which only it writes: two rings of numbers and a few
counts.  In its *announcements* a rank says what it is ready to run; in the *order* the rank at place 0, the
*sequencer*, says which operation has which turn (see ``keyed``).  Whoever appends to a ring writes entries first and the
count of all entries so far then.  Counts only grow, and a rank acts on those of others as it does on progress (see
``channel``): where memory is polled it looks at them; elsewhere it goes by what the doorbell told it, which covers the
entries.  No wake-up is lost, for the reason given there: whoever posts a count stores it, then a fence, then looks who
sleeps.

No entry is overwritten before it was read.  Whoever reads a ring counts what it has read, in its own board: each rank
one count for the order, the sequencer one for each rank's announcements.  The writer stays within ``RING`` entries of
the reader that is furthest behind.  These counts are posted only when half a ring has been read since.  That is often
enough: the ring of a writer that is stuck is full, and its reader, as soon as it reads at all, reads all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from asyncpar.arena.arena import Arena
from asyncpar.arena.channel import Offer
from asyncpar.arena.segment import SLEEPING

RING: Final = 256
"""Entries of a ring."""

SEQUENCER: Final = 0
"""The place in its group of the rank that gives operations their turns."""

Cell = memoryview | list[int]
"""A number of another rank, as far as this one may act on it, in element 0."""

_ANNOUNCED, _ORDERED, _TAKEN, _ANNOUNCEMENTS = 0, 1, 2, 8
_ORDER: Final = _ANNOUNCEMENTS + RING
_HEARD: Final = _ORDER + RING
_ALIGNMENT: Final = 128
_LAST: Final = 1 << 62
"""Set in the count of a ring when nothing will be appended to it any more."""


def behind_board(offer: Offer, size: int) -> Offer:
    """Return what is left of ``offer`` for a channel of ``size`` ranks when a board lies before it."""
    length = _board_bytes(size)
    return Offer(offer.offset + length, offer.slot_bytes - length // 2)


def _board_bytes(size: int) -> int:
    return -(-(_HEARD + size) * 8 // _ALIGNMENT) * _ALIGNMENT


class Counts(NamedTuple):
    """Counts of ``ranks`` that this rank is told of under ``number``; ``progress`` has them in the same order."""

    number: int
    ranks: tuple[int, ...]
    progress: list[Cell]


class Count:
    """A number of this rank, for ``readers``, who are told of it under ``number``."""

    def __init__(self, arena: Arena, word: memoryview, *, number: int, readers: Iterable[int]) -> None:
        self._arena = arena
        self._word = word
        self._number = number
        self._fence = threading.Lock()
        self._sleepers = [(arena.segments[reader].words(SLEEPING * 8, 1), reader) for reader in readers]

    def post(self, value: int) -> None:
        with self._fence:
            self._word[0] = value
        polls = self._arena.polls
        for sleeping, rank in self._sleepers:
            if not polls or sleeping[0]:
                self._arena.ring(rank, self._number, value)


class RingWriter:
    """Appends to a ring; ``read`` says how far each reader is."""

    def __init__(self, entries: memoryview, count: Count, read: Sequence[Cell]) -> None:
        self._entries = entries
        self._count = count
        self._read = read
        self._written = 0

    @property
    def room(self) -> int:
        """How many entries can be appended now."""
        return RING - self._written + min([cell[0] for cell in self._read], default=self._written)

    def append(self, entries: Sequence[int]) -> None:
        """Append what there must be room for."""
        for entry in entries:
            self._entries[self._written % RING] = entry
            self._written += 1
        self._count.post(self._written)

    def end(self) -> None:
        """Say that nothing will be appended any more."""
        self._count.post(self._written | _LAST)


class RingReader:
    """Reads what another rank has ``written`` to a ring, and counts that."""

    def __init__(self, entries: memoryview, written: Cell, count: Count) -> None:
        self.has_ended = False
        """Has everything been read, and will nothing follow?"""
        self._entries = entries
        self._written = written
        self._count = count
        self._read = self._posted = 0

    def read(self) -> list[int]:
        """Return the entries that are new."""
        written = self._written[0]
        if written == self._read:
            return []
        if written >= _LAST:
            self.has_ended = True
            written -= _LAST
        start, self._read = self._read, written
        new = [self._entries[at % RING] for at in range(start, written)]
        if written - self._posted >= RING // 2:
            self._posted = written
            self._count.post(written)
        return new

    def shows(self, entry: int) -> bool:
        """Is ``entry`` among the last that were written?"""
        return entry in self._entries.tolist()


class Board:
    """The boards of one group, as the rank at ``place`` sees them.

    ``offers`` are what the ranks have set aside for the group, by place; ``number`` is that of its channel.
    """

    def __init__(
        self, arena: Arena, *, number: int, ranks: Sequence[int], place: int, offers: Sequence[Offer]
    ) -> None:
        self.size = len(ranks)
        self.place = place
        self.is_sequencer = place == SEQUENCER
        self.counts: list[Counts] = []
        """What the doorbell tells."""
        self._arena = arena
        self._number = number
        self._ranks = tuple(ranks)
        words = _board_bytes(self.size) // 8
        self._words = [arena.segments[rank].words(offer.offset, words) for rank, offer in zip(ranks, offers, strict=True)]
        own = self._words[place]
        members = range(1, self.size)
        if self.is_sequencer:
            announced = self._watch(_ANNOUNCED, members)
            ...
