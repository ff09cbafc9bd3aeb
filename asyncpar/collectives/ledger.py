"""Sequence numbers: who allots them, and which are over.  Pure.

Frames of an operation that is over must be dropped, and frames of one that has not begun here must wait; so a ledger
answers exactly, in bounded memory: numbers are allotted in ascending order, all up to the last one allotted are over
unless they are active.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Protocol

from asyncpar.collectives.description import KEYED, hash64

_REMEMBERED_KEYED = 4096


class Ledger(Protocol):
    """Knows the sequence numbers of one group of operations."""

    def is_past(self, sequence: int) -> bool:
        """Has this number been allotted here?"""
        ...


class GroupLedger:
    """The numbers of a communicator: 1, 2, 3, ... in the order of calls, and hashes of keys.

    The n-th use of a key has the same number on every rank: uses are counted where they are called, per rank and key,
    whether they succeed or fail.  So a rank that skips a use of a key which the others call, as after a failure that
    ends its step early, meets their (n+1)-th use with its n-th from then on.  A counter is kept per distinct key.
    """

    def __init__(self) -> None:
        self.last = 0
        self._uses: dict[str, int] = {}
        self._keyed: OrderedDict[int, None] = OrderedDict()

    def allot(self) -> int:
        """Return the next number."""
        self.last += 1
        return self.last

    def allot_keyed(self, key: str, active: Container[int]) -> tuple[int, int]:
        """Return the number of the next use of ``key``, and which use it is.

        Numbers in ``active`` are not forgotten.
        """
        use = self._uses[key] = self._uses.get(key, 0) + 1
        sequence = hash64(key, use) | KEYED
        self._keyed[sequence] = None
        while len(self._keyed) > _REMEMBERED_KEYED:
            oldest = next(iter(self._keyed))
            if oldest in active:
                break
            del self._keyed[oldest]
        return sequence, use

    def is_past(self, sequence: int) -> bool:
        return sequence in self._keyed if sequence & KEYED else sequence <= self.last


TAG_SHIFT = 47
LARGEST_TAG = (1 << 16) - 1


class ChannelLedger:
    """The numbers of messages from one rank to another: per tag 0, 1, 2, ..., with the tag in the upper bits."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def allot(self, tag: int) -> int:
        """Return the next number of ``tag``."""
        count = self._next.get(tag, 0)
        self._next[tag] = count + 1
        return tag << TAG_SHIFT | count

    def is_past(self, sequence: int) -> bool:
        tag, count = sequence >> TAG_SHIFT, sequence & ((1 << TAG_SHIFT) - 1)
        return count < self._next.get(tag, 0)
