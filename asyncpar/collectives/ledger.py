"""The records of a group about its operations: sequence numbers, keys, and statistics of those that are over.  Pure.

The calls of a group are matched across ranks by numbers in their order, or by a ``key``.  Frames of an operation that
is over must be dropped, and frames of one that has not begun here must wait; so a ledger knows exactly, in bounded
memory, which numbers are over: numbers are allotted in ascending order, and all up to the last one are over unless they
are active.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, Self

import msgspec
import numpy as np

from asyncpar.core.tables import bytes_text, html_table, seconds_text, text_table
from asyncpar.errors import UsageError

KEYED = 1 << 63
"""Set in the sequence numbers of operations that are matched by name."""


def hash64(*parts: object) -> int:
    """Return a 64-bit number, never 0, that depends only on ``parts``: equal in all processes."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def world_number(generation: int) -> int:
    """Return the number of the group of all ranks."""
    return hash64("world", generation)


_REMEMBERED_KEYED = 4096
_REMEMBERED_OF_CLOSED = 256
_COUNTED_APART = 4096
_MASK = (1 << 64) - 1


class KnowsPast(Protocol):
    """The numbers of one group of operations that are past."""

    def is_past(self, sequence: int) -> bool:
        """Return whether this number has been allotted here."""
        ...


class Ledger(KnowsPast, Protocol):
    """The sequence numbers of one group of operations."""

    def next_numbers(self) -> list[int]:
        """Return the numbers that are allotted next, as far as they can be predicted."""
        ...

    def closed(self, failed: frozenset[int]) -> KnowsPast | None:
        """Return the record to keep of a group that is closed while the operations ``failed`` are in progress."""
        ...


class PastNumbers(msgspec.Struct, frozen=True):
    """The numbers that a closed group has allotted to operations that were over before it was closed."""

    last: int
    keyed: frozenset[int]
    failed: frozenset[int]

    def is_past(self, sequence: int) -> bool:
        if sequence in self.failed:
            return False
        return sequence in self.keyed if sequence & KEYED else sequence <= self.last


@lru_cache(1024)
def _past_numbers(last: int, keyed: frozenset[int], failed: frozenset[int]) -> PastNumbers:
    """Return one shared object per set of numbers: most groups that are closed have few."""
    return PastNumbers(last, keyed, failed)


class UseCounts:
    """Counts of the uses of many names; a name that was not used lately takes 12 bytes.

    Names are distinguished by 64-bit hashes: among a million names, two collide with probability 3e-8.
    """

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}
        self._names = np.empty(0, np.uint64)
        """Sorted hashes of names that were not used lately."""
        self._counts = np.empty(0, np.uint32)

    @property
    def nbytes(self) -> int:
        """Bytes of the names that were not used lately."""
        return self._names.nbytes + self._counts.nbytes

    def add(self, name: Hashable) -> int:
        """Count a use of ``name``; return its ordinal, from 1."""
        hashed = hash(name) & _MASK
        use = (self._recent.get(hashed) or self._count_of(hashed)) + 1
        self._recent[hashed] = use
        if len(self._recent) > _COUNTED_APART:
            self._pack()
        return use

    def _count_of(self, hashed: int) -> int:
        if not self._names.size:
            return 0
        place = int(np.searchsorted(self._names, np.uint64(hashed)))
        is_known = place < self._names.size and int(self._names[place]) == hashed
        return int(self._counts[place]) if is_known else 0

    def _pack(self) -> None:
        """Merge the recent names into the sorted ones."""
        names = np.fromiter(self._recent, np.uint64, len(self._recent))
        counts = np.fromiter(self._recent.values(), np.uint32, len(self._recent))
        order = np.argsort(names)
        names, counts = names[order], counts[order]
        places = np.searchsorted(self._names, names)
        is_known = np.zeros(len(names), np.bool_)
        inside = places < self._names.size
        is_known[inside] = self._names[places[inside]] == names[inside]
        self._counts[places[is_known]] = counts[is_known]
        is_new = ~is_known
        self._names = np.insert(self._names, places[is_new], names[is_new])
        self._counts = np.insert(self._counts, places[is_new], counts[is_new])
        self._recent.clear()


class GroupLedger:
    """The numbers of a communicator: 1, 2, 3, ... in the order of calls, and hashes of keys.

    The n-th use of a key has the same number on every rank: uses are counted where they are called, per rank and key,
    whether they succeed or fail.  So a rank that skips a use of a key which the others make, as after a failure that
    ends its step early, matches their (n+1)-th use with its n-th from then on.  Keys are counted while the group
    exists.
    """

    def __init__(self) -> None:
        self.last = 0
        """The number of the last call without a key.  A new call adds 1 and takes the result as its number."""
        self._uses = UseCounts()
        self._keyed: OrderedDict[int, None] = OrderedDict()

    def allot_keyed(self, key: str, active: Container[int]) -> tuple[int, int]:
        """Return the number of the next use of ``key``, and its ordinal.

        Numbers in ``active`` are not forgotten.
        """
        use = self._uses.add(key)
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

    def next_numbers(self) -> list[int]:
        """Return the number of the next call without a key."""
        return [self.last + 1]

    def closed(self, failed: frozenset[int]) -> PastNumbers:
        return _past_numbers(self.last, frozenset([*self._keyed][-_REMEMBERED_OF_CLOSED:]), failed)


