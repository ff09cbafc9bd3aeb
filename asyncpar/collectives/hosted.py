"""Operations of groups on several hosts that do a part of their work in the arena of each host."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from asyncpar.collectives.arena_call import ArenaTask, MakeProgram
from asyncpar.collectives.arena_group import ArenaGroup
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.keys import hash64
from asyncpar.collectives.operation import Operation
from asyncpar.errors import PeerLost
from asyncpar.net.arena.run_queue import Wait
from asyncpar.net.arena.sequencer import NAMED


class HostedOperation(Operation):
    """An operation that has tasks in the arena besides its messages.

    ``group`` is what the ranks of this host have there, None if it goes by messages alone; ``tasks`` are those that are
    not over.  A task has no failure of its own: it fails the operation, and the operation's end kills it.
    """

    __slots__ = ("_seen", "group", "tasks")

    def __init__(self, **arguments: Any) -> None:
        self.group: ArenaGroup | None = None
        self.tasks: list[HostTask] = []
        self._seen: list[tuple[int, Wait]] = []
        super().__init__(**arguments)

    async def opened(self, group: ArenaGroup) -> bool:
        """Use ``group`` from now on, when it is open; False if it must do without the arena."""
        self.group = group
        try:
            is_open = group.is_open or await group.open(self)
        except PeerLost as error:
            self.tell_loss(error)
            raise
        self.group = group if is_open else None
        return is_open

    def tell_loss(self, error: PeerLost) -> None:
        """Tell everyone that a rank of this host is gone: those of other hosts may have no link to it."""
        if self.group is not None and error.rank in self.group.ranks:
            self.tell_failure("lost", error.cause or str(error), lost=error.rank)

    def run(self, task: HostTask) -> None:
        """Announce ``task`` to the ranks of this host, and get as far as possible with it."""
        if self.failure is None:
            self.tasks.append(task)
            task.group.host.driver.run(task.group.run_queue, task)

    async def ended(self, task: HostTask) -> None:
        """Wait until ``task`` is over."""
        if self.failure is not None or not task.is_done:
            task.future = self.context.loop.create_future()
            await self.wait(None, task.future)
        self.tasks.remove(task)

    def waits_for(self) -> list[int]:
        group, known = self.group, super().waits_for()
        if group is None or known:
            return known
        if not group.is_open:
            return group.missing()
        places = [place for task in self.tasks for place in task.waits_for()]
        return [group.ranks[place] for place in dict.fromkeys(places)]

    def refresh(self, now: float) -> None:
        super().refresh(now)
        seen = [(task.sequence, task.wait) for task in self.tasks]
        if seen != self._seen:
            self._seen = seen
            self.progress_at = now

    def _release(self, *, keep: asyncio.Future[None] | None) -> None:
        for task in self.tasks:
            task.die()
        super()._release(keep=keep)


class HostTask(ArenaTask):
    """What ``make`` makes of ``x``, when all ranks of the host are ready for what they all call ``name``.

    This rank shows the others ``shown`` bytes in it.
    """

    __slots__ = ("_hosted", "_shown")

    def __init__(
        self, operation: HostedOperation, group: ArenaGroup, name: str, make: MakeProgram, x: Array, *, shown: int
    ) -> None:
        super().__init__(operation, group, make, x)
        key = operation.key()
        self.sequence = hash64(key.group, key.sequence, name) | NAMED
        self._hosted = operation
        self._shown = shown

    def _fail(self, error: PeerLost) -> None:
        self._hosted.tell_loss(error)
        super()._fail(error)

    def completed(self) -> None:
        self.group.host.bytes_shown += self._shown
        self._hosted.payload_sent += self._shown
        self._conclude()

    def waits_for(self) -> Sequence[int]:
        """Return the places of the ranks that it waits for."""
        if self.is_done:
            return ()
        return self.missing if self.has_entered or self.missing else self.group.run_queue.absent(self)
