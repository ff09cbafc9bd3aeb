"""Operations in the arena on one rank, wholly or for a part of their work, and their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from time import perf_counter
from typing import Any

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.call import Call, ended, give_up
from asyncpar.collectives.causes import reason_of
from asyncpar.collectives.ledger import hash64
from asyncpar.collectives.operation import Operation, take_turn
from asyncpar.collectives.shared_memory.group import ArenaGroup
from asyncpar.errors import PeerLost
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program, RoundWait, Task
from asyncpar.net.arena.sequencer import NAMED

MakeProgram = Callable[[Turn], Program]

ROOTED = frozenset({"reduce", "gather", "scatter", "broadcast"})
"""Operations in which ranks wait only for the root; in all others each detects by itself which ranks are gone."""


class ArenaOperation(Operation):
    """An operation whose payload goes through the arena (or by messages, if its group got no channel)."""

    __slots__ = ("task",)

    task: ArenaTask

    def waits_for(self) -> list[int]:
        task = self.task
        if task.has_entered or task.missing:
            return [task.group.ranks[place] for place in task.missing]
        if self.waiter is not None and not task.group.is_open:
            return [*task.group.missing(), *super().waits_for()]
        absent = task.group.run_queue.absent(task)
        return [task.group.ranks[place] for place in absent] or super().waits_for()

    def refresh(self, now: float) -> None:
        wait = self.task.wait
        if wait is not self.task.seen:
            self.task.seen = wait
            self.progress_at = now

    def _release(self, *, keep: asyncio.Future[None] | None) -> None:
        self.task.die()
        super()._release(keep=keep)

    def _close(self, state: int) -> None:
        super()._close(state)
        del self.task  # which refers to this operation: neither needs to wait for the collector


class ArenaTask(Task):
    """The task of an operation, which the driver runs.  ``shows`` is the input that others may read in the heap."""

    __slots__ = ("_make", "_shows", "future", "group", "is_done", "missing", "operation", "seen")

    def __init__(self, operation: Operation, group: ArenaGroup, make: MakeProgram, shows: Array | None) -> None:
        super().__init__(operation.sequence)
        self.operation = operation
        self.group = group
        self.is_done = False
        self.missing: Sequence[int] = ()
        self.seen: RoundWait = self.wait
        self.future: asyncio.Future[None] | None = None
        self._make: MakeProgram | None = make
        self._shows = shows

    def begin(self, turn: Turn) -> Program:
        assert self._make is not None
        x, where = self._shows, None
        if x is not None and x.base is not None:  # an array that owns its memory is not in the heap
            where = self.group.host.arena.locate(x)
        turn.enter(self.operation.description.fingerprint, where)
        return self._make(turn)

    def completed(self) -> None:
        self.group.host.bytes_shown += self.operation.payload_sent
        self._conclude()

    def _conclude(self) -> None:
        """End the task, and wake its waiter."""
        self.is_done = True
        self.program = self._make = self._shows = None
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    def crashed(self, error: BaseException) -> None:
        self.operation.report_failure("failed", reason_of(error))
        self.operation.fail(error)

    def mismatched(self, place: int) -> None:
        self.missing = (place,)
        self.operation.suspect(self.group.ranks[place])

    def blocked(self, places: Sequence[int]) -> None:
        self.missing = places
        lost = self.group.host.links.lost
        if lost:
            for place in places:
                error = lost.get(self.group.ranks[place])
                if error is not None:
                    self._fail(error)
                    return

    def _fail(self, error: PeerLost) -> None:
        """Fail the operation, which needs a rank that is gone; notify ranks that may wait only for this one."""
        if self.operation.name in ROOTED:
            self.operation.report_failure("lost", error.cause or str(error), lost=error.rank)
        self.operation.fail(self.operation.lost(error))

    async def run(self) -> bool:
        """Run to the end; return False if the group does without the arena."""
        operation, group = self.operation, self.group
        if operation.failure is not None:
            raise operation.failure
        if not group.is_open and not await group.open(operation):
            return False
        if not self.is_wanted:  # otherwise the driver has it
            group.host.driver.run(group.run_queue, self)
        if not self.is_done:
            self.future = operation.context.loop.create_future()
            await operation.wait(None, self.future)
        return True

    def die(self) -> None:
        """Stop using the caller's memory; the turn passes later."""
        if self.is_done or self.is_dead:
            return
        self.is_dead = True
        if self.program is not None:
            self.program.close()
        self.program = self._make = self._shows = None
        self.group.host.driver.bury(self.group.run_queue, self)


