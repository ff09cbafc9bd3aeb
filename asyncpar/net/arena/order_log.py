"""The memory in which the ranks of a group agree on the order of operations that are matched by name.

Theory of operation.  Every rank has an *order log* in its own segment, which only it writes: two rings of numbers and a
few counts.  In its *announcements* a rank lists the operations that it is ready to run; in the *order* the rank at
place 0, the *sequencer*, assigns operations to turns (see ``sequencer``).  A rank that appends to a ring writes entries
first and then the count of all entries so far.  Counts only grow, and a rank acts on those of others as it does on
progress (see ``channel``): where memory is polled it reads them; elsewhere it relies on the values reported by the
doorbell, which cover the entries.  No wake-up is lost, for the reason given there: a rank that posts a count stores it,
then a fence, then checks which ranks sleep.

No entry is overwritten before it was read.  A rank that reads a ring counts the entries read, in its own order log:
each rank one count for the order, the sequencer one for each rank's announcements.  The writer stays within ``RING``
entries of the reader that is furthest behind.  These counts are posted only when half a ring has been read since.  That
is often enough: the ring of a writer that is stuck is full, and its reader, when it reads at all, reads all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from asyncpar.net.arena.arena import Arena
from asyncpar.net.arena.channel import Offer
from asyncpar.net.arena.segment import SLEEPING

RING: Final = 256
"""Entries of a ring."""

SEQUENCER: Final = 0
"""The place in its group of the rank that assigns turns."""

ANNOUNCED, ORDERED, TAKEN = 0, 1, 2
"""Words of an order log: entries in its announcements, entries in its order, and entries read of the order."""

_ANNOUNCEMENTS: Final = 8
_ORDER: Final = _ANNOUNCEMENTS + RING
ANNOUNCEMENTS_READ: Final = _ORDER + RING
"""The first of the words that count the announcements read of each rank, by place."""

_ALIGNMENT: Final = 128
_LAST: Final = 1 << 62
"""Set in the count of a ring once nothing more will be appended to it."""

PostedCount = memoryview | list[int]
"""A count, in element 0, as far as this rank may act on it."""


def behind_order_log(offer: Offer, size: int) -> Offer:
    """Return the rest of ``offer`` for the channel of ``size`` ranks after its order log."""
    length = _order_log_bytes(size)
    return Offer(offer.offset + length, offer.slot_bytes - length // 2)


def _order_log_bytes(size: int) -> int:
    return -(-(ANNOUNCEMENTS_READ + size) * 8 // _ALIGNMENT) * _ALIGNMENT


class Counts(NamedTuple):
    """Counts of ``ranks`` reported to this one under ``number``; ``progress`` has them in the same order."""

    number: int
    ranks: tuple[int, ...]
    progress: list[PostedCount]


class Count:
    """A number of this rank that is reported under ``number`` to ``readers``, ranks of the world."""

    def __init__(self, arena: Arena, word: memoryview, *, number: int, readers: Iterable[int]) -> None:
        self._arena = arena
        self._word = word
        self._number = number
        self._fence = threading.Lock()
        self._sleepers = [(arena.segments[reader].words(SLEEPING * 8, 1), reader) for reader in readers]

    def post(self, value: int) -> None:
        """Report ``value`` to the readers."""
        with self._fence:
            self._word[0] = value
        polls = self._arena.polls
        for sleeping, rank in self._sleepers:
            if not polls or sleeping[0]:
                self._arena.ring(rank, self._number, value)


class RingWriter:
    """Appends to a ring; ``read`` is the progress of each reader."""

    def __init__(self, entries: memoryview, count: Count, read: Sequence[PostedCount]) -> None:
        self._entries = entries
        self._count = count
        self._read = read
        self._written = 0

    @property
    def room(self) -> int:
        """The number of entries that can be appended now."""
        return RING - self._written + min([cell[0] for cell in self._read])

    def append(self, entries: Iterable[int]) -> None:
        """Append ``entries``, for which there must be room."""
        for entry in entries:
            self._entries[self._written % RING] = entry
            self._written += 1
        self._count.post(self._written)

    def end(self) -> None:
        """Announce that nothing more will be appended."""
        self._count.post(self._written | _LAST)


class RingReader:
    """Reads the entries that a ring's writer has ``written``; ``count`` reports the progress of this reader."""

    def __init__(self, entries: memoryview, written: PostedCount, count: Count) -> None:
        self.has_ended = False
        """Whether everything is read, and nothing follows."""
        self._entries = entries
        self._written = written
        self._count = count
        self._read = self._posted = 0

    def has_news(self) -> bool:
        """Return whether something has been written since this rank last read."""
        return self._written[0] & ~_LAST != self._read

    def read(self) -> list[int]:
        """Return the new entries."""
        written = self._written[0]
        if written == self._read:
            return []
        if written >= _LAST:
            self.has_ended = True
            written -= _LAST
        entries = [self._entries[at % RING] for at in range(max(self._read, written - RING), written)]
        self._read = written
        if written - self._posted >= RING // 2:
            self._posted = written
            self._count.post(written)
        return entries


class OrderLog:
    """The order logs of one group, as seen by the rank at ``place``.

    ``offers`` is the memory reserved by the ranks for the group, by place; ``number`` is that of its channel.
    """

    def __init__(self, arena: Arena, *, number: int, ranks: Sequence[int], place: int, offers: Sequence[Offer]) -> None:
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.place = place
        self.counts: list[Counts] = []
        """The counts of other ranks that this one reads."""
        self._arena = arena
        self._number = number
        words = _order_log_bytes(self.size) // 8
        segments = [arena.segments[rank] for rank in ranks]
        self._words = [segment.words(offer.offset, words) for segment, offer in zip(segments, offers, strict=True)]

    def announcements(self, place: int) -> memoryview:
        """Return the entries of a rank's announcements."""
        return self._words[place][_ANNOUNCEMENTS:_ORDER]

    def order(self, place: int) -> memoryview:
        """Return the entries of a rank's order."""
        return self._words[place][_ORDER:ANNOUNCEMENTS_READ]

    def own(self, at: int) -> memoryview:
        """Return a count of this rank: that of word ``at``."""
        return self._words[self.place][at : at + 1]

    def watch(self, at: int, places: Sequence[int]) -> list[PostedCount]:
        """Return the counts of other ranks in word ``at`` of their order logs."""
        polls = self._arena.polls
        cells: list[PostedCount] = [self._words[place][at : at + 1] if polls else [0] for place in places]
        ranks = tuple(self.ranks[place] for place in places)
        self.counts.append(Counts(self._number_of(at), ranks, cells))
        return cells

    def count(self, at: int, readers: Sequence[int]) -> Count:
        """Return the poster of this rank's count in word ``at`` to the ranks at the places ``readers``."""
        ranks = [self.ranks[place] for place in readers]
        return Count(self._arena, self.own(at), number=self._number_of(at), readers=ranks)

    def _number_of(self, at: int) -> int:
        """Return the number under which the doorbell reports word ``at``: its own, next to that of the channel."""
        return (self._number + 1 + at) & 0x7FFF_FFFF_FFFF_FFFF
