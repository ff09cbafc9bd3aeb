"""Ranks meet through a store of torch: each says who it is and where it listens, and learns that of the others.

Theory of operation.  A store outlives a meeting (the agent of torchrun keeps one for all worlds of its ranks), so
meetings are numbered: the n-th time that a rank comes is its n-th meeting.  In a meeting each rank writes its hello;
rank 0 reads them all, compares, and writes the roster; then each rank, which now knows whether all are on one host,
writes where it listens, and rank 0 writes the end: all addresses.  Instead, any rank may write the end at any time, as
a refusal: because time is up, or it failed.  The end is written once, so all ranks come to the same one, and whoever
waits looks for it.

A rank that comes although its last meeting has no end is there twice.  Rank 0, whose process often holds the store,
goes last: it waits a moment until the others have read the end.

Everything here blocks.  Stores are asked in short calls only, since several ranks may share one, and since one that
waits cannot be stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from asyncpar.errors import AsyncparError, UsageError
from asyncpar.torch.roll_call import (
    Charter,
    End,
    Hello,
    Refusal,
    Roster,
    absent,
    came_twice,
    decode,
    encode,
    error_of,
    failed,
    find_disagreement,
    find_unreachable,
)
from asyncpar.transport.rpc import is_loopback, split_address

T = TypeVar("T")

Store = Any
"""A ``torch.distributed.Store``."""

_PREFIX = "asyncpar"
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05
_PAUSE_PER_RANK = 0.0001
_SEE_OFF_SECONDS = 1.0
"""How long rank 0 waits for those who came to read how the meeting ended."""


class Stopped(Exception):  # noqa: N818
    """The meeting was stopped from outside; who stopped it knows why."""


class StoreMeeting:
    """The part of one rank in a meeting of ``size`` ranks, which is over ``timeout`` seconds from now.

    In this order: ``enter``, ``call_roll``, ``exchange``; if something else goes wrong, ``refuse``.  Each raises what
    the meeting came to, if it came to nothing: ``PeerTimeout``, ``PeerLost`` or ``UsageError``, the same on all ranks.
    Use it from one thread at a time; ``stop`` is for another.  A store that fails raises its ``RuntimeError``.
    """

    def __init__(self, store: Store, *, rank: int, size: int, timeout: float) -> None:
        self.number = 0
        """Which meeting of this store it is; 0 before ``enter``."""
        self.is_over = False
        """Has it ended, as far as this rank knows?  Then there is nothing to refuse."""
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._longest_pause = _LONGEST_PAUSE + size * _PAUSE_PER_RANK
        self._is_stopped = threading.Event()
        self._guests: dict[int, Hello] = {}

    def stop(self) -> None:
        """End whatever waits in another thread: it raises ``Stopped``."""
        self._is_stopped.set()

    # -- what ranks do -----------------------------------------------------------------------------------------------

    def enter(self, place: str) -> None:
        """Come to the next meeting, from ``place``.  Raises ``UsageError`` if this rank is there already."""
        number = self._store.add(self._counter, 1)
        if number > 1:
            self.number = number - 1
            self._check_is_alone(place)
        self.number = number
        self._store.set(self._key("place", self._rank), place)

    def call_roll(self, hello: Hello, charter: Charter) -> Roster:
        """Return who came, once all have.  The charter is that of rank 0; the number of the meeting is added to it."""
        self._store.set(self._key("hello", self._rank), encode(hello))
        if self._rank != 0:
            return self._check_belongs(self._wait_for(self._find_roster, self._without_hello, deed="come"))
        guests = self._wait_for(self._find_hellos, self._without_hello, deed="come")
        roster = Roster(guests=guests, charter=replace(charter, generation=charter.generation + self.number))
        self._store.set(self._key("roster"), encode(roster))
        return roster

    def exchange(self, roster: Roster, address: str) -> tuple[str, ...]:
        """Return where all ranks listen; this one does at ``address``."""
        self._guests = {guest.rank: guest for guest in roster.guests}
        self._store.set(self._key("address", self._rank), address)
        if self._rank == 0:
            addresses = self._wait_for(self._find_addresses, self._without_address, deed="said where to find it")
            refusal = find_unreachable(roster, [is_loopback(split_address(where)[0]) for where in addresses])
            self._write_end(End(addresses=addresses, refusal=refusal))
        return self._wait_for(self._find_end, self._without_address, deed="said where to find it")

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this rank takes no part because of ``error``, unless the meeting is over anyway."""
        if self.number and not self.is_over:
            self._write_end(End(refusal=failed(self._rank, error)))
            self._leave()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait_for(self, look: Callable[[], T | None], who_is_missing: Callable[[], list[int]], *, deed: str) -> T:
        """Return what ``look`` finds, looking again and again.  When time is up the meeting ends."""
        pause = _FIRST_PAUSE
        while (found := look()) is None:
            left = self._deadline - time.monotonic()
            if left <= 0.0:
                self._write_end(End(refusal=self._lateness(who_is_missing(), deed)))
            elif self._is_stopped.wait(min(pause, left)):
                raise Stopped
            pause = min(2 * pause, self._longest_pause)
        return found

    def _lateness(self, missing: list[int], deed: str) -> Refusal:
        if not missing:
            return absent([0], size=self._size, timeout=self._timeout, deed="answered")
        return absent(missing, size=self._size, timeout=self._timeout, deed=deed)

    # -- looking -----------------------------------------------------------------------------------------------------

    def _find_end(self) -> tuple[str, ...] | None:
        """Return all addresses if the meeting has ended; raise why there are none."""
        end = self._read("end", End)
        return None if end is None else self._obey(end)

    def _find_roster(self) -> Roster | None:
        roster = self._read("roster", Roster)
        if roster is None:
            self._find_end()
        return roster

    def _find_hellos(self) -> tuple[Hello, ...] | None:
        """Return all hellos; those that disagree end the meeting."""
        self._find_end()
        for rank in self._there("hello", set(range(self._size)) - set(self._guests)):
            self._guests[rank] = decode(self._store.get(self._key("hello", rank)), Hello)
            refusal = find_disagreement(list(self._guests.values()))
            if refusal is not None:
                self._write_end(End(refusal=refusal))
                self._find_end()
        if len(self._guests) < self._size:
            return None
        return tuple(self._guests[rank] for rank in range(self._size))

    def _find_addresses(self) -> tuple[str, ...] | None:
        self._find_end()
        keys = [self._key("address", rank) for rank in range(self._size)]
        return tuple(self._store.get(key).decode() for key in keys) if self._store.check(keys) else None

    def _without_hello(self) -> list[int]:
        return self._without("hello")

    def _without_address(self) -> list[int]:
        return self._without("address")

    def _without(self, what: str) -> list[int]:
        there = set(self._there(what, range(self._size)))
        return [rank for rank in range(self._size) if rank not in there]

    def _there(self, what: str, ranks: Iterable[int]) -> list[int]:
        """Return which of ``ranks`` have written ``what``."""
        keys = {rank: self._key(what, rank) for rank in sorted(ranks)}
        if not keys or self._store.check(list(keys.values())):
            return list(keys)
        return [rank for rank, key in keys.items() if self._store.check([key])]

    def _read(self, what: str, kind: type[T]) -> T | None:
        key = self._key(what)
        return decode(self._store.get(key), kind) if self._store.check([key]) else None

    # -- ending ------------------------------------------------------------------------------------------------------

    def _write_end(self, end: End) -> End:
        """End the meeting with ``end``, unless it has ended; return how it did."""
        content = self._store.compare_set(self._key("end"), "", encode(end))
        return decode(content, End)

    def _obey(self, end: End) -> tuple[str, ...]:
        """Return all addresses, or raise why there are none."""
        self.is_over = True
        self._leave()
        if end.refusal is not None:
            raise self._error(end.refusal)
        return end.addresses

    def _leave(self) -> None:
        """Say that this rank needs the store no more.  The store may be gone already, with the process that held it."""
        with suppress(RuntimeError):
            self._store.set(self._key("left", self._rank), "")
            if self._rank == 0:
                self._see_off()

    def _see_off(self) -> None:
        """Wait a moment until all who came have read the end: the store may go away with this process."""
        left = time.monotonic() + _SEE_OFF_SECONDS
        keys = [self._key("left", rank) for rank in self._there("hello", range(self._size))]
        pause = _FIRST_PAUSE
        while not self._store.check(keys) and time.monotonic() < left and not self._is_stopped.wait(pause):
            pause = min(2 * pause, self._longest_pause)

    def _error(self, refusal: Refusal) -> AsyncparError:
        note = "" if self.number == 1 else f" (it came to meeting {self.number} of this store)"
        hosts = {rank: guest.host for rank, guest in self._guests.items()}
        return error_of(refusal, rank=self._rank, hosts=hosts, note=note)

    def _check_is_alone(self, place: str) -> None:
        """See that the last meeting of this rank has ended; if it has not, it ends now: the rank is there twice."""
        if self._store.check([self._key("end")]):
            return
        key = self._key("place", self._rank)
        other = self._store.get(key).decode() if self._store.check([key]) else "a process that was just coming"
        refusal = came_twice(self._rank, [other, place])
        if self._write_end(End(refusal=refusal)).refusal == refusal:
            self._store.add(self._counter, -1)
            self.is_over = True
            raise self._error(refusal)

    def _check_belongs(self, roster: Roster) -> Roster:
        """See that rank 0 knew of this rank; it does not read the hellos of more ranks than it expects."""
        if len(roster.guests) != self._size:
            self.is_over = True
            raise UsageError(
                f"world_size: the others are {len(roster.guests)}, rank {self._rank} came as one of {self._size}"
            )
        return roster

    # -- keys --------------------------------------------------------------------------------------------------------

    @property
    def _counter(self) -> str:
        return f"{_PREFIX}/came/{self._rank}"

    def _key(self, *what: object) -> str:
        return "/".join([_PREFIX, str(self.number), *map(str, what)])
