"""The memory that each rank reserves for each group in its segment, found without messages.

A rank that runs its first operation of a group on the arena writes an *offer* into the directory of its segment: the
location of the group's block and slots, and the length of a slot; 0 if it has no memory left.  The group works with the
smallest slot that a member offers; if that is none, it does without the arena.  All members see the same offers, so
they reach the same conclusion.

A rank that has ended a group *withdraws* its offer: it does not access memory of that group any more, its own or that
of others.  Once all others have done so, too, no rank reads the offered memory, and it is offered to another group.
Others have done so if their offers say so, or are no longer where they once were; a rank that has left accesses
nothing.  An offer is overwritten in steps: first its number is cleared, and the new one is written last; so the content
under a number always belongs to it (see ``channel`` about the order of stores).  Where memory is not polled, nothing is
given back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from asyncpar.net.arena.arena import Arena
from asyncpar.net.arena.channel import BLOCK_WORDS, Offer
from asyncpar.net.arena.segment import HEADER_BYTES

_ENTRIES: Final = 340
_ENTRY_WORDS: Final = 3
_COUNT, _IS_FULL, _FIRST = 0, 1, 8
_DIRECTORY_BYTES: Final = (_FIRST + _ENTRIES * _ENTRY_WORDS) * 8 // 64 * 64 + 64
_SMALLEST_SLOT: Final = 32 << 10
LARGEST_SLOT: Final = 2 << 20
_STEP: Final = 4096

NOTHING: Final = Offer(0, 0)

_WITHDRAWN: Final = 1 << 63
"""Set in the length of the slots of an offer that its owner has withdrawn."""

_FORMER_BYTES: Final = 64 << 10
"""Bytes cleared at the beginning of an offer for its next group: blocks, and order logs of thousands of ranks."""


class _Withdrawn(msgspec.Struct, frozen=True, kw_only=True):
    """The offer of this rank to the group ``number``; if that ``was_open``, all ``others`` have made offers."""

    number: int
    entry: int
    offer: Offer
    others: tuple[int, ...]
    was_open: bool


class Directory:
    """The directories of all ranks of an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._words = {
            rank: segment.words(HEADER_BYTES, _DIRECTORY_BYTES // 8) for rank, segment in arena.segments.items()
        }
        self._offers: dict[int, Offer] = {}
        self._entries: dict[int, int] = {}
        self._withdrawn: list[_Withdrawn] = []
        self._free_entries: list[int] = []
        self._free: list[Offer] = []
        self._rung: set[tuple[int, int]] = set()
        self._next = HEADER_BYTES + _DIRECTORY_BYTES
        self._ends = {rank: len(segment.control) for rank, segment in arena.segments.items()}

    def offer(self, number: int) -> Offer:
        """Reserve memory for the group ``number`` (once), and publish it; the caller rings."""
        offer = self._offers.get(number)
        if offer is not None:
            return offer
        offer = self._allot()
        self._offers[number] = offer
        own = self._words[self._arena.rank]
        count = own[_COUNT]
        if not self._has_entry():
            own[_IS_FULL] = 1
            return offer
        is_new = not self._free_entries
        entry = _FIRST + count * _ENTRY_WORDS if is_new else self._free_entries.pop()
        own[entry] = 0
        own[entry + 1] = offer.offset
        own[entry + 2] = offer.slot_bytes
        own[entry] = number
        if is_new:
            own[_COUNT] = count + 1
        self._entries[number] = entry
        return offer

    def close(self) -> None:
        """Release the memory of all ranks."""
        self._words.clear()

    def withdraw(self, number: int, ranks: Iterable[int], *, was_open: bool) -> None:
        """Withdraw the offer to the group ``number`` of ``ranks``, which ended here; ``was_open``: it had a channel.

        Its number must not be used again.  Once the memory is unmapped, no rank is notified.
        """
        offer, entry = self._offers.pop(number, NOTHING), self._entries.pop(number, None)
        if entry is None or not self._arena.polls or not self._words:
            return
        others = tuple(rank for rank in ranks if rank != self._arena.rank)
        self._words[self._arena.rank][entry + 2] |= _WITHDRAWN
        self._withdrawn.append(_Withdrawn(number=number, entry=entry, offer=offer, others=others, was_open=was_open))

    def record_ring(self, rank: int, number: int) -> None:
        """Record that ``rank`` has rung for the group ``number``, so its offer is there."""
        self._rung.add((rank, number))

    def find(self, rank: int, number: int) -> Offer | None:
        """Return the offer of ``rank`` to the group ``number``, None while it is not known, or after unmapping."""
        if rank == self._arena.rank:
            return self._offers.get(number)
        if not self._arena.polls and (rank, number) not in self._rung:
            return None
        if not self._words:
            return None
        words = self._words[rank]
        is_full = words[_IS_FULL]
        for index in range(min(words[_COUNT], _ENTRIES)):
            entry = _FIRST + index * _ENTRY_WORDS
            if words[entry] == number:
                offset, slot_bytes = words[entry + 1], words[entry + 2]
                return NOTHING if slot_bytes & _WITHDRAWN else self._checked(rank, Offer(offset, slot_bytes))
        return NOTHING if is_full else None

    def _allot(self) -> Offer:
        """Allocate a quarter of the free memory for each of two slots, or reuse a returned offer that is no smaller."""
        if not self._has_entry():
            return NOTHING
        self._reclaim()
        left = self._ends[self._arena.rank] - self._next
        block = BLOCK_WORDS * 8
        slot = min(max((left - block) // 4, _SMALLEST_SLOT) // _STEP * _STEP, LARGEST_SLOT)
        has_room = block + 2 * slot <= left
        former = max(self._free, key=lambda offer: offer.slot_bytes, default=NOTHING)
        if former.slot_bytes and (former.slot_bytes >= slot or not has_room):
            self._free.remove(former)
            self._clear(former)
            return former
        if not has_room:
            return NOTHING
        offer = Offer(self._next, slot)
        self._next += block + 2 * slot
        return offer

    def _has_entry(self) -> bool:
        """Return whether there is a place for another offer; once there is none, others know that none ever will be."""
        own = self._words[self._arena.rank]
        return not own[_IS_FULL] and (bool(self._free_entries) or own[_COUNT] < _ENTRIES)

    def _reclaim(self) -> None:
        """Reclaim the offers that no member accesses any more."""
        for former in list(self._withdrawn):
            if all(self._has_ended(former, rank) for rank in former.others):
                self._withdrawn.remove(former)
                self._free_entries.append(former.entry)
                if former.offer.slot_bytes:
                    self._free.append(former.offer)

    def _has_ended(self, former: _Withdrawn, rank: int) -> bool:
        """Return whether ``rank`` has ended that group, too."""
        words = self._words[rank]
        for index in range(min(words[_COUNT], _ENTRIES)):
            entry = _FIRST + index * _ENTRY_WORDS
            if words[entry] == former.number:
                return bool(words[entry + 2] & _WITHDRAWN)
        return former.was_open

    def _clear(self, offer: Offer) -> None:
        length = min(_FORMER_BYTES, BLOCK_WORDS * 8 + 2 * offer.slot_bytes)
        self._arena.segments[self._arena.rank].array(offer.offset, length, np.uint8).fill(0)

    def _checked(self, rank: int, offer: Offer) -> Offer:
        """Return ``offer``, or ``NOTHING`` if it points outside the segment of ``rank``."""
        end = offer.offset + BLOCK_WORDS * 8 + 2 * offer.slot_bytes
        is_inside = offer.offset >= HEADER_BYTES + _DIRECTORY_BYTES and end <= self._ends[rank]
        return offer if is_inside and offer.offset % 64 == 0 else NOTHING
