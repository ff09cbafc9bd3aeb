"""The arena under the collectives of a rank, and the groups that have a channel in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncpar.collectives.ledger import hash64
from asyncpar.collectives.operation import Operation
from asyncpar.errors import PeerLost
from asyncpar.net.arena.arena import Arena, DoorbellMessage
from asyncpar.net.arena.channel import Channel, Offer
from asyncpar.net.arena.directory import Directory
from asyncpar.net.arena.driver import Driver
from asyncpar.net.arena.order_log import Counts, OrderLog, behind_order_log
from asyncpar.net.arena.run_queue import KeyedRunQueue, RunQueue
from asyncpar.net.arena.sequencer import open_sequencer
from asyncpar.net.transport.links import LEFT, Links

_log = logging.getLogger(__name__)
_OFFERED = 0
"""The progress with which a rank rings when it has made an offer."""

_LOSS = 2**64 - 2
"""Stands for the group in a message that reports the loss of a rank of another host, whose number comes with it."""


class StepScratch:
    """Memory used only within one step of a program, and thus shared by all.  It grows to the largest step."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array of ``count`` elements."""
        size = count * dtype.itemsize
        if size > self._memory.size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].view(dtype)


class ArenaHost:
    """The arena of this rank's host, its directory and its driver."""

    def __init__(self, arena: Arena, links: Links) -> None:
        self.arena = arena
        self.links = links
        self.loop = asyncio.get_running_loop()
        self.members = frozenset(arena.members)
        self.directory = Directory(arena)
        self.driver = Driver(arena, self.loop, links.lost)
        self.bytes_shown = 0
        """Payload bytes that this rank has shown to others in finished operations."""
        self.scratch = StepScratch()
        self._opening: dict[int, ArenaGroup] = {}
        self._on_host: dict[tuple[int, ...], ArenaGroup] = {}
        self._has_all_ranks = len(self.members) == links.world.size
        arena.on_ring = self._rung
        links.add_loss_listener(self._lost)

    def has_all(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks of the world, two or more, can share the arena."""
        return len(ranks) > 1 and self.members.issuperset(ranks)

    def group_on_host(self, ranks: tuple[int, ...]) -> ArenaGroup:
        """Return the group that ``ranks``, the part of larger groups on this host, use for keyed operations."""
        group = self._on_host.get(ranks)
        if group is None:
            name = f"of ranks {ranks[0]} to {ranks[-1]} of this host"
            place = ranks.index(self.arena.rank)
            number = hash64("host", ranks)
            group = ArenaGroup(self, number=number, name=name, ranks=ranks, place=place, are_keyed=True)
            self._on_host[ranks] = group
        return group

    def close(self) -> None:
        """Leave the arena in good order."""
        self._opening.clear()
        self._on_host.clear()
        self.driver.close()
        self.directory.close()
        self.arena.close()

    def begin_opening(self, group: ArenaGroup) -> None:
        """Inspect the offers for ``group`` whenever there is news."""
        self._opening[group.number] = group

    def end_opening(self, group: ArenaGroup) -> None:
        """Stop inspecting offers: ``group`` has a channel, or does without the arena."""
        self._opening.pop(group.number, None)

    def _rung(self, messages: Sequence[DoorbellMessage]) -> None:
        if not self._has_all_ranks:
            messages = self._take_losses(messages)
        if self._opening:
            for rank, number, _ in messages:
                self.directory.record_ring(rank, number)
            for group in list(self._opening.values()):
                group.look()
        elif not self.arena.polls:
            for rank, number, word in messages:
                if word == _OFFERED:
                    self.directory.record_ring(rank, number)
        self.driver.receive(messages)

    def _take_losses(self, messages: Sequence[DoorbellMessage]) -> Sequence[DoorbellMessage]:
        """Handle and remove messages about ranks of other hosts."""
        losses = [(rank, lost) for rank, number, lost in messages if number == _LOSS]
        if not losses:
            return messages
        for rank, lost in losses:
            if lost < self.links.world.size and lost not in self.members:
                self.links.report_lost(lost, f"rank {rank} of this host has lost it (reported by rank {rank})")
        return [message for message in messages if message[1] != _LOSS]

    def _lost(self, rank: int, error: PeerLost) -> None:
        """Fail operations that wait for a rank that is gone, even if it left in good order.

        The ranks of this host, which may have no links between them, notify each other of losses elsewhere.
        """
        if rank not in self.members and self.links.lost[rank].cause != LEFT:
            for member in self.members:
                self.arena.ring(member, _LOSS, rank)
        for group in list(self._opening.values()):
            if rank in group.ranks:
                group.fail(error)
        self.loop.call_soon(self.driver.notice_loss)


class _ChannelState(Enum):
    CLOSED = auto()
    OPENING = auto()
    OPEN = auto()
    REFUSED = auto()


class ArenaGroup:
    """The arena for one group, all of whose ``ranks`` are in it.  ``place`` is this rank's index among them.

    A group has one for its operations in the order of their calls, and another for keyed ones (``are_keyed``).
    """

    def __init__(
        self, host: ArenaHost, *, number: int, name: str, ranks: tuple[int, ...], place: int, are_keyed: bool = False
    ) -> None:
        self.host = host
        self.number = number
        self.ranks = ranks
        self.run_queue = KeyedRunQueue() if are_keyed else RunQueue()
        self.is_open = False
        self.is_refused = False
        self._name = name
        self._place = place
        self._state = _ChannelState.CLOSED
        self._waiting: list[tuple[Operation, asyncio.Future[None]]] = []

    async def open(self, operation: Operation) -> bool:
        """Wait until all ranks have made their offers; return False if the group must do without the arena."""
        if self._state is _ChannelState.CLOSED:
            self._state = _ChannelState.OPENING
            self.host.begin_opening(self)
            self.host.directory.offer(self.number)
            arena = self.host.arena
            for rank in self.ranks:
                if rank != arena.rank:
                    arena.ring(rank, self.number, _OFFERED)
            self.look()
        if self._state is _ChannelState.OPENING:
            opened: asyncio.Future[None] = self.host.loop.create_future()
            self._waiting.append((operation, opened))
            for rank in self.ranks:
                error = self.host.links.lost.get(rank)
                if error is not None:
                    raise error
            await operation.wait(None, opened)
        return self.is_open

    def close(self) -> None:
        """End the group on this rank, whose operations are over: another group may get its memory later."""
        host, was_open = self.host, self.is_open
        host.end_opening(self)
        host.driver.forget(self.run_queue)
        host.directory.withdraw(self.number, self.ranks, was_open=was_open)
        self._state, self.is_open, self.is_refused = _ChannelState.REFUSED, False, True

    def look(self) -> None:
        """Open the channel, or do without, as soon as all offers are present."""
        offers = [self.host.directory.find(rank, self.number) for rank in self.ranks]
        made = [offer for offer in offers if offer is not None]
        if len(made) == len(offers):
            self._conclude(made)

    def missing(self) -> list[int]:
        """Return the ranks that have not made an offer."""
        return [rank for rank in self.ranks if self.host.directory.find(rank, self.number) is None]

    def fail(self, error: PeerLost) -> None:
        """Fail the operations that wait for the offer of a rank that is gone."""
        waiting, self._waiting = self._waiting, []
        for operation, _ in waiting:
            if not operation.is_over:  # it may have ended before, for another reason
                operation.fail(operation.lost(error))

    def _conclude(self, offers: Sequence[Offer]) -> None:
        self.host.end_opening(self)
        without = [rank for rank, offer in zip(self.ranks, offers, strict=True) if not offer.slot_bytes]
        if without:
            self._state, self.is_refused = _ChannelState.REFUSED, True
            self.run_queue.tasks.clear()
            if self._place == 0:
                _log.info(
                    "group %s: no room left in the arena of rank %d, messages are used instead; "
                    "ASYNCPAR_ARENA_BYTES makes room",
                    self._name,
                    without[0],
                )
        else:
            self._state = _ChannelState.OPEN
            self.is_open = True
            self._open_channel(offers)
        waiting, self._waiting = self._waiting, []
        for _, opened in waiting:
            if not opened.done():
                opened.set_result(None)

    def _open_channel(self, offers: Sequence[Offer]) -> None:
        host, number, ranks, place = self.host, self.number, self.ranks, self._place
        counts: Sequence[Counts] = ()
        if isinstance(self.run_queue, KeyedRunQueue):
            order_log = OrderLog(host.arena, number=number, ranks=ranks, place=place, offers=offers)
            self.run_queue.sequencer = open_sequencer(order_log, host.links.lost)
            offers = [behind_order_log(offer, len(ranks)) for offer in offers]
            counts = order_log.counts
        channel = Channel(host.arena, number=number, ranks=ranks, place=place, offers=offers)
        host.driver.open(self.run_queue, channel, *counts)
