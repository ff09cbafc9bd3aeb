"""Ranks meet through a store of torch: each says who it is and where it listens, and learns that of the others.

Theory of operation.  In a meeting each rank writes its hello; rank 0 reads them all, compares, and writes the roster;
then each rank, which now knows whether all are on one host, writes where it listens, and rank 0 writes the end: all
addresses.  Instead, any rank may write the end at any time, as a refusal: because time is up, or because it failed.
The end is written once, so all come to the same one, and whoever waits looks for it.  Rank 0, whose process often holds
the store, goes last: it waits a moment until the others have read the end.

A store outlives meetings (the agent of torchrun keeps one for all worlds of its ranks, also when it starts them anew),
so meetings are numbered, and a rank comes to the first one that it has not been to.  If that has ended without it, it
is told how, unless that was before the ranks were started anew, or others are in the next meeting already.

A rank that finds itself in a meeting which has not ended is there twice, or has died there.  If it was there before it
was started anew, it has died.  Else it knocks.  Whoever is there and waits sees that, and ends the meeting with a
refusal that names both.  If nobody answers the meeting is abandoned: all go to the next.

How often ranks were started anew says something about one rank only: the agents of torchrun count each for itself.

Everything here blocks.  Stores are asked in short calls only, since several ranks may share one, and since one that
waits cannot be stopped.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from asyncpar.errors import AsyncparError, UsageError
from asyncpar.net.transport.rpc import is_loopback, split_address
from asyncpar.torch.meeting.board import Board, Bookmark, Store
from asyncpar.torch.meeting.roll_call import (
    Charter,
    End,
    Hello,
    Place,
    Refusal,
    RefusalKind,
    Roster,
    abandoned,
    absent,
    came_twice,
    encode,
    error_of,
    failed,
    find_disagreement,
    find_unreachable,
)

T = TypeVar("T")

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05
_PAUSE_PER_RANK = 0.0001

EXCHANGE_SECONDS = 60.0
"""How long ranks that were all there a moment ago may take to say where they listen."""

ANSWER_SECONDS = 5.0
"""How long a rank that is alive may take to answer another that came in its place."""

_SEE_OFF_SECONDS = 1.0
"""How long rank 0 waits for those who came to read how the meeting ended."""


class Stopped(Exception):  # noqa: N818
    """The meeting was stopped from outside; who stopped it knows why."""


class Abandoned(Exception):  # noqa: N818
    """Somebody in the meeting is dead: enter again, to come to the next one."""


class StoreMeeting:
    """The part of one rank in a meeting of ``size`` ranks, which is over ``timeout`` seconds from now.

    In this order: ``enter``, ``call_roll``, ``exchange``; if something else goes wrong, ``refuse``.  Each raises what
    the meeting came to, if it came to nothing: ``PeerTimeout``, ``PeerLost`` or ``UsageError``, the same on all ranks;
    or ``Abandoned``.  Use it from one thread at a time; ``stop`` is for another.  A store that fails raises its
    ``RuntimeError``.  ``attempt`` grows when the ranks are started anew.
    """

    def __init__(self, store: Store, *, rank: int, size: int, timeout: float, attempt: int = 0) -> None:
        self.is_over = True
        """Is there nothing to refuse: has the meeting ended, as far as this rank knows, or not begun?"""
        self._store = store
        self._board = Board(store, 0)
        self._rank = rank
        self._size = size
        self._attempt = attempt
        self._timeout = self._patience = timeout
        self._over_at = self._deadline = time.monotonic() + timeout
        self._longest_pause = _LONGEST_PAUSE + size * _PAUSE_PER_RANK
        self._is_stopped = threading.Event()
        self._place = ""
        self._guests: dict[int, Hello] = {}

    def stop(self) -> None:
        """End whatever waits in another thread: it raises ``Stopped``."""
        self._is_stopped.set()

    # -- what ranks do -----------------------------------------------------------------------------------------------

    def enter(self, place: str) -> None:
        """Come to the next meeting, from ``place``.  Raises ``UsageError`` if this rank is there already."""
        self._place, self._guests = place, {}
        self._patience, self._deadline = self._timeout, self._over_at
        mine = Place(token=secrets.token_hex(8), name=place, attempt=self._attempt)
        bookmark = Bookmark(self._store, self._rank)
        for number in itertools.count(bookmark.read()):
            self._board = Board(self._store, number)
            there = self._board.claim(self._rank, mine)
            if there != mine:
                self._see_end(there)
            elif not self._is_old(self._board.read_end()):
                bookmark.write(number)
                self.is_over = False
                return

    def call_roll(self, hello: Hello, charter: Charter) -> Roster:
        """Return who came, once all have.  The charter is that of rank 0; the number of the meeting is added to it."""
        self._board.put("hello", self._rank, encode(replace(hello, attempt=self._attempt)))
        if self._rank != 0:
            return self._check_belongs(self._wait_for(self._find_roster, "hello", deed="come"))
        guests = self._wait_for(self._find_hellos, "hello", deed="come")
        roster = Roster(guests=guests, charter=replace(charter, generation=charter.generation + self._board.number))
        self._board.write_roster(roster)
        return roster

    def exchange(self, roster: Roster, address: str) -> tuple[str, ...]:
        """Return where all ranks listen; this one does at ``address``."""
        self._guests = {guest.rank: guest for guest in roster.guests}
        if len({guest.attempt for guest in roster.guests}) == 1:  # else one may have died before, and comes anew
            self._patience = min(EXCHANGE_SECONDS, max(0.0, self._deadline - time.monotonic()))
            self._deadline = time.monotonic() + self._patience
        self._board.put("address", self._rank, address)
        if self._rank == 0:
            addresses = self._wait_for(self._find_addresses, "address", deed="said where to find it")
            refusal = find_unreachable(roster, [is_loopback(split_address(where)[0]) for where in addresses])
            self._board.write_end(End(addresses=addresses, refusal=refusal))
        return self._wait_for(self._find_end, "address", deed="said where to find it")

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this rank takes no part because of ``error``, unless the meeting is over anyway."""
        if not self.is_over:
            self._refuse(failed(self._rank, error))
            self._leave()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait_for(self, look: Callable[[], T | None], needed: str, *, deed: str) -> T:
        """Return what ``look`` finds, looking again and again.

        When time is up the meeting ends, because of those who have not written what is ``needed``.
        """
        pause = _FIRST_PAUSE
        while (found := look()) is None:
            left = self._deadline - time.monotonic()
            if left <= 0.0:
                self._refuse(self._lateness(needed, deed))
            else:
                self._pause(min(pause, left))
                self._answer_knock()
            pause = min(2 * pause, self._longest_pause)
        return found

    def _pause(self, seconds: float) -> None:
        if self._is_stopped.wait(seconds):
            raise Stopped

    def _lateness(self, needed: str, deed: str) -> Refusal:
        ranks = range(self._size)
        missing = sorted(set(ranks) - set(self._board.find(needed, ranks)))
        if not missing:
            missing, deed = [0], "answered"
        return absent(missing, size=self._size, timeout=self._patience, deed=deed)

    # -- looking -----------------------------------------------------------------------------------------------------

    def _find_end(self) -> tuple[str, ...] | None:
        """Return all addresses if the meeting has ended; raise why there are none."""
        end = self._board.read_end()
        return None if end is None else self._obey(end)

    def _find_roster(self) -> Roster | None:
        roster = self._board.read_roster()
        if roster is None:
            self._find_end()
        return roster

    def _find_hellos(self) -> tuple[Hello, ...] | None:
        """Return all hellos; those that disagree end the meeting."""
        self._find_end()
        for rank in self._board.find("hello", set(range(self._size)) - set(self._guests)):
            self._guests[rank] = self._board.message("hello", rank, Hello)
            refusal = find_disagreement(list(self._guests.values()))
            if refusal is not None:
                self._refuse(refusal)
                self._find_end()
        if len(self._guests) < self._size:
            return None
        return tuple(self._guests[rank] for rank in range(self._size))

    def _find_addresses(self) -> tuple[str, ...] | None:
        self._find_end()
        ranks = range(self._size)
        if not self._board.have_all("address", ranks):
            return None
        return tuple(self._board.get("address", rank) or "" for rank in ranks)

    def _check_belongs(self, roster: Roster) -> Roster:
        """See that rank 0 knew of this rank; it does not read the hellos of more ranks than it expects."""
        if len(roster.guests) != self._size:
            self.is_over = True
            raise UsageError(
                f"world_size: the others are {len(roster.guests)}, rank {self._rank} came as one of {self._size}"
            )
        return roster

    # -- ranks that are there twice, or dead -------------------------------------------------------------------------

    def _is_old(self, end: End | None) -> bool:
        """Has this rank, which has just come, nothing to do with how the meeting ended?"""
        if end is None or end.refusal is None:
            return False
        if end.refusal.kind is RefusalKind.ABANDONED or end.refusal.attempt < self._attempt:
            return True
        return bool(Board(self._store, self._board.number + 1).find("place", range(self._size)))

    def _see_end(self, there: Place) -> None:
        """See that the meeting, where this rank is already, ends.  Raises ``UsageError`` if it is there twice."""
        if self._board.read_end() is None:
            if there.attempt < self._attempt:
                self._refuse(abandoned(self._rank))
            else:
                self._knock()

    def _knock(self) -> None:
        """Return once the meeting has ended: somebody answers, which raises ``UsageError``, or nobody does."""
        self._board.put("knock", self._rank, self._place)
        give_up = time.monotonic() + ANSWER_SECONDS
        pause = _FIRST_PAUSE
        while (end := self._board.read_end()) is None:
            if time.monotonic() > give_up:
                self._refuse(abandoned(self._rank))
            self._pause(pause)
            pause = min(2 * pause, self._longest_pause)
        if end.refusal is not None and end.refusal.kind is RefusalKind.TWICE and self._rank in end.refusal.ranks:
            raise self._error(end.refusal)

    def _answer_knock(self) -> None:
        other = self._board.get("knock", self._rank)
        if other is not None:
            self._refuse(came_twice(self._rank, [self._place, other]))

    # -- ending ------------------------------------------------------------------------------------------------------

    def _refuse(self, refusal: Refusal) -> None:
        """End the meeting, unless it has ended."""
        self._board.write_end(End(refusal=replace(refusal, attempt=self._attempt)))

    def _obey(self, end: End) -> tuple[str, ...]:
        """Return all addresses, or raise why there are none."""
        self.is_over = True
        self._leave()
        if end.refusal is None:
            return end.addresses
        if end.refusal.kind is RefusalKind.ABANDONED:
            raise Abandoned
        raise self._error(end.refusal)

    def _leave(self) -> None:
        """Say that this rank needs the store no more.  The store may be gone already, with the process that held it."""
        with suppress(RuntimeError):
            self._board.put("left", self._rank, "yes")
            if self._rank == 0:
                self._see_off()

    def _see_off(self) -> None:
        """Wait a moment until all who came have read the end: the store may go away with this process."""
        give_up = time.monotonic() + _SEE_OFF_SECONDS
        came = self._board.find("hello", range(self._size))
        pause = _FIRST_PAUSE
        while not self._board.have_all("left", came) and time.monotonic() < give_up:
            if self._is_stopped.wait(pause):
                return
            pause = min(2 * pause, self._longest_pause)

    def _error(self, refusal: Refusal) -> AsyncparError:
        number = self._board.number
        note = "" if number == 1 else f" (it came to meeting {number} of this store)"
        hosts = {rank: guest.host for rank, guest in self._guests.items()}
        return error_of(refusal, rank=self._rank, hosts=hosts, note=note)
