"""The memory of one group in the arena, in which its ranks report their progress to each other.

Theory of operation.  Every rank owns a *block* of eight words and two *slots* of payload per group, which only it
writes and all others of the group read.  The operations of a group take their turns one after another, in the order of
their sequence numbers; the turn of operation ``n`` uses slot ``n & 1`` and the words of that parity.

Progress is one word: ``sequence << ROUND_BITS | round``.  It only grows.  A rank publishes (copies into its slot), then
stores its progress; a rank that sees the progress may read the slot.  When a rank has finished operation ``n``, it
first stores how it ended (``ENDED``: completed or abandoned), then the progress ``n + 1, round 0``.  Therefore:

- *Readers see whole payloads.*  On x86 stores become visible in the order in which they were made and loads are done in
  order (total store order; Intel SDM 3A, 8.2.2; AMD APM 2, 7.2), and the operations of CPython and numpy between two
  statements are not reordered by a compiler.  Elsewhere progress is not polled: it travels through pipes, whose lock
  orders the memory of writer and reader (see ``arena``), and a rank acts only on progress *reported* to it.
- *Nothing is overwritten while it is still read.*  Before a rank touches slot and words of a parity for operation
  ``n``, every other rank has left the operation that used them last: its progress is beyond that.  Within an operation,
  each program has its own argument.
- *An operation that a rank abandons never looks completed.*  Progress beyond ``n`` counts as "has done its part in
  ``n``" only if ``ENDED`` says that ``n`` was completed there.  Otherwise the wait goes on until the failure is
  reported over the link.  ``ENDED`` of ``n`` cannot be overwritten while a rank is in ``n``, by the rule above.
- *Different calls do not mix.*  Each turn shows the fingerprint of its operation; data of another one is not read.

No wake-up is lost.  A rank that goes to sleep stores ``SLEEPING``, then a fence, then checks all progress once more; a
rank that posts stores its progress, then a fence, then checks ``SLEEPING``.  Stores and loads to different words may
pass each other on x86, but not across the fence, so at least one of the two sees the other's store (Dekker).  The fence
is taking and releasing a lock without contention: a locked instruction.  Where progress is not polled, every post
rings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from asyncpar.net.arena.arena import Arena
from asyncpar.net.arena.segment import SLEEPING

Array = npt.NDArray[Any]
T = TypeVar("T")

ROUND_BITS: Final = 24
BLOCK_WORDS: Final = 8
_PROGRESS, _ENDED, _FINGERPRINT, _PLACE = 0, 1, 3, 5


class Offer(NamedTuple):
    """Memory that a rank reserves for a group in its segment: offset of block and slots, bytes per slot (0: none)."""

    offset: int
    slot_bytes: int


class Channel:
    """One group's memory, as seen by the rank at ``place`` of the group.  ``offers`` are by place."""

    def __init__(self, arena: Arena, *, number: int, ranks: Sequence[int], place: int, offers: Sequence[Offer]) -> None:
        self.number = number
        self.ranks = tuple(ranks)
        self.place = place
        self.size = len(ranks)
        self.others = tuple(other for other in range(self.size) if other != place)
        self.slot_bytes = min(offer.slot_bytes for offer in offers)
        self.arena = arena
        segments = [arena.segments[rank] for rank in ranks]
        self.blocks = [
            segment.words(offer.offset, BLOCK_WORDS) for segment, offer in zip(segments, offers, strict=True)
        ]
        self.own = self.blocks[place]
        self.slots = [
            _slots(segment.array, offer, self.slot_bytes) for segment, offer in zip(segments, offers, strict=True)
        ]
        self.progress: list[memoryview | list[int]] = list(self.blocks) if arena.polls else [[0] for _ in ranks]
        self.used = [0, 0]
        self.cleared = 0
        """All others have left the operations up to this one."""
        self._fence = threading.Lock()
        self._sleepers = [(segments[other].words(SLEEPING * 8, 1), ranks[other]) for other in self.others]
        self._kept: dict[Hashable, Any] = {}

    def post(self, progress: int) -> None:
        """Report this rank's progress to the others."""
        with self._fence:
            self.own[_PROGRESS] = progress
        if self.arena.polls:
            for sleeping, rank in self._sleepers:
                if sleeping[0]:
                    self.arena.ring(rank, self.number, progress)
        else:
            for _, rank in self._sleepers:
                self.arena.ring(rank, self.number, progress)

    def is_clear(self, parity: int) -> bool:
        """Return whether all others have left the operation that last used this parity."""
        last = self.used[parity]
        if last > self.cleared:
            progress = self.progress
            self.cleared = min([progress[other][0] >> ROUND_BITS for other in self.others]) - 1
        return last <= self.cleared

    def whole(self, parity: int, dtype: np.dtype[Any]) -> list[Array]:
        """Return every rank's slot, by place, in elements of ``dtype``."""
        return self.views(parity, dtype, self.slot_bytes // dtype.itemsize)

    def views(self, parity: int, dtype: np.dtype[Any], count: int) -> list[Array]:
        """Return the first ``count`` elements of every rank's slot, by place."""
        length = count * dtype.itemsize
        return self.kept((parity, dtype, count), lambda: [slots[parity][:length].view(dtype) for slots in self.slots])

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of ``make`` for ``key``, cached if possible: views of slots are worth keeping."""
        found: Any = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[key] = make()
        return cast("T", found)


_MOST_KEPT: Final = 512


def _slots(array: Any, offer: Offer, length: int) -> tuple[Array, Array]:
    start = offer.offset + BLOCK_WORDS * 8
    return array(start, length, np.dtype(np.uint8)), array(start + offer.slot_bytes, length, np.dtype(np.uint8))


class Mismatch(Exception):  # noqa: N818
    """The rank at ``place`` of the group runs another operation at the same turn."""

    def __init__(self, place: int) -> None:
        super().__init__(f"place {place}")
        self.place = place


class Turn:
    """One operation's turn in its channel.  ``sequence`` is its number in the group, ``parity`` selects its slot.

    Programs post rounds 1, 2, 3, ... and wait until others have reached a round.
    """

    __slots__ = ("_base", "_limit", "_mark", "_record", "channel", "parity", "places_read", "sequence")

    def __init__(self, channel: Channel, sequence: int) -> None:
        self.channel = channel
        self.sequence = sequence
        self.parity = sequence & 1
        self.places_read: tuple[int, ...] = ()
        """Places whose heap buffers have been read, so that they must not have been abandoned meanwhile."""
        self._base = sequence << ROUND_BITS
        self._limit = self._base + (1 << ROUND_BITS)
        self._record = sequence << 1 | 1
        self._mark = 0

    def enter(self, fingerprint: int, place_in_heap: int | None = None) -> None:
        """Begin the turn, for which the channel must be clear; others find this rank's input at ``place_in_heap``."""
        channel, parity = self.channel, self.parity
        self._mark = (self.sequence & 0xFFFFFFFF) << 32 | fingerprint
        channel.used[parity] = self.sequence
        own = channel.own
        own[_FINGERPRINT + parity] = self._mark
        own[_PLACE + parity] = 0 if place_in_heap is None else place_in_heap + 1

    def post(self, round_: int) -> None:
        """Report to the others that this rank has completed round ``round_``."""
        self.channel.post(self._base + round_)

    def has_reached(self, places: Sequence[int], round_: int) -> bool:
        """Return whether the ranks at ``places`` have all completed this round.  Raises ``Mismatch``."""
        channel, parity = self.channel, self.parity
        progress, blocks = channel.progress, channel.blocks
        target = self._base + round_
        for place in places:
            word = progress[place][0]
            if word < target:
                return False
            block = blocks[place]
            if word >= self._limit and block[_ENDED + parity] != self._record:
                return False
            if block[_FINGERPRINT + parity] != self._mark:
                raise Mismatch(place)
        return True

    def is_unanimous(self, round_: int) -> bool:
        """Return whether all others have completed this round of the same operation; False if one runs another."""
        channel = self.channel
        try:
            if not self.has_reached(channel.others, round_):
                return False
        except Mismatch:
            return False
        channel.cleared = self.sequence - 1
        return True

    def missing(self, places: Sequence[int], round_: int) -> list[int]:
        """Return those of ``places`` that have not completed this round, including one that runs another operation."""
        channel, parity = self.channel, self.parity
        target = self._base + round_
        missing = []
        for place in places:
            word, block = channel.progress[place][0], channel.blocks[place]
            if word < target or (word >= self._limit and block[_ENDED + parity] != self._record):
                missing.append(place)
        return missing

    def place_in_heap(self, place: int) -> int | None:
        """Return the place of the input of the rank at ``place`` in its heap, None if it goes through its slot."""
        word = self.channel.blocks[place][_PLACE + self.parity]
        return word - 1 if word else None

    def places_in_heaps(self) -> list[int | None]:
        """Return the place of every rank's input in its heap; all of them must have posted."""
        channel = self.channel
        places = [self.place_in_heap(place) for place in range(channel.size)]
        self.places_read = tuple([other for other in channel.others if places[other] is not None])
        return places

    @property
    def uses_heaps(self) -> bool:
        """Whether the input of any rank is read directly from its heap."""
        return bool(self.places_read) or self.place_in_heap(self.channel.place) is not None

    def heap_array(self, place: int, start: int, dtype: np.dtype[Any], low: int, high: int) -> Array:
        """Return elements ``low`` to ``high`` of the input at ``start`` of the heap of the rank at ``place``."""
        segment = self.channel.arena.segments[self.channel.ranks[place]]
        return segment.heap_array(start + low * dtype.itemsize, high - low, dtype)

    def is_intact(self) -> bool:
        """Return whether none of the ranks whose heap was read has abandoned the operation."""
        channel, parity = self.channel, self.parity
        for place in self.places_read:
            word = channel.progress[place][0]
            if word >= self._limit and channel.blocks[place][_ENDED + parity] != self._record:
                return False
        return True

    def end(self, *, is_completed: bool) -> None:
        """Leave the operation; the channel must be clear if it was never entered."""
        channel = self.channel
        channel.used[self.parity] = self.sequence
        channel.own[_ENDED + self.parity] = self._record if is_completed else self._record - 1
        channel.post(self._limit)
