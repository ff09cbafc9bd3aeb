"""What each rank sets aside for each group in its segment: found without asking anyone.

A rank that runs its first operation of a group on the arena writes an *offer* into the directory of its segment: where
the group's block and slots lie, and how long a slot is; 0 when it has no memory left.  Offers are never taken back.
The group works with the smallest slot that anybody offers; if that is none, it does without the arena.  All members
see the same offers, so they come to the same conclusion.
"""

from __future__ import annotations

from typing import Final

from asyncpar.arena.arena import Arena
from asyncpar.arena.channel import BLOCK_WORDS, Offer
from asyncpar.arena.segment import HEADER_BYTES

_ENTRIES: Final = 340
_ENTRY_WORDS: Final = 3
_COUNT, _IS_FULL, _FIRST = 0, 1, 8
_DIRECTORY_BYTES: Final = (_FIRST + _ENTRIES * _ENTRY_WORDS) * 8 // 64 * 64 + 64
_SMALLEST_SLOT: Final = 32 << 10
LARGEST_SLOT: Final = 2 << 20
_STEP: Final = 4096

NOTHING: Final = Offer(0, 0)


class Directory:
    """The directories of all ranks of an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._words = {
            rank: segment.words(HEADER_BYTES, _DIRECTORY_BYTES // 8) for rank, segment in arena.segments.items()
        }
        self._offers: dict[int, Offer] = {}
        self._told: set[tuple[int, int]] = set()
        self._next = HEADER_BYTES + _DIRECTORY_BYTES
        self._ends = {rank: len(segment.control) for rank, segment in arena.segments.items()}

    def offer(self, number: int) -> Offer:
        """Set memory aside for the group ``number`` (once), and let everyone see it; the caller rings."""
        offer = self._offers.get(number)
        if offer is not None:
            return offer
        offer = self._allot()
        self._offers[number] = offer
        own = self._words[self._arena.rank]
        count = own[_COUNT]
        if count == _ENTRIES:
            own[_IS_FULL] = 1
            return offer
        entry = _FIRST + count * _ENTRY_WORDS
        own[entry], own[entry + 1], own[entry + 2] = number, offer.offset, offer.slot_bytes
        own[_COUNT] = count + 1
        return offer

    def told(self, rank: int, number: int) -> None:
        """``rank`` has rung for the group ``number``, so its offer is there."""
        self._told.add((rank, number))

    def find(self, rank: int, number: int) -> Offer | None:
        """Return what ``rank`` offers the group ``number``, None while it has not said."""
        if rank == self._arena.rank:
            return self._offers.get(number)
        if not self._arena.polls and (rank, number) not in self._told:
            return None
        words = self._words[rank]
        is_full = words[_IS_FULL]
        for index in range(min(words[_COUNT], _ENTRIES)):
            entry = _FIRST + index * _ENTRY_WORDS
            if words[entry] == number:
                return self._checked(rank, Offer(words[entry + 1], words[entry + 2]))
        return NOTHING if is_full else None

    def _allot(self) -> Offer:
        """Take a quarter of what is left for each of two slots, so that many groups find something."""
        left = self._ends[self._arena.rank] - self._next
        block = BLOCK_WORDS * 8
        slot = min(max((left - block) // 4, _SMALLEST_SLOT) // _STEP * _STEP, LARGEST_SLOT)
        if len(self._offers) >= _ENTRIES or block + 2 * slot > left:
            return NOTHING
        offer = Offer(self._next, slot)
        self._next += block + 2 * slot
        return offer

    def _checked(self, rank: int, offer: Offer) -> Offer:
        """Return ``offer``, or nothing if it points outside of the segment of ``rank``."""
        end = offer.offset + BLOCK_WORDS * 8 + 2 * offer.slot_bytes
        is_inside = offer.offset >= HEADER_BYTES + _DIRECTORY_BYTES and end <= self._ends[rank]
        return offer if is_inside and offer.offset % 64 == 0 else NOTHING
