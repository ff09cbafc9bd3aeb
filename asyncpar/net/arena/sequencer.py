"""Assignment of turns to operations that are matched by name, which each rank calls in its own order.

Theory of operation.  Each rank announces an operation when it is ready to run it, and withdraws the announcement when
it gives the operation up.  A fixed sequencer, the rank at place 0, gives an operation the next turn as soon as *all*
ranks have announced it; all run the turns one after another.  (This is a fixed-sequencer total order, as in Defago,
Schiper and Urban, ACM Computing Surveys 36:4, 2004, of the operations that all are ready for, as Horovod's coordinator
does it: Sergeev and Del Balso, arXiv:1802.05799.)

No rank waits forever, in any order of calls.  A rank that runs a turn waits for ranks that have announced the same
operation, so they are ready for it, and they reach it unless they wait in an earlier turn.  The earliest unfinished
turn has no earlier one: it goes on, or fails and is passed.  So all turns end, and an operation that all ranks are
ready for gets one.  An operation that only some are ready for has no turn and holds up nothing.

Operations that are given up: the number was announced; it may have a turn by now, or get one because the messages
cross.  Then the rank that gave it up reads a turn for an operation that it does not have, and passes it as abandoned;
the others learn of the failure by message, as of every other.  Before that, a withdrawal makes the sequencer forget it.
So all memory is bounded by the live operations somewhere in the group, and by the rings.

When a rank of the group is gone, nothing more gets a turn: the sequencer announces that at the end of the order, or is
gone itself.  A rank that has read the order to its end knows that an operation without a turn will get none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from asyncpar.net.arena.order_log import (
    ANNOUNCED,
    ANNOUNCEMENTS_READ,
    ORDERED,
    SEQUENCER,
    TAKEN,
    OrderLog,
    RingReader,
    RingWriter,
)

NAMED: Final = 1 << 63
"""Set in the numbers of all operations here; a number without it in the announcements is withdrawn."""


class Readiness:
    """The announcements of ``size`` ranks.  Pure."""

    def __init__(self, size: int) -> None:
        self.complete: deque[int] = deque()
        """The operations that all ranks have announced, in the order in which the last rank did."""
        self._all_places = (1 << size) - 1
        self._announced: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of operations that some ranks have announced and some have not."""
        return len(self._announced)

    def record(self, place: int, entry: int) -> None:
        """Process an announcement of the rank at ``place``."""
        number = entry | NAMED
        places = self._announced.pop(number, 0)
        places = places | 1 << place if entry & NAMED else places & ~(1 << place)
        if places == self._all_places:
            self.complete.append(number)
        elif places:
            self._announced[number] = places

    def absent(self, number: int) -> list[int]:
        """Return the places of the ranks that have not announced an operation; none if it is complete."""
        if number in self.complete:
            return []
        places = self._announced.get(number, 0)
        return [place for place in range(self._all_places.bit_length()) if not places >> place & 1]


class Sequencer(ABC):
    """Announces operations of one rank, and learns the turns of its group.  ``lost`` has the ranks that are gone."""

    def __init__(self, log: OrderLog, announcements: RingWriter, lost: Collection[int]) -> None:
        self._log = log
        self._announcements = announcements
        self._lost = lost

    @property
    def room(self) -> int:
        """The number of entries that can be announced now."""
        return self._announcements.room

    def announce(self, entries: Sequence[int]) -> None:
        """Announce the operations that this rank is ready for, and those that it gives up (without ``NAMED``)."""
        self._announcements.append(entries)

    @abstractmethod
    def has_news(self) -> bool:
        """Return whether ``turns`` is worth calling; fast enough for polling."""

    @abstractmethod
    def turns(self) -> list[int]:
        """Return the numbers of the operations that have the next turns."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether there is work to do for others."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether nothing more will get a turn."""

    @abstractmethod
    def absent(self, number: int) -> list[int]:
        """Return the places of the other ranks that keep an operation from its turn."""

    def _is_broken(self) -> bool:
        return bool(self._lost) and any(rank in self._lost for rank in self._log.ranks)


class LeadingSequencer(Sequencer):
    """The sequencer of the rank that assigns turns."""

    def __init__(self, log: OrderLog, lost: Collection[int]) -> None:
        own, members = [log.own(ANNOUNCEMENTS_READ)], range(1, log.size)
        super().__init__(log, RingWriter(log.announcements(SEQUENCER), log.count(ANNOUNCED, ()), own), lost)
        self._roll = Readiness(log.size)
        announced = [log.own(ANNOUNCED), *log.watch(ANNOUNCED, members)]
        self._readers = [
            RingReader(
                log.announcements(place), written, log.count(ANNOUNCEMENTS_READ + place, [place] if place else ())
            )
            for place, written in enumerate(announced)
        ]
        self._order = RingWriter(log.order(SEQUENCER), log.count(ORDERED, members), log.watch(TAKEN, members))
        self._has_ended = False

    def has_news(self) -> bool:
        return any(map(RingReader.has_news, self._readers))

    def turns(self) -> list[int]:
        roll = self._roll
        for place, reader in enumerate(self._readers):
            for entry in reader.read():
                roll.record(place, entry)
        if self._has_ended:
            return []
        complete = roll.complete
        turns = [complete.popleft() for _ in range(min(len(complete), self._order.room))] if complete else []
        if turns:
            self._order.append(turns)
        if self._is_broken():
            self._has_ended = True
            self._order.end()
        return turns

    @property
    def is_busy(self) -> bool:
        return not self._has_ended and (bool(self._roll.complete) or self._is_broken())

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def absent(self, number: int) -> list[int]:
        absent = self._roll.absent(number)
        return [place for place in absent or range(self._log.size) if place != SEQUENCER]


class FollowingSequencer(Sequencer):
    """The sequencer of any other rank."""

    def __init__(self, log: OrderLog, lost: Collection[int]) -> None:
        place = log.place
        read = log.watch(ANNOUNCEMENTS_READ + place, [SEQUENCER])
        count = log.count(ANNOUNCED, [SEQUENCER])
        super().__init__(log, RingWriter(log.announcements(place), count, read), lost)
        ordered = log.watch(ORDERED, [SEQUENCER])[0]
        self._order = RingReader(log.order(SEQUENCER), ordered, log.count(TAKEN, [SEQUENCER]))

    def has_news(self) -> bool:
        return self._order.has_news()

    def turns(self) -> list[int]:
        return self._order.read()

    @property
    def is_busy(self) -> bool:
        return False

    @property
    def has_ended(self) -> bool:
        return self._order.has_ended or self._log.ranks[SEQUENCER] in self._lost

    def absent(self, number: int) -> list[int]:
        """Return the ranks, from the last announcements: those without the operation, then those that withdrew it."""
        log = self._log
        shown = {place: log.announcements(place).tolist() for place in range(log.size) if place != log.place}
        silent = [place for place, entries in shown.items() if number not in entries]
        return silent + [place for place, entries in shown.items() if number ^ NAMED in entries] or [SEQUENCER]


def open_sequencer(log: OrderLog, lost: Collection[int]) -> Sequencer:
    """Return the sequencer of the rank whose order log this is."""
    return LeadingSequencer(log, lost) if log.place == SEQUENCER else FollowingSequencer(log, lost)
