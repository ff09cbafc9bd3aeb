"""The rendezvous of ranks through a store of torch: each announces itself and its address, and learns those of all.

Theory of operation.  Each rank writes its hello.  Rank 0 reads and compares all of them, and writes the participants.
Then each rank, which now knows whether all are on one host, starts its servers and writes their address, and rank 0
writes the result: all addresses.  Any rank may write a failure as the result at any time: when the time is up, or when
the rank itself has failed.  The result is written once, so all ranks read the same one; ranks that wait poll for it.
Rank 0, whose process often holds the store, leaves last: it waits a moment until the others have read the result.  If
the process of a rank ends before that, the ranks of its host notice it and write the failure (see ``neighbours``).

A store outlives a rendezvous (the agent of torchrun keeps one for all worlds of its ranks, also when it restarts them),
so they are numbered, and a rank enters the first one in which it has not been.  If that one has ended without it, the
rank raises its failure, unless that dates from before a restart of the ranks, or others are in the next one already.

A rank that finds its own claim in a rendezvous that has not ended is present twice, or has died there.  If the claim
dates from before a restart, the process has died.  Otherwise the rank writes a duplicate notice.  A live process that
waits reads the notice, and ends the rendezvous with a failure that names both.  If none answers, the rendezvous is
abandoned: all ranks enter the next one.

The number of restarts is compared for one rank only: the agents of torchrun count each for themselves.

Everything here blocks.  Calls of the store are short, since several ranks may share one, and since a waiting call
cannot be stopped.
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

from asyncpar.core.addresses import is_loopback, split_address
from asyncpar.errors import AsyncparError, PeerLost, UsageError
from asyncpar.net.membership.host import process_mark
from asyncpar.torch.rendezvous.messages import (
    Participants,
    RankClaim,
    RankHello,
    RendezvousFailure,
    RendezvousFailureKind,
    RendezvousResult,
    WorldIdentity,
    abandoned,
    absent,
    duplicated,
    encode,
    ended,
    error_of,
    failed,
    find_disagreement,
    find_unreachable,
)
from asyncpar.torch.rendezvous.neighbours import Neighbour, Neighbours
from asyncpar.torch.rendezvous.store import LastRendezvous, RendezvousStore, Store

T = TypeVar("T")

_FIRST_PAUSE = 0.001
_FIRST_PAUSE_PER_RANK = 0.00001
_LONGEST_PAUSE = 0.05
_LONGEST_PAUSE_PER_RANK = 0.0001
_PART_OF_WAIT = 1 / 16

EXCHANGE_SECONDS = 60.0
"""Seconds for ranks to write their addresses once all have written their hello."""

ANSWER_SECONDS = 5.0
"""Seconds for a process to answer a duplicate notice."""

_LEAVE_SECONDS = 1.0
"""Seconds for which rank 0 waits for the others to read the result."""


class RendezvousStopped(Exception):  # noqa: N818
    """Raised after ``stop`` was called."""


class RendezvousAbandoned(Exception):  # noqa: N818
    """A rank of this rendezvous has died in it: enter again, to join the next one."""


class StoreRendezvous:
    """One rank's part in a rendezvous of ``size`` ranks, which must end within ``timeout`` seconds from now.

    Call ``enter``, ``wait_for_ranks`` and ``exchange``, in this order; and ``refuse`` if this rank fails meanwhile.
    Each raises the failure of the rendezvous: ``PeerTimeout``, ``PeerLost`` or ``UsageError``, the same on all ranks;
    or ``RendezvousAbandoned``.  A store that fails raises its ``RuntimeError``.  Use it from one thread at a time,
    except ``stop``.  ``attempt`` is the number of restarts of the ranks.
    """

    def __init__(self, store: Store, *, rank: int, size: int, timeout: float, attempt: int = 0) -> None:
        self.is_over = True
        """Whether the rendezvous has ended, as far as this rank knows, or not begun."""
        self._store = store
        self._keys = RendezvousStore(store, 0)
        self._rank = rank
        self._size = size
        self._attempt = attempt
        self._timeout = self._patience = timeout
        self._over_at = self._deadline = time.monotonic() + timeout
        self._first_pause = _FIRST_PAUSE + size * _FIRST_PAUSE_PER_RANK
        self._longest_pause = _LONGEST_PAUSE + size * _LONGEST_PAUSE_PER_RANK
        self._is_stopped = threading.Event()
        self._process = ""
        self._hellos: dict[int, RankHello] = {}
        self._neighbours = Neighbours(self._keys, None)

    def stop(self) -> None:
        """Make a waiting call in another thread raise ``RendezvousStopped``."""
        self._is_stopped.set()

    # -- the steps ---------------------------------------------------------------------------------------------------

    def enter(self, process: str) -> None:
        """Enter the next rendezvous as ``process``.  Raises ``UsageError`` if another process is this rank there."""
        self._process, self._hellos = process, {}
        self._patience, self._deadline = self._timeout, self._over_at
        mine = RankClaim(token=secrets.token_hex(8), name=process, attempt=self._attempt)
        last = LastRendezvous(self._store, self._rank)
        for number in itertools.count(last.read()):
            self._keys = RendezvousStore(self._store, number)
            there = self._keys.claim(self._rank, mine)
            if there != mine:
                self._end_claimed(there)
            elif not self._is_old(self._keys.read_end()):
                last.write(number)
                mark = process_mark()
                own = None if mark is None else Neighbour(rank=self._rank, process=mark, attempt=self._attempt)
                self._neighbours = Neighbours(self._keys, own)
                self.is_over = False
                return

    def wait_for_ranks(self, hello: RankHello, identity: WorldIdentity) -> Participants:
        """Return all ranks once they have arrived.  Rank 0 provides the identity, whose generation counts
        rendezvous.
        """
        self._keys.put("hello", self._rank, encode(replace(hello, attempt=self._attempt)))
        if self._rank != 0:
            return self._check_belongs(self._wait_for(self._find_participants, "hello", done="come"))
        hellos = self._wait_for(self._find_hellos, "hello", done="come")
        participants = Participants(
            hellos=hellos, identity=replace(identity, generation=identity.generation + self._keys.number)
        )
        self._keys.write_participants(participants)
        return participants

    def exchange(self, participants: Participants, address: str) -> tuple[str, ...]:
        """Return the addresses of all ranks; ``address`` is that of this one."""
        self._hellos = {hello.rank: hello for hello in participants.hellos}
        if len({hello.attempt for hello in participants.hellos}) == 1:  # otherwise one may come back after a restart
            self._patience = min(EXCHANGE_SECONDS, max(0.0, self._deadline - time.monotonic()))
            self._deadline = time.monotonic() + self._patience
        self._keys.put("address", self._rank, address)
        if self._rank == 0:
            addresses = self._wait_for(self._find_addresses, "address", done="published its address")
            failure = find_unreachable(participants, [is_loopback(split_address(where)[0]) for where in addresses])
            self._keys.write_end(RendezvousResult(addresses=addresses, failure=failure))
        return self._wait_for(self._find_end, "address", done="published its address")

    def refuse(self, error: BaseException) -> None:
        """Notify the others that this rank has failed with ``error``, unless the rendezvous is over."""
        if not self.is_over:
            self._refuse(failed(self._rank, error))
            self._leave()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait_for(self, find: Callable[[], T | None], needed: str, *, done: str) -> T:
        """Return the result of ``find`` once there is one, calling it repeatedly.

        After the time limit the rendezvous fails, naming the ranks that have not written ``needed``.
        """
        begun = time.monotonic()
        while (found := find()) is None:
            left = self._deadline - time.monotonic()
            if left <= 0.0:
                self._refuse(self._lateness(needed, done))
            else:
                self._pause(min(self._pause_after(begun), left))
                self._answer_duplicate()
                self._watch_neighbours()
        return found

    def _pause_after(self, begun: float) -> float:
        """Return the polling interval in seconds of a rank that waits since ``begun``: a small part of that time."""
        return min(self._longest_pause, max(self._first_pause, (time.monotonic() - begun) * _PART_OF_WAIT))

    def _pause(self, seconds: float) -> None:
        if self._is_stopped.wait(seconds):
            raise RendezvousStopped

    def _watch_neighbours(self) -> None:
        gone = self._neighbours.check()
        if gone is not None:
            self._refuse(ended(gone))

    def find_ended(self) -> PeerLost | None:
        """Return the error for a rank that is known to have ended; None if there is none.  Does not use the store."""
        gone = self._neighbours.find_ended()
        error = None if gone is None else self._error(ended(gone))
        return error if isinstance(error, PeerLost) else None

    def _lateness(self, needed: str, done: str) -> RendezvousFailure:
        ranks = range(self._size)
        missing = sorted(set(ranks) - set(self._keys.find(needed, ranks)))
        if not missing:
            missing, done = [0], "answered"
        return absent(missing, size=self._size, timeout=self._patience, done=done)

    # -- finding -----------------------------------------------------------------------------------------------------

    def _find_end(self) -> tuple[str, ...] | None:
        """Return all addresses if the rendezvous has ended; raise its failure if it failed."""
        end = self._keys.read_end()
        return None if end is None else self._obey(end)

    def _find_participants(self) -> Participants | None:
        participants = self._keys.read_participants()
        if participants is None:
            self._find_end()
        return participants

    def _find_hellos(self) -> tuple[RankHello, ...] | None:
        """Return all hellos; a difference between them ends the rendezvous."""
        self._find_end()
        for rank in self._keys.find("hello", set(range(self._size)) - set(self._hellos)):
            self._hellos[rank] = self._keys.message("hello", rank, RankHello)
            failure = find_disagreement(list(self._hellos.values()))
            if failure is not None:
                self._refuse(failure)
                self._find_end()
        if len(self._hellos) < self._size:
            return None
        return tuple(self._hellos[rank] for rank in range(self._size))

    def _find_addresses(self) -> tuple[str, ...] | None:
        self._find_end()
        ranks = range(self._size)
        if not self._keys.has_all("address", ranks):
            return None
        return tuple(self._keys.get("address", rank) or "" for rank in ranks)

    def _check_belongs(self, participants: Participants) -> Participants:
        """Raise ``UsageError`` if rank 0, which reads as many hellos as it expects ranks, has not counted this one."""
        if len(participants.hellos) != self._size:
            self.is_over = True
            raise UsageError(
                f"world_size: the others are {len(participants.hellos)}, rank {self._rank} came as one of {self._size}"
            )
        return participants

    # -- duplicate and dead ranks ------------------------------------------------------------------------------------

    def _is_old(self, end: RendezvousResult | None) -> bool:
        """Return whether the result ``end`` does not concern this rank, which has just arrived."""
        if end is None or end.failure is None:
            return False
        if end.failure.kind is RendezvousFailureKind.ABANDONED or end.failure.attempt < self._attempt:
            return True
        return bool(RendezvousStore(self._store, self._keys.number + 1).find("claim", range(self._size)))

    def _end_claimed(self, there: RankClaim) -> None:
        """End a rendezvous that another process entered as this rank.  Raises ``UsageError`` if it is alive."""
        if self._keys.read_end() is None:
            if there.attempt < self._attempt:
                self._refuse(abandoned(self._rank))
            else:
                self._probe_duplicate()

    def _probe_duplicate(self) -> None:
        """Write a duplicate notice and wait for the end.  Raises ``UsageError`` if another process answers it."""
        self._keys.put("duplicate", self._rank, self._process)
        give_up = time.monotonic() + ANSWER_SECONDS
        begun = time.monotonic()
        while (end := self._keys.read_end()) is None:
            if time.monotonic() > give_up:
                self._refuse(abandoned(self._rank))
            self._pause(self._pause_after(begun))
        if (
            end.failure is not None
            and end.failure.kind is RendezvousFailureKind.TWICE
            and self._rank in end.failure.ranks
        ):
            raise self._error(end.failure)

    def _answer_duplicate(self) -> None:
        other = self._keys.get("duplicate", self._rank)
        if other is not None:
            self._refuse(duplicated(self._rank, [self._process, other]))

    # -- ending ------------------------------------------------------------------------------------------------------

    def _refuse(self, failure: RendezvousFailure) -> None:
        """End the rendezvous, unless it has ended."""
        self._keys.write_end(RendezvousResult(failure=replace(failure, attempt=self._attempt)))

    def _obey(self, end: RendezvousResult) -> tuple[str, ...]:
        """Return all addresses, or raise the failure."""
        self.is_over = True
        self._leave()
        if end.failure is None:
            return end.addresses
        if end.failure.kind is RendezvousFailureKind.ABANDONED:
            raise RendezvousAbandoned
        raise self._error(end.failure)

    def _leave(self) -> None:
        """Record that this rank no longer needs the store, which may be gone already with the process that held it."""
        with suppress(RuntimeError):
            self._keys.put("left", self._rank, "yes")
            if self._rank == 0:
                self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Wait a moment until all ranks have read the result, since the store may vanish with this process."""
        begun = time.monotonic()
        came = set(self._keys.find("hello", range(self._size))) - {self._neighbours.find_ended()}
        while not self._keys.has_all("left", came) and time.monotonic() < begun + _LEAVE_SECONDS:
            if self._is_stopped.wait(self._pause_after(begun)):
                return

    def _error(self, failure: RendezvousFailure) -> AsyncparError:
        number = self._keys.number
        note = "" if number == 1 else f" (in rendezvous {number} of this store)"
        hosts = {rank: hello.host for rank, hello in self._hellos.items()}
        return error_of(failure, rank=self._rank, hosts=hosts, note=note)
