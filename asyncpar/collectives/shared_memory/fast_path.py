"""Small all-reduces and broadcasts in the arena, in as few steps as possible.

Theory of operation.  Most of the time of a small operation would be spent on bookkeeping that only failures need.  So a
``QuickCall`` keeps none: it has a sequence number and an entry in ``Group.early``.  If its turn has come when it is
awaited, and at each wait the others are present or come while this rank polls, it completes without the loop and
without ever having been an ``Operation``.  Any other event turns it into a full operation first, which continues the
program where it waits: a later call, a wait, a message of a peer about it, a lost peer.

The program is the one that the driver would run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from asyncpar.collectives.arrays import Array, Reduction
from asyncpar.collectives.protocol import Description
from asyncpar.collectives.shared_memory.all_reduce import CHUNK_BYTES, all_reduce_program, is_at_once
from asyncpar.collectives.shared_memory.group import ArenaGroup
from asyncpar.core.observe.recorder import NO_TICKET, Recorder
from asyncpar.core.observe.records import NO_PEER, RECORD_BYTES, RECORDS_OFFSET, EventKind, EventState, head_of
from asyncpar.net.arena.channel import ROUND_BITS, Channel, Turn
from asyncpar.net.arena.run_queue import Program, RoundWait

_POLLS_PER_LOOK: Final = 3
"""Inspecting a word here costs a third of what an inspection costs the driver."""


class QuickPlan(ABC):
    """Common plan of all calls like one with ``x``, over the open channel of ``group``."""

    name: str
    sends: int
    """Number of bytes that go through this rank's slot."""
    shows = False
    """Whether others may read the input in place in the heap."""

    def __init__(self, group: ArenaGroup, channel: Channel, description: Description, x: Array) -> None:
        self.description = description
        self.recorder = group.host.links.recorder
        self.record = _recording(self.recorder, group.number, description, x.nbytes)
        self.run_queue = group.run_queue
        self.host = group.host
        self.driver = group.host.driver
        self._channel = channel
        self._words = [channel.progress[place] for place in channel.others]
        self._all_have_shown: RoundWait = (channel.others, 1)

    @abstractmethod
    def program(self, turn: Turn, x: Array) -> Program:
        """Return the whole program, step by step; it waits for all others, and takes no memory as large as ``x``."""

    def enter(self, sequence: int, x: Array) -> Turn | None:
        """Return the turn for ``x``; None if the channel is not clear, or ``x`` needs a copy."""
        if not self._channel.is_clear(sequence & 1) or (self.shows and not x.flags.c_contiguous):
            return None
        turn = Turn(self._channel, sequence)
        is_shown = self.shows and x.base is not None  # an array that owns its memory is not in the heap
        turn.enter(self.description.fingerprint, self.host.arena.locate(x) if is_shown else None)
        return turn

    def run(self, turn: Turn, program: Program) -> RoundWait | None:
        """Run ``program`` while the others come within a moment; return the wait that is left, None at the end."""
        for wait in program:
            if not self._poll(turn, wait[1]):
                return wait
        return None if not turn.places_read or turn.is_intact() else (turn.places_read, 1)

    def _poll(self, turn: Turn, round_: int) -> bool:
        """Wait a moment for the others; return True if all have done this round, of the same operation."""
        target = (turn.sequence << ROUND_BITS) + round_
        driver = self.driver
        have_come = self._have_come(target, 0 if driver.shares_cores else driver.polls * _POLLS_PER_LOOK)
        if not have_come and driver.shares_cores:
            have_come = driver.poll(lambda: self._have_come(target, 0))
        driver.polled(was_worth_it=have_come)
        return have_come and turn.is_unanimous(round_)

    def _have_come(self, target: int, polls: int) -> bool:
        """Return whether all others have come to ``target``, after up to ``polls`` inspections."""
        for word in self._words:
            while word[0] < target:
                polls -= 1
                if polls < 0:
                    return False
        return True


