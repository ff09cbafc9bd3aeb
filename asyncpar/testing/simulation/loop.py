"""The loop of a simulation: one thread, many processes, virtual time, and a seed that makes all free choices.

Theory of operation.  Every callback belongs to the process in whose context it runs.  Each process has a queue of its
own that is served in order, as asyncio promises; the seed determines which process gets its turn next, how timers of
one moment are ordered, and whether a process that has become ready is held up for a moment (as by an operating system).
A turn runs the callbacks that were ready at its beginning, as one iteration of asyncio's loop does.  When nothing is
ready the clock jumps to the next timer.

A paused process keeps its queue and gets no turns; nor does a dead one, so nothing of it runs again, not even its
``finally`` blocks, until everything is over (``bury``).  A clock that runs at another rate is a matter of conversion:
timers are kept in true time.

Futures and tasks hash by their number in order of creation: a set of them is iterated in the same order in every run.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import Context
from itertools import count
from random import Random
from typing import Any, Final, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from asyncpar.errors import AsyncparError
from asyncpar.testing.loop import VirtualTimeLoop
from asyncpar.testing.simulation.process import CURRENT, Health, SimulatedProcess
from asyncpar.testing.simulation.threads import LockstepThreads
from asyncpar.testing.simulation.trace import Trace

T = TypeVar("T")
Args = TypeVarTuple("Args")

HOLD_UP_CHANCE: Final = 0.1
"""The probability that a process that becomes ready is held up."""

HOLD_UP_SECONDS: Final = 300e-6
"""The longest such delay, in seconds."""

_CLOSING_SECONDS: Final = 0.02
"""Seconds for closing async generators: each is closed as a task, which frees the next one."""

_FEW_CANCELLED: Final = 100
_COLLECT_EVERY: Final = 200_000
_RUNNING: Final = Health.RUNNING
"""A global: turns look at it again and again, and members of an enumeration are slow to find."""


class SimulatedDeadlock(AsyncparError):  # noqa: N818
    """Nothing in the simulation can ever run again."""


class _NumberedFuture(asyncio.Future[Any]):
    _number = 0

    def __hash__(self) -> int:
        return self._number


class _NumberedTask(asyncio.Task[Any]):
    _number = 0

    def __hash__(self) -> int:
        return self._number


class _OwnTimer(asyncio.TimerHandle):
    """A timer that a process has set itself; others belong to the simulator."""

    __slots__ = ()


class SimulationLoop(VirtualTimeLoop):
    """A loop that runs simulated processes.  ``trace`` records every turn."""

    def __init__(self, seed: object, trace: Trace) -> None:
        self._dice = Random(f"{seed} schedule")
        self._draw = self._dice.random
        self._trace = trace
        self._turn = trace.turn
        self.outside = SimulatedProcess("simulator", number=0)
        self._runnable: list[SimulatedProcess] = []
        self._queue: list[tuple[float, float, int, asyncio.Handle, SimulatedProcess]] = []
        self._cancelled_timers = 0
        self._numbers = count(1)
        self._steps = 0
        self.notes: list[Any] = []
        """The notes of processes."""
        self._grave: list[asyncio.Task[Any]] = []
        self.lockstep = LockstepThreads(self)
        self.owners: WeakKeyDictionary[asyncio.Task[Any], SimulatedProcess] = WeakKeyDictionary()
        """The process of each task."""
        super().__init__()
        self.set_task_factory(self._make_task)

    # -- time ------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        process = CURRENT.get()
        return self._now if process is None else process.local_time(self._now)

    @property
    def now(self) -> float:
        """True virtual time, in seconds since the beginning."""
        return self._now

    def begin_before(self, seconds: float) -> None:
        """Let true time begin ``seconds`` before 0.0, the origin of planned faults."""
        self._now = -seconds

    def set_clock(self, process: SimulatedProcess, rate: float) -> None:
        """Let the clock of ``process`` run at ``rate`` from now on; its timers follow it."""
        timers = [(process.local_time(entry[0]), entry) for entry in self._queue if entry[4] is process]
        process.offset = process.local_time(self._now) - rate * self._now
        process.rate = rate
        kept = [entry for entry in self._queue if entry[4] is not process]
        self._queue = kept + [(process.true_time(local), *entry[1:]) for local, entry in timers]
        heapq.heapify(self._queue)

    def block(self, seconds: float) -> None:
        """Do what ``time.sleep`` does to the running process: it does nothing else for ``seconds``."""
        process = CURRENT.get()
        if process is not None and seconds > 0.0:
            process.ahead += seconds

    # -- the interface of asyncio loops --------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        process = (CURRENT.get() if context is None else context.get(CURRENT)) or self.outside
        process.ready.append(handle)
        if not process.is_queued and process.health is _RUNNING:
            self._make_runnable(process)
        return handle

    call_soon_threadsafe = call_soon
    """The loop's thread waits whenever another one runs (see ``threads``)."""

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _OwnTimer(when, callback, args, self, context)
        process = (CURRENT.get() if context is None else context.get(CURRENT)) or self.outside
        self._push(process.true_time(when), timer, process)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        if timer._scheduled:  # type: ignore[attr-defined]
            self._cancelled_timers += 1
            if self._cancelled_timers > _FEW_CANCELLED and 2 * self._cancelled_timers > len(self._queue):
                self._queue = [entry for entry in self._queue if not entry[3].cancelled()]
                heapq.heapify(self._queue)
                self._cancelled_timers = 0

    def create_future(self) -> asyncio.Future[Any]:
        future = _NumberedFuture(loop=self)
        future._number = next(self._numbers)
        return future

    def run_in_executor(self, executor: Any, func: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """Run ``func`` in a thread that takes turns with this one, after a drawn time."""
        return self.lockstep.submit(executor, lambda: func(*args), delay=self._draw() * HOLD_UP_SECONDS)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: there is none."""

    # -- turns -----------------------------------------------------------------------------------------------------

    def start(
        self, process: SimulatedProcess, main: Coroutine[Any, Any, T], *, name: str | None = None
    ) -> asyncio.Task[T]:
        """Begin ``main`` as a task of ``process``."""
        return self.create_task(main, name=name or process.name, context=process.context)

    def schedule(
        self, process: SimulatedProcess, when: float, callback: Callable[[*Args], object], *args: *Args
    ) -> asyncio.TimerHandle:
        """Make ``process`` call ``callback`` at ``when`` in true time."""
        timer = asyncio.TimerHandle(when, callback, args, self, process.context)
        self._push(when, timer, process)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def timers(self, process: SimulatedProcess) -> list[asyncio.TimerHandle]:
        """Return the timers that ``process`` has set, and that are neither due nor cancelled."""
        own = (entry[3] for entry in sorted(self._queue, key=lambda entry: entry[:3]) if entry[4] is process)
        return [timer for timer in own if isinstance(timer, _OwnTimer) and not timer.cancelled()]

    def kill(self, process: SimulatedProcess) -> None:
        """Prevent ``process`` from ever running again."""
        process.health = Health.DEAD
        self._grave.extend(asyncio.all_tasks(self))  # a freed task would run its ``finally`` blocks

    def bury(self, seconds: float) -> None:
        """Cancel all tasks and let them end, those of dead processes included, for at most ``seconds``.

        Their async generators are closed after them, as ``asyncio.run`` does.
        """
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        for task in tasks:
            owner = self.owners.get(task)
            if owner is not None and owner.health is not Health.RUNNING:
                owner.health = Health.RUNNING
                self._make_runnable(owner)
            task.cancel()

        async def wait() -> None:
            if tasks:
                await asyncio.wait(tasks, timeout=seconds)
            self._grave.clear()
            await asyncio.sleep(_CLOSING_SECONDS)

        self.run_until_complete(wait())

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """Close an unreferenced generator, as asyncio does, unless the simulation ends first."""
        self._asyncgens.discard(agen)  # type: ignore[attr-defined]
        if not self.is_closed():
            self.call_soon(self._close_generator, agen)

    def _close_generator(self, agen: AsyncGenerator[Any, Any]) -> None:
        self.create_task(agen.aclose())

    def pause(self, process: SimulatedProcess) -> None:
        """Give ``process`` no turns until ``resume``; its clock goes on."""
        if process.health is Health.RUNNING:
            process.health = Health.PAUSED

    def resume(self, process: SimulatedProcess) -> None:
        """Give turns to ``process`` again."""
        if process.health is Health.PAUSED:
            process.health = Health.RUNNING
            self._make_runnable(process)

    def close(self) -> None:
        self.lockstep.close()
        self._queue.clear()
        self._grave.clear()
        super().close()

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **kwargs: Any
    ) -> asyncio.Task[T]:
        number = next(self._numbers)
        kwargs.setdefault("name", f"Task-{number}")  # asyncio's own numbers go on from run to run
        if kwargs["name"] is None:
            kwargs["name"] = f"Task-{number}"
        task = _NumberedTask.__new__(_NumberedTask)
        task._number = number  # first: asyncio keeps a set of all tasks
        context = kwargs.get("context")
        process = CURRENT.get() if context is None else context.get(CURRENT)
        if process is not None:
            self.owners[task] = process
        task.__init__(coro, loop=loop, **kwargs)  # type: ignore[misc]
        return task

    def _push(self, when: float, handle: asyncio.Handle, process: SimulatedProcess) -> None:
        heapq.heappush(self._queue, (when, self._draw(), next(self._numbers), handle, process))

    def _enqueue(self, process: SimulatedProcess, handle: asyncio.Handle) -> None:
        process.ready.append(handle)
        if not process.is_queued and process.health is _RUNNING:
            self._make_runnable(process)

    def _make_runnable(self, process: SimulatedProcess) -> None:
        if process.is_queued or not process.ready:
            return
        process.is_queued = True
        delay = process.blocked_until - self._now
        if delay < 0.0:
            delay = 0.0
        if process.node is not None and self._draw() < HOLD_UP_CHANCE:
            delay += self._draw() * HOLD_UP_SECONDS
        if delay:
            wake = asyncio.Handle(self._runnable.append, (process,), self, None)
            self._push(self._now + delay, wake, self.outside)
        else:
            self._runnable.append(process)

    def _run_once(self) -> None:
        """Give one process its turn, or advance time."""
        runnable = self._runnable
        if not runnable:
            self._advance()
            return
        place = int(self._draw() * len(runnable)) if len(runnable) > 1 else 0
        process = runnable[place]
        runnable[place] = runnable[-1]
        runnable.pop()
        if process.health is not _RUNNING:
            process.is_queued = False
            return
        ready = process.ready
        count = len(ready)
        self._turn(self._now, process.number, count)
        while count:
            count -= 1
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
        self._steps += 1
        if self._steps % _COLLECT_EVERY == 0:
            self._trace.collect_garbage()
        if process.ahead:
            process.blocked_until, process.ahead = self._now + process.ahead / process.rate, 0.0
        process.is_queued = False
        if ready and process.health is _RUNNING:
            self._make_runnable(process)

    def _advance(self) -> None:
        """Move the clock to the next timer, and make due callbacks ready."""
        queue = self._queue
        while queue and queue[0][3]._cancelled:
            heapq.heappop(queue)
        if not queue:
            raise SimulatedDeadlock("nothing can run: no callback is ready and no timer is set")
        self._now = now = max(self._now, queue[0][0])
        while queue and queue[0][0] <= now:
            _, _, _, handle, process = heapq.heappop(queue)
            if handle._cancelled:
                continue
            if isinstance(handle, asyncio.TimerHandle):
                handle._scheduled = False  # type: ignore[attr-defined]
                self._enqueue(process, handle)
            else:
                handle._run()