def channel_number(group: int, source: int, dest: int) -> int:
    """Return the number of the channel for messages of ``group`` from rank ``source`` of the world to ``dest``."""
    return hash64("messages", group, source, dest)


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

    def next_numbers(self) -> list[int]:
        """Return the numbers of the next messages with the tags used so far, and with 0, the usual one."""
        return [tag << TAG_SHIFT | count for tag, count in ({0: 0} | self._next).items()]

    def closed(self, failed: frozenset[int]) -> Self | None:
        return self if self._next and not failed else None


class NameClaims:
    """Names that live objects of one rank have reserved for the keys of their collectives, by the number of the group.

    Two objects that derive equal keys from one name would exchange each other's data where ranks use them in different
    orders, and no check could detect it: so a name belongs to one live object at a time.

    An object owns a name until it releases it or is collected.
    """

    def __init__(self) -> None:
        self._owners: dict[tuple[int, str], weakref.ref[object]] = {}
        self._kinds: dict[tuple[int, str], str] = {}

    def claim(self, group: int, name: str, owner: object, *, kind: str, group_name: str) -> None:
        """Reserve ``name`` in ``group`` for ``owner``, which is a ``kind``.

        Raises ``UsageError`` while another object has it.
        """
        other = self._owner(group, name)
        if other is not None and other is not owner:
            other = None
            gc.collect()  # it may be garbage in a cycle
            other = self._owner(group, name)
        if other is not None and other is not owner:
            raise UsageError(
                f"name: {name!r} is the name of a live {self._kinds[group, name]} on the group {group_name!r}, with "
                f"whose messages those of this {kind} would be mixed up; give each a name of its own, the same on all "
                "ranks, or close the other one first"
            )
        place = group, name
        self._kinds[place] = kind
        self._owners[place] = weakref.ref(owner, lambda gone: self._forget(place, gone))

    def release(self, group: int, name: str, owner: object) -> None:
        """Release ``name``, if ``owner`` has it."""
        if self._owner(group, name) is owner:
            self._drop((group, name))

    def _owner(self, group: int, name: str) -> object | None:
        known = self._owners.get((group, name))
        return None if known is None else known()

    def _forget(self, place: tuple[int, str], gone: weakref.ref[object]) -> None:
        if self._owners.get(place) is gone:
            self._drop(place)

    def _drop(self, place: tuple[int, str]) -> None:
        del self._owners[place], self._kinds[place]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveStatistics:
    """Sums over the finished calls of one operation by one algorithm, on one rank.

    ``payload_bytes`` and ``messages`` count this rank's sends, without headers; ``steps`` the rounds of messages it
    took part in (one per piece and round); ``seconds`` run from the first await of a call to its end.
    """

    operation: str
    algorithm: str
    calls: int = 0
    payload_bytes: int = 0
    messages: int = 0
    steps: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return a table of one line, like those of ``Traffic``."""
        return text_table(_rows_of((self,)), left=2)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the table for notebooks."""
        return html_table(_rows_of((self,)))


def _rows_of(operations: Iterable[CollectiveStatistics]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("operation", "algorithm", "calls", "payload", "messages", "mean time")]
    for one in operations:
        mean = seconds_text(one.seconds / one.calls) if one.calls else "-"
        payload = bytes_text(one.payload_bytes)
        rows.append((one.operation, one.algorithm, f"{one.calls:,}", payload, f"{one.messages:,}", mean))
    return rows


LARGE_CALL_BYTES = 64 << 10
"""Calls that send less depend on latency more than on bandwidth: their rate is that of all calls together."""


class Tally(msgspec.Struct):
    """Running sums behind one ``CollectiveStatistics``; ``fastest`` is in bytes/s, of a call of 64 KiB or more."""

    calls: int = 0
    payload_bytes: int = 0
    messages: int = 0
    steps: int = 0
    seconds: float = 0.0
    fastest: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes/s that this rank was seen to send: in the fastest large call, else in all calls; 0 before any."""
        if self.fastest or self.seconds <= 0.0:
            return self.fastest
        return self.payload_bytes / self.seconds

    def snapshot(self, operation: str, algorithm: str) -> CollectiveStatistics:
        """Return the current sums."""
        return CollectiveStatistics(
            operation=operation,
            algorithm=algorithm,
            calls=self.calls,
            payload_bytes=self.payload_bytes,
            messages=self.messages,
            steps=self.steps,
            seconds=self.seconds,
        )


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """All statistics of a communicator at one moment."""

    operations: tuple[CollectiveStatistics, ...]

    def __str__(self) -> str:
        """Return a table: operations by algorithm, with calls, payload, messages and mean times."""
        return text_table(_rows_of(self.operations), left=2)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the table for notebooks."""
        return html_table(_rows_of(self.operations))

    @property
    def payload_bytes(self) -> int:
        """Payload bytes sent by all operations."""
        return sum(entry.payload_bytes for entry in self.operations)

    @property
    def messages(self) -> int:
        """Messages sent by all operations."""
        return sum(entry.messages for entry in self.operations)

    def of(self, operation: str, algorithm: str | None = None) -> CollectiveStatistics:
        """Return the statistics of ``operation``, by one algorithm or by all together."""
        chosen = [
            entry for entry in self.operations if entry.operation == operation and algorithm in (None, entry.algorithm)
        ]
        return CollectiveStatistics(
            operation=operation,
            algorithm=algorithm or "all",
            calls=sum(entry.calls for entry in chosen),
            payload_bytes=sum(entry.payload_bytes for entry in chosen),
            messages=sum(entry.messages for entry in chosen),
            steps=sum(entry.steps for entry in chosen),
            seconds=sum(entry.seconds for entry in chosen),
        )
