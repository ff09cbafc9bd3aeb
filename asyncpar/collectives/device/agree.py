"""Agreement of a group's ranks before an operation on devices is launched; its first rank decides the order.

Ranks of one host agree in shared memory: each publishes its record and reads those of the others, and the first one
adds the order, all in the operation's turn of the group's part of the arena (``net.arena.channel``), which compares
fingerprints.  Between publishing and reading, the stream that the operation will use is made to wait for the caller's.
Other groups send messages to the first rank, and get its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.device.records import (
    ORDER_WORDS,
    RECORD_WORDS,
    LaunchOrder,
    RankRecord,
    Way,
)
from asyncpar.collectives.device.state import DeviceGroup
from asyncpar.collectives.operation import Operation
from asyncpar.errors import UsageError
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program

MOST_COUNTS_IN_ARENA: Final = 256
"""Records with more counts go by messages: a slot of the arena has to hold one."""

_WORD: Final = np.dtype(np.int64)
_TO_FIRST, _FROM_FIRST = 0, 1


class Meeting:
    """One operation's agreement: ``order`` is set once all ranks have come."""

    __slots__ = ("_choose", "_counts", "_device", "_group", "_prepare", "has_announced", "order")

    def __init__(
        self,
        group: DeviceGroup,
        device: int,
        counts: Sequence[int],
        choose: Callable[[Sequence[RankRecord]], Way],
        prepare: Callable[[], None],
    ) -> None:
        self.order: LaunchOrder | None = None
        self.has_announced = False
        """Whether the others count on this rank."""
        self._group, self._device, self._counts = group, device, counts
        self._choose, self._prepare = choose, prepare

    def alone(self) -> LaunchOrder:
        """Return the order in a group of one rank."""
        return self._decide((self._group.record(self._device, self._counts),))

    def in_arena(self, turn: Turn) -> Program:
        """Run the agreement as a program of the arena."""
        group, length = self._group, RECORD_WORDS + len(self._counts)
        slots = turn.channel.views(turn.parity, _WORD, length + ORDER_WORDS)
        slots[group.place][:length] = group.row(self._device, self._counts)
        self.has_announced = True
        turn.post(1)
        self._prepare()
        yield turn.channel.others, 1
        records = group.records([slot[:length] for slot in slots])
        if group.place:
            yield (0,), 2
            self.order = LaunchOrder.decode(slots[0][length:], records)
        else:
            order = self._decide(records)
            slots[0][length:] = order.encode()
            turn.post(2)

    async def by_messages(self, operation: Operation) -> LaunchOrder:
        """Run the agreement by messages."""
        self.has_announced = True
        group, length = self._group, RECORD_WORDS + len(self._counts)
        if group.place:
            answer = np.zeros(ORDER_WORDS + group.size * length, _WORD)
            await self._ask(operation, answer)
            rows = answer[ORDER_WORDS:].reshape(group.size, length)
            return LaunchOrder.decode(answer, group.records(list(rows)))
        rows = np.zeros((group.size, length), _WORD)
        rows[0] = group.row(self._device, self._counts)
        others = list(enumerate(group.ranks))[1:]
        posted = [(rank, operation.post(rank, _TO_FIRST, _bytes(rows[place]))) for place, rank in others]
        for rank, coming in posted:
            if coming is not None:
                await operation.received(rank, _TO_FIRST, coming)
        order = self._decide(group.records(list(rows)))
        payload = _bytes(np.concatenate([order.encode(), rows.reshape(-1)]))
        sendings = [(rank, operation.send(rank, _FROM_FIRST, payload)) for _, rank in others]
        for rank, sent in sendings:
            if sent is not None:
                await operation.sent(rank, sent)
        return order

    async def _ask(self, operation: Operation, answer: Array) -> None:
        first = self._group.ranks[0]
        coming = operation.post(first, _FROM_FIRST, _bytes(answer))
        sending = operation.send(first, _TO_FIRST, _bytes(self._group.row(self._device, self._counts)))
        if coming is not None:
            await operation.received(first, _FROM_FIRST, coming)
        if sending is not None:
            await operation.sent(first, sending)

    def _decide(self, records: tuple[RankRecord, ...]) -> LaunchOrder:
        """Return the order, at the first rank of the group; operations that will be refused have none."""
        try:
            way: Way | None = self._choose(records)
        except UsageError:
            way = None  # every rank raises it, from the records
        self.order = self._group.decide(records, way)
        return self.order


def _bytes(array: Array) -> memoryview:
    return array.view(np.uint8).data