class ArenaCall(Call[Any]):
    """The awaitable of an operation in the arena.

    In the common case, in which the others are present or come within microseconds, it completes without the loop:
    nothing is scheduled and no coroutine made.  ``by_messages`` runs the operation if its group has no channel.
    """

    __slots__ = ("_by_messages", "_count", "_task", "result")

    def __init__(
        self,
        task: ArenaTask,
        result: Any,
        by_messages: Callable[[Operation], Awaitable[Any]],
        count: Callable[[Operation], None],
    ) -> None:
        self._task = task
        self.result = result
        self._by_messages = by_messages
        self._count = count
        self._steps = None

    @property
    def name(self) -> str:
        return self._task.operation.name

    @property
    def is_over(self) -> bool:
        return self._task.operation.is_over

    @property
    def runs_anywhere(self) -> bool:
        """Whether its group has a channel, and it goes no other way."""
        return self._task.group.is_open

    def _give_up(self, error: BaseException | None = None) -> None:
        give_up(self._task.operation, error)

    def _begin(self) -> Generator[Any, Any, Any]:
        task = self._task
        operation = task.operation
        try:
            operation.context.check_home_loop(operation.name)
        except BaseException as error:
            give_up(operation, error)
            raise
        group = task.group
        try:
            operation.begin(operation.context.lost_member(operation.home))
            driver = group.host.driver
            now = perf_counter()
            if driver.is_turn_due(now):
                driver.give_turn(now)
                yield from take_turn(operation)
            if group.is_open and not task.is_dead:
                driver.run(group.run_queue, task)
            if not task.is_done:
                yield from self._wait().__await__()
        except BaseException as error:
            outcome = ended(operation, error)
            if outcome is error:
                raise
            raise outcome from error
        operation.finish()
        self._count(operation)
        return self.result

    async def _wait(self) -> None:
        task = self._task
        operation = task.operation
        operation.context.watch(operation)
        if not await task.run():
            operation.payload_sent = 0  # nothing went through the slot: messages count their own payload
            self.result = await self._by_messages(operation)


class HostedOperation(Operation):
    """An operation that has tasks in the arena besides its messages.

    ``group`` is the arena group of this host's ranks, None if it goes by messages alone; ``tasks`` are the pending
    tasks.  A task has no failure of its own: it fails the operation, and the operation's end kills it.
    """

    __slots__ = ("_seen", "group", "tasks")

    def __init__(self, **arguments: Any) -> None:
        self.group: ArenaGroup | None = None
        self.tasks: list[HostTask] = []
        self._seen: list[tuple[int, RoundWait]] = []
        super().__init__(**arguments)

    async def opened(self, group: ArenaGroup) -> bool:
        """Use ``group`` from now on, when it is open; return False if it must do without the arena."""
        self.group = group
        try:
            is_open = group.is_open or await group.open(self)
        except PeerLost as error:
            self.report_loss(error)
            raise
        self.group = group if is_open else None
        return is_open

    def report_loss(self, error: PeerLost) -> None:
        """Notify all ranks that a rank of this host is gone: those of other hosts may have no link to it."""
        if self.group is not None and error.rank in self.group.ranks:
            self.report_failure("lost", error.cause or str(error), lost=error.rank)

    def run(self, task: HostTask) -> None:
        """Announce ``task`` to the ranks of this host, and run it as far as possible."""
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
    """Task that runs the program ``make(x)`` when all ranks of the host have announced ``name``.

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
        self._hosted.report_loss(error)
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