def _recording(
    recorder: Recorder, group: int, description: Description, nbytes: int
) -> Callable[[int, float, float, int], None]:
    """Return a callback that records a finished operation: number, begin, end and site."""
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
            owners[ticket & mask] = 0  # if it was overwritten, nothing more is recorded
        place, lap = ticket & mask, (ticket >> lap_bits) + 1
        write(RECORDS_OFFSET + place * RECORD_BYTES, lap, head, ended, begun, word, group, sequence, nbytes, site, lap)

    return record


class QuickAllReduce(QuickPlan):
    """Plan in which all ranks publish ``x``, and combine all of them in the order of ranks."""

    name = "all_reduce"

    def __init__(
        self, group: ArenaGroup, channel: Channel, description: Description, x: Array, *, reduction: Reduction
    ) -> None:
        super().__init__(group, channel, description, x)
        self.sends = x.nbytes
        self._reduction = reduction
        self._views = _views(channel, x)

    def program(self, turn: Turn, x: Array) -> Program:
        views, combine, place = self._views[turn.parity], self._reduction.combine, self._channel.place
        views[place][...] = x
        turn.post(1)
        yield self._all_have_shown
        # for its own part a rank takes ``x``, which is in its caches, not the copy that it has shown
        combine(x if place == 0 else views[0], x if place == 1 else views[1], x)
        for view in views[2:]:
            combine(x, view, x)
        if self._reduction.divides:
            self._reduction.finish(x, self._channel.size)


QUICK_BYTES: Final = CHUNK_BYTES
"""Longer all-reduces would block the loop for too long."""


class QuickSlices(QuickPlan):
    """Plan in which each rank combines a slice of ``x``, and copies the others'."""

    name = "all_reduce"
    shows = True

    def __init__(
        self, group: ArenaGroup, channel: Channel, description: Description, x: Array, *, reduction: Reduction
    ) -> None:
        super().__init__(group, channel, description, x)
        self.sends = x.nbytes
        self._reduction = reduction

    def program(self, turn: Turn, x: Array) -> Program:
        return all_reduce_program(x, x, self._reduction)(turn)


def quick_all_reduce(
    group: ArenaGroup, channel: Channel, description: Description, x: Array, reduction: Reduction
) -> QuickPlan | None:
    """Return the plan of all-reduces of ``x`` in place; None for long ones, and for those that scale their input."""
    if reduction.scales or x.nbytes > QUICK_BYTES:
        return None
    kind = QuickAllReduce if is_at_once(x.nbytes, channel) else QuickSlices
    return kind(group, channel, description, x, reduction=reduction)


QUICK_BROADCAST_BYTES: Final = 64 << 10
"""Broadcasts of up to this many bytes always go through the root's slot, in one chunk, even from the heap."""


def is_quick_broadcast(payload: int, channel: Channel) -> bool:
    """Return whether a broadcast of ``payload`` bytes is one chunk in the root's slot."""
    return payload <= min(QUICK_BROADCAST_BYTES, channel.slot_bytes // 2)


class QuickBroadcast(QuickPlan):
    """Plan in which the root publishes ``x`` and the others copy it; the root, too, waits until all have called it."""

    name = "broadcast"

    def __init__(self, group: ArenaGroup, channel: Channel, description: Description, x: Array, *, root: int) -> None:
        super().__init__(group, channel, description, x)
        self._is_root = channel.place == root
        self.sends = x.nbytes if self._is_root else 0
        self._shown = [views[root] for views in _views(channel, x)]

    def program(self, turn: Turn, x: Array) -> Program:
        shown = self._shown[turn.parity]
        if self._is_root:
            shown[...] = x
        turn.post(1)
        yield self._all_have_shown
        if not self._is_root:
            x[...] = shown


def _views(channel: Channel, x: Array) -> list[list[Array]]:
    """Return, by parity and place, the views of arrays like ``x`` in the slots."""
    return [[view.reshape(x.shape) for view in channel.views(parity, x.dtype, x.size)] for parity in (0, 1)]
