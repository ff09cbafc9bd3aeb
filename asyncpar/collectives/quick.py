"""Small all-reduces and broadcasts in the arena, in as few steps as possible.

Theory of operation.  Most of the time of a small operation would be spent on keeping books that nobody reads.  So a
``QuickCall`` keeps none: it has a sequence number and a note in ``Group.early``.  If its turn has come when it is
awaited, and the others are there or come while this rank polls, it is over without the loop and without ever having
been an ``Operation``.  Whatever else happens turns it into one first, with everything that belongs to it: a call that
comes after it, a wait, a message of a peer about it, a lost peer.

What runs is what a program of ``arena_programs`` does, ``combine_all`` or ``hand_out`` and ``take_in`` of one chunk:
publish, wait until all have, take the result.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator
from time import perf_counter
from typing import Any, Final, Protocol

from asyncpar.collectives.arena_call import ArenaCall, ArenaOperation, ArenaTask, MakeProgram
from asyncpar.collectives.arena_group import ArenaGroup
from asyncpar.collectives.arrays import Array, Reduction
from asyncpar.collectives.ending import give_up, thrown
from asyncpar.collectives.keys import GroupLedger
from asyncpar.collectives.operation import Group, Operation
from asyncpar.collectives.protocol import Description
from asyncpar.collectives.table import OperationTable
from asyncpar.net.arena.channel import ROUND_BITS, Channel, Turn
from asyncpar.net.arena.run_queue import Program
from asyncpar.net.transport.home_loop import check_home_loop

_POLLS_PER_LOOK: Final = 3
"""Looking at a word here costs a third of what a look costs the driver."""


class QuickPlan(ABC):
    """All that is the same for all calls like that with ``x``, over the open channel of ``group``."""

    name: str
    sends: int
    """Bytes that go through this rank's slot."""

    def __init__(self, group: ArenaGroup, channel: Channel, description: Description, x: Array) -> None:
        self.description = description
        self.run_queue = group.run_queue
        self.others = channel.others
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


class QuickAllReduce(QuickPlan):
    """Everyone publishes its ``x``, and combines all of them in the order of ranks."""

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


class QuickEngine(Protocol):
    """What a quick call needs of its group: see ``Engine``."""

    table: OperationTable
    group: Group
    ledger: GroupLedger

    def admit(
        self, name: str, description: Description, sequence: int, make: MakeProgram, *, sends: int
    ) -> ArenaTask: ...
    def admit_early(self) -> None: ...
    def count_quick(self, name: str, algorithm: str, payload: int, seconds: float) -> None: ...
    def count(self, operation: Operation) -> None: ...


class QuickCall(Coroutine[Any, Any, Array]):
    """The awaitable of a small operation on ``x`` in place."""

    __slots__ = ("_engine", "_plan", "_running", "_sequence", "_x")

    def __init__(self, engine: QuickEngine, plan: QuickPlan, x: Array) -> None:
        check_home_loop(engine.table.loop, plan.name)
        if engine.group.given_up is not None:
            engine.group.check_open()
        self._engine = engine
        self._plan = plan
        self._x = x
        self._running: Generator[Any, Any, Array] | None = None
        self._sequence = sequence = engine.ledger.allot()
        engine.group.early[sequence] = plan, x

    def __await__(self) -> Generator[Any, Any, Array]:
        if self._running is not None:
            raise RuntimeError("cannot reuse already awaited coroutine")
        self._running = running = self._run()
        return running

    def __getattr__(self, name: str) -> str:
        """Be called like a coroutine by whoever shows it."""
        if name in ("__name__", "__qualname__"):
            return f"Communicator.{self._plan.name}"
        raise AttributeError(name)

    def send(self, value: Any) -> Any:
        return (self._running or self.__await__()).send(value)

    def throw(self, *error: Any) -> Any:
        try:
            return (self._running or self.__await__()).throw(*error)
        finally:
            self._give_up(thrown(error))

    def close(self) -> None:
        try:
            (self._running or self.__await__()).close()
        finally:
            self._give_up()

    def __del__(self) -> None:
        if not hasattr(self, "_running"):
            return  # the constructor refused the call
        if self._running is None:
            warnings.warn(f"coroutine '{self.__qualname__}' was never awaited", RuntimeWarning, stacklevel=2)
            self._give_up()

    def _run(self) -> Generator[Any, Any, Array]:
        engine, sequence = self._engine, self._sequence
        table, early = engine.table, engine.group.early
        try:
            check_home_loop(table.loop, self._plan.name)
        except BaseException as error:
            self._give_up(error)
            raise
        if len(early) == 1 and sequence in early and table.is_calm(self._plan.run_queue) and self._is_over_at_once():
            return self._x
        if sequence in early:
            engine.admit_early()
        operation = engine.group.active[sequence]
        assert isinstance(operation, ArenaOperation)
        yield from ArenaCall(operation.task, None, _impossible, engine.count).__await__()
        return self._x

    def _is_over_at_once(self) -> bool:
        """Get through without the loop, or become an operation that goes on from where this got."""
        engine, plan, sequence, x = self._engine, self._plan, self._sequence, self._x
        started = perf_counter()
        turn = None if plan.driver.is_turn_due(started) else plan.begin(sequence, x)
        if turn is None:
            return False
        del engine.group.early[sequence]
        description = plan.description
        if plan.poll(turn):
            plan.finish(turn, x)
            engine.group.retire(sequence, description)
            engine.count_quick(plan.name, description.algorithm, plan.sends, perf_counter() - started)
            return True
        task = admit(engine, plan, sequence, x)
        task.resume(turn, plan.rest(turn, x), (plan.others, 1))
        return False

    def _give_up(self, error: BaseException | None = None) -> None:
        """Nobody will await the call, because of ``error`` perhaps.  From any thread."""
        loop = self._engine.table.loop
        if not loop.is_closed():
            loop.call_soon_threadsafe(_give_up_now, self._engine, self._sequence, error)


def admit(engine: QuickEngine, plan: QuickPlan, sequence: int, x: Array) -> ArenaTask:
    """Make an operation of a quick call."""
    return engine.admit(plan.name, plan.description, sequence, lambda turn: plan.program(turn, x), sends=plan.sends)


def _give_up_now(engine: QuickEngine, sequence: int, error: BaseException | None) -> None:
    if sequence in engine.group.early:
        engine.admit_early()
    operation = engine.group.active.get(sequence)
    if operation is not None:
        give_up(operation, error)


async def _impossible(operation: Operation) -> Any:
    raise AssertionError(f"{operation.label}: its group has an open channel")
