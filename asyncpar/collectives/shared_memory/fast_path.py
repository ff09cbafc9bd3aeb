"""Small all-reduces and broadcasts in the arena, in as few steps as possible.

Theory of operation.  Most of the time of a small operation would be spent on bookkeeping that only failures need.  So a
``QuickCall`` keeps none: it has a sequence number and a note in ``Group.early``.  If its turn has come when it is
awaited, and the others are there or come while this rank polls, it is over without the loop and without ever having
been an ``Operation``.  Whatever else happens turns it into one first, with everything that belongs to it: a call that
comes after it, a wait, a message of a peer about it, a lost peer.

What runs is what a program of ``programs`` does, ``combine_all`` or ``hand_out`` and ``take_in`` of one chunk:
publish, wait until all have, take the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from asyncpar.collectives.arrays import Array, Reduction
from asyncpar.collectives.protocol import Description
from asyncpar.collectives.shared_memory.group import ArenaGroup
from asyncpar.core.observe.recorder import NO_TICKET, Recorder
from asyncpar.core.observe.records import NO_PEER, RECORD_BYTES, RECORDS_OFFSET, EventKind, EventState, head_of
from asyncpar.net.arena.channel import ROUND_BITS, Channel, Turn
from asyncpar.net.arena.run_queue import Program

_POLLS_PER_LOOK: Final = 3
"""Looking at a word here costs a third of what a look costs the driver."""


class QuickPlan(ABC):
    """All that is the same for all calls like that with ``x``, over the open channel of ``group``."""

    name: str
    sends: int
    """Bytes that go through this rank's slot."""

    def __init__(self, group: ArenaGroup, channel: Channel, description: Description, x: Array) -> None:
        self.description = description
        self.recorder = group.host.links.recorder
        self.record = _recording(self.recorder, group.number, description, x.nbytes)
        self.run_queue = group.run_queue
        self.others = channel.others
        self.host = group.host
        self.driver = group.host.driver
        self._channel = channel
        self._views = [[view.reshape(x.shape) for view in channel.views(parity, x.dtype, x.size)] for parity in (0, 1)]
        self._words = [channel.progress[place] for place in channel.others]

    @abstractmethod
    def _publish(self, parity: int, x: Array) -> None:
        """Write into this rank's slot what others read."""

    @abstractmethod
    def _take(self, parity: int, x: Array) -> None:
        """Make the result in ``x``, of what all have published."""

    def begin(self, sequence: int, x: Array) -> Turn | None:
        """Publish ``x``; None if the channel is not clear."""
        channel, parity = self._channel, sequence & 1
        if not channel.is_clear(parity):
            return None
        turn = Turn(channel, sequence)
        turn.enter(self.description.fingerprint)
        self._publish(parity, x)
        turn.post(1)
        return turn

    def poll(self, turn: Turn) -> bool:
        """Wait for a moment for the others; True when all have published, or one does something else."""
        target = (turn.sequence << ROUND_BITS) + 1
        driver = self.driver
        have_come = self._have_come(target, 0 if driver.shares_cores else driver.polls * _POLLS_PER_LOOK)
        if not have_come and driver.shares_cores:
            have_come = driver.poll(lambda: self._have_come(target, 0))
        driver.polled(was_worth_it=have_come)
        return have_come and turn.is_unanimous(1)

    def _have_come(self, target: int, polls: int) -> bool:
        """Have all others published?  If not, look again, ``polls`` times in all."""
        for word in self._words:
            while word[0] < target:
                polls -= 1
                if polls < 0:
                    return False
        return True

    def finish(self, turn: Turn, x: Array) -> None:
        """Take the result into ``x``, and leave."""
        self._take(turn.parity, x)
        turn.end(is_completed=True)

    def program(self, turn: Turn, x: Array) -> Program:
        """Do all of it step by step."""
        self._publish(turn.parity, x)
        turn.post(1)
        yield self.others, 1
        self._take(turn.parity, x)

    def rest(self, turn: Turn, x: Array) -> Program:
        """Do what is left when the others have published."""
        self._take(turn.parity, x)
        yield from ()


def _recording(
    recorder: Recorder, group: int, description: Description, nbytes: int
) -> Callable[[int, float, float, int], None]:
    """Return what records an operation that is over: number, begin, end, and site; as ``begin`` and ``end`` do."""
    word = recorder.operation(description.text, description.algorithm, description.fingerprint)
    take, write, owners = recorder.tickets.__next__, recorder.write, recorder.owners
    mask, lap_bits, head = (
        recorder.mask,
        recorder.lap_bits,
        head_of(NO_PEER, EventKind.COLLECTIVE, EventState.COMPLETED),
    )

    def record(sequence: int, begun: float, ended: float, site: int) -> None:
        ticket = take()
        if owners[ticket & mask]:
            ticket = recorder.elsewhere(ticket)
            if ticket == NO_TICKET:
                return
            owners[ticket & mask] = 0  # of one that was overwritten, nothing more is recorded
        place, lap = ticket & mask, (ticket >> lap_bits) + 1
        write(RECORDS_OFFSET + place * RECORD_BYTES, lap, head, ended, begun, word, group, sequence, nbytes, site, lap)

    return record


class QuickAllReduce(QuickPlan):
    """All ranks publish ``x``, and combine all of them in the order of ranks."""

    name = "all_reduce"

    def __init__(
        self, group: ArenaGroup, channel: Channel, description: Description, x: Array, *, reduction: Reduction
    ) -> None:
        super().__init__(group, channel, description, x)
        self.sends = x.nbytes
        self._reduction = reduction
        self._own = [views[channel.place] for views in self._views]

    def _publish(self, parity: int, x: Array) -> None:
        self._own[parity][...] = x

    def _take(self, parity: int, x: Array) -> None:
        views = self._views[parity]
        combine = self._reduction.combine
        combine(views[0], views[1], x)
        for view in views[2:]:
            combine(x, view, x)
        if self._reduction.divides:
            self._reduction.finish(x, self._channel.size)


QUICK_BROADCAST_BYTES: Final = 64 << 10
"""Broadcasts of up to so much always go through the root's slot, in one chunk, also from the heap."""


def is_quick_broadcast(payload: int, channel: Channel) -> bool:
    """Is a broadcast of ``payload`` bytes one chunk in the root's slot?"""
    return payload <= min(QUICK_BROADCAST_BYTES, channel.slot_bytes // 2)


class QuickBroadcast(QuickPlan):
    """The root publishes its ``x``, the others copy it; a root, too, waits until all are known to do the same."""

    name = "broadcast"

    def __init__(self, group: ArenaGroup, channel: Channel, description: Description, x: Array, *, root: int) -> None:
        super().__init__(group, channel, description, x)
        self._is_root = channel.place == root
        self.sends = x.nbytes if self._is_root else 0
        self._shown = [views[root] for views in self._views]

    def _publish(self, parity: int, x: Array) -> None:
        if self._is_root:
            self._shown[parity][...] = x

    def _take(self, parity: int, x: Array) -> None:
        if not self._is_root:
            x[...] = self._shown[parity]
