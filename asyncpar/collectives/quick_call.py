"""The awaitable of small operations in shared memory, which usually completes without the loop."""

from __future__ import annotations

from collections.abc import Generator
from sys import _getframe
from time import perf_counter
from typing import Any

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.call import Call, give_up
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.shared_memory.call import ArenaCall, ArenaOperation
from asyncpar.collectives.shared_memory.fast_path import QuickPlan

_CALL_DEPTH = 3
"""Number of calls between the user's and the constructor of a quick call."""


class QuickCall(Call[Array]):
    """The awaitable of a small operation on ``x`` in place."""

    __slots__ = ("_engine", "_plan", "_sequence", "_site", "_x")

    def __init__(self, engine: Engine, plan: QuickPlan, x: Array) -> None:
        engine.table.context.check_home_loop(plan.name)
        if engine.group.given_up is not None:
            engine.group.check_open()
        self._engine = engine
        self._plan = plan
        self._x = x
        self._steps = None
        engine.ledger.last = self._sequence = sequence = engine.ledger.last + 1
        frame, recorder = _getframe(_CALL_DEPTH), plan.recorder
        self._site = site = recorder.sites.get(id(frame.f_code) + frame.f_lasti) or recorder.site(frame)
        engine.group.early[sequence] = plan, x, site

    @property
    def name(self) -> str:
        return self._plan.name

    @property
    def runs_anywhere(self) -> bool:
        return True

    def _begin(self) -> Generator[Any, Any, Array]:
        engine, sequence = self._engine, self._sequence
        table, early = engine.table, engine.group.early
        try:
            table.context.check_home_loop(self._plan.name)
        except BaseException as error:
            self._give_up(error)
            raise
        if (
            len(early) == 1
            and sequence in early
            and table.is_calm(self._plan.run_queue, engine.group, sequence)
            and self._is_over_at_once()
        ):
            return self._x
        if sequence in early:
            engine.admit_early()
        operation = engine.group.active[sequence]
        assert isinstance(operation, ArenaOperation)
        yield from ArenaCall(operation.task, None, _impossible, engine.count).__await__()
        return self._x

    def _is_over_at_once(self) -> bool:
        """Try to complete without the loop; otherwise become an operation that continues from this state."""
        engine, plan, sequence, x = self._engine, self._plan, self._sequence, self._x
        started = perf_counter()
        turn = None if plan.driver.is_turn_due(started) else plan.enter(sequence, x)
        if turn is None:
            return False
        del engine.group.early[sequence]
        description = plan.description
        program = plan.program(turn, x)
        wait = plan.run(turn, program)
        if wait is None:
            turn.end(is_completed=True)
            engine.group.retire(sequence, description)
            plan.host.bytes_shown += plan.sends
            ended = perf_counter()
            engine.count_call(plan.name, description.algorithm, plan.sends, ended - started)
            plan.record(sequence, started, ended, self._site)
            return True
        task = engine.admit_quick(plan, sequence, x, self._site)
        task.resume(turn, program, wait)
        return False

    def _give_up(self, error: BaseException | None = None) -> None:
        """Implement ``Call._give_up``.  Thread-safe."""
        loop = self._engine.table.loop
        if not loop.is_closed():
            loop.call_soon_threadsafe(_give_up_now, self._engine, self._sequence, error)


def _give_up_now(engine: Engine, sequence: int, error: BaseException | None) -> None:
    if sequence in engine.group.early:
        engine.admit_early()
    operation = engine.group.active.get(sequence)
    if operation is not None:
        give_up(operation, error)


async def _impossible(operation: Operation) -> Any:
    raise AssertionError(f"{operation.label}: its group has an open channel")
