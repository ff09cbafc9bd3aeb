"""Ranks of a rendezvous whose processes are visible to this one, which notices at once if one of them ends.

A rank that dies before the world is complete has no connection to the others yet, only to the store, which does not
notify them.  But processes of one PID namespace see each other end.  So each rank announces its process in the store,
under its place, and waiting ranks watch the processes of their place.
"""

from __future__ import annotations

import logging
import time

import msgspec

from asyncpar.net.membership.host import ProcessMark
from asyncpar.torch.rendezvous.store import RendezvousStore

_log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25
"""Seconds between two checks of the neighbours."""


class Neighbour(msgspec.Struct, frozen=True):
    """A rank and its process; ``attempt`` is the number of restarts of the rank."""

    rank: int
    process: ProcessMark
    attempt: int


class Neighbours:
    """The ranks of the rendezvous ``keys`` in the place of ``own``; None: this process sees no other."""

    def __init__(self, keys: RendezvousStore, own: Neighbour | None) -> None:
        self._keys = keys
        self._own = own
        self._known: list[Neighbour] = []
        self._stopped: set[int] = set()
        self._next_check = 0.0
        if own is not None:
            keys.append(own.process.place, msgspec.json.encode(own).decode())
            self._read(own)

    def check(self) -> int | None:
        """Return a rank whose process has ended; None if there is none or the next check is not due yet.

        Logs once which ranks are stopped.
        """
        if self._own is None or time.monotonic() < self._next_check:
            return None
        self._read(self._own)
        self._next_check = time.monotonic() + CHECK_SECONDS
        for one in self._known:
            if one.process.is_stopped and one.rank not in self._stopped:
                self._stopped.add(one.rank)
                _log.warning("rank %d waits for rank %d, which is stopped (%s)", self._own.rank, one.rank, _name(one))
        return self.find_ended()

    def find_ended(self) -> int | None:
        """Return a rank whose known process has ended; None if there is none.  Does not use the store.

        Processes that ended before the ranks were restarted do not count.
        """
        if self._own is None:
            return None
        gone = (one.rank for one in self._known if one.attempt >= self._own.attempt and one.process.has_ended)
        return min(gone, default=None)

    def _read(self, own: Neighbour) -> None:
        self._known += self._keys.appended(own.process.place, len(self._known), Neighbour)


def _name(one: Neighbour) -> str:
    return f"process {one.process.pid}"
