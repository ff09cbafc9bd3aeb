"""The driver, which runs the turns of all channels of a rank: in order, in short slices, and awake when needed.

Theory of operation.  A *task* is one operation: its program is a generator that copies, reduces and posts, and yields
the rounds that it waits for.  Each channel runs its tasks one after another.  ``advance`` runs the head of a queue
until it must wait, or for ``SLICE_SECONDS``; then the loop gets its turn.

A wait polls for a moment; where ranks share cores it lets another one run between two polls (``sched_yield``).  The
number of polls adapts: it doubles when it pays and halves when it does not.  After that the rank stores ``SLEEPING``,
checks once more (see ``channel`` for why that loses no wake-up) and leaves; a doorbell message brings it back.  As a
last resort, if that argument had a hole, a timer checks again every ``RECHECK_SECONDS``; ``rescues`` counts how often
it found progress without a ring, and tests require 0.

A task may start before it is awaited, namely when a later one of its channel is: so the order in which callers await
does not matter.  A failed task leaves a tombstone, whose turn passes at once.  Where a group agrees on turns only as it
goes along (see ``KeyedRunQueue``), the driver asks its run queue for more tasks whenever it has run out of them; it is
busy, so it sleeps and is rung like all others, as long as it expects any.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Final, Protocol

from asyncpar.net.arena.arena import Arena
from asyncpar.net.arena.channel import Channel, Mismatch, Turn
from asyncpar.net.arena.run_queue import RunQueue, Task
from asyncpar.net.arena.segment import SLEEPING

SLICE_SECONDS: Final = 1e-3
"""Seconds for which a rank works on the arena before the loop gets its turn."""

RECHECK_SECONDS: Final = 0.5
_MOST_POLLS: Final = 600
_MOST_YIELDS: Final = 30
_FEWEST_YIELDS: Final = 8
_YIELDING_SECONDS: Final = 100e-6
_FEWEST_POLLS: Final = 32
_PATIENT_EVERY: Final = 8
"""After this many futile waits, test whether polling for long pays again."""


class ProgressSource(Protocol):
    """Progress that others report under a ``number``, by their place in ``ranks``."""

    @property
    def number(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def progress(self) -> Sequence[memoryview | list[int]]: ...


class Driver:
    """Runs all channels of a rank.  ``lost`` has the ranks that are gone."""

    def __init__(self, arena: Arena, loop: asyncio.AbstractEventLoop, lost: Container[int]) -> None:
        self.arena = arena
        self.rescues = 0
        """Wake-ups that only the timer caused: any is a bug."""
        self._loop = loop
        self._thread = threading.get_ident()
        self._lost = lost
        self._queues: dict[RunQueue, Channel] = {}
        self._numbers: dict[RunQueue, list[int]] = {}
        self._sources: dict[int, ProgressSource] = {}
        self._early: dict[tuple[int, int], int] = {}
        self._busy: dict[RunQueue, Channel] = {}
        self.shares_cores = not arena.may_spin
        """Whether polling takes processor time from the ranks that are waited for."""
        most = _MOST_YIELDS if self.shares_cores else _MOST_POLLS
        self._most_polls = most if arena.polls and arena.has_own_process else 0
        self._fewest_polls = min(_FEWEST_YIELDS if self.shares_cores else _FEWEST_POLLS, self._most_polls)
        self._polls = self._most_polls
        self._vain_waits = 0
        self._rings = 0
        self._last_turn = 0.0
        self._is_settling = False
        self._is_continuing = False
        self._sleeping = arena.segments[arena.rank].words(SLEEPING * 8, 1)
        self._fence = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, run_queue: RunQueue, channel: Channel, *more: ProgressSource) -> None:
        """Give a group its channel, and deliver progress of ``more`` sources from the doorbell."""
        run_queue.channel = channel
        self._queues[run_queue] = channel
        self._numbers[run_queue] = [source.number for source in (channel, *more)]
        for source in (channel, *more):
            self._sources[source.number] = source
            for rank in source.ranks if self._early else ():
                self._take(rank, source.number, self._early.pop((rank, source.number), 0))

    def forget(self, run_queue: RunQueue) -> None:
        """Stop using the memory of a group that has ended on this rank."""
        channel = self._queues.pop(run_queue, None)
        self._busy.pop(run_queue, None)
        for number in self._numbers.pop(run_queue, ()):
            self._sources.pop(number, None)
        if channel is not None:
            for task in run_queue.tasks:  # a rank still reading this one's memory must not believe it intact
                if task.turn is not None:
                    task.turn.end(is_completed=False)
            run_queue.close()

    def receive(self, messages: Sequence[tuple[int, int, int]]) -> None:
        """Process messages from the doorbell: (rank, group, progress)."""
        self._rings += 1
        if not self.arena.polls:
            for message in messages:
                self._take(*message)
        self.advance_all()

    def _take(self, rank: int, number: int, word: int) -> None:
        """Record progress reported by ``rank``, perhaps for a group that is not open here yet."""
        source = self._sources.get(number)
        if source is None and word:
            self._early[rank, number] = max(self._early.get((rank, number), 0), word)
        elif source is not None and rank in source.ranks:
            known = source.progress[source.ranks.index(rank)]
            known[0] = max(known[0], word)

    def run(self, run_queue: RunQueue, task: Task) -> None:
        """Advance ``task``, which is in ``run_queue`` and is awaited now, as far as possible."""
        channel = run_queue.channel
        assert channel is not None
        if not task.is_wanted:
            run_queue.wanted(task)
        self._sleeping[0] = 0
        self._busy[run_queue] = channel
        if self._advance(run_queue, channel, time.monotonic() + SLICE_SECONDS):
            del self._busy[run_queue]
        if self._busy and not self._is_continuing:
            self._sleep()

    def advance_all(self) -> None:
        """Advance everything as far as possible, then sleep if something is left."""
        self._sleeping[0] = 0
        self._advance_busy()
        if self._busy and not self._is_continuing:
            self._sleep()

    def notice_loss(self) -> None:
        """Advance all groups, even those without work, because a rank is gone."""
        self._busy.update(self._queues)
        self.advance_all()

    def bury(self, run_queue: RunQueue, task: Task) -> None:
        """Let the turn of ``task`` of ``run_queue``, which has failed, pass soon."""
        if run_queue.channel is not None:
            run_queue.died(task)
            self._busy[run_queue] = run_queue.channel
            self._continue_soon()

    def close(self) -> None:
        """Stop: drop all channels and timers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._busy.clear()
        for run_queue in self._queues:
            run_queue.close()
        self._queues.clear()
        self._sleeping = memoryview(bytearray(8)).cast("Q")  # the segment's word would keep it mapped
        self._numbers.clear()
        self._sources.clear()
        self._early.clear()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _sleep(self) -> None:
        """Request to be rung, and check once more for earlier posts."""
        sleeping = self._sleeping
        end = time.monotonic() + SLICE_SECONDS
        self._is_settling = True
        try:
            while True:
                with self._fence:
                    sleeping[0] = 1
                if not self._advance_busy():
                    break
                if time.monotonic() > end:
                    self._continue_soon()
                if not self._busy or self._is_continuing:
                    sleeping[0] = 0
                    return
        finally:
            self._is_settling = False
        if self._timer is None:
            self._timer = self._loop.call_later(RECHECK_SECONDS, self._recheck)

    def _recheck(self) -> None:
        self._timer = None
        if self._busy and not self._is_continuing:
            if self._advance_busy():
                self._loop.call_later(RECHECK_SECONDS, self._judge, self._rings)
            if self._busy:
                self._sleep()

    def _judge(self, rings: int) -> None:
        """Count a rescue if the timer found progress and no ring has come since."""
        self.rescues += self._rings == rings

    def _continue_soon(self) -> None:
        """Continue after other callbacks of the loop."""
        if self._busy and not self._is_continuing:
            self._is_continuing = True
            self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._is_continuing = False
        self._last_turn = time.perf_counter()
        self.advance_all()

    def is_turn_due(self, now: float) -> bool:
        """Return whether the loop has had no turn for a while, at ``now`` of ``time.perf_counter``.

        It needs none while it waits and another thread does its work: see ``blocking.caller_runs_loop``.
        """
        return now - self._last_turn > SLICE_SECONDS and threading.get_ident() == self._thread

    def give_turn(self, now: float) -> None:
        """Record that the caller lets the loop run at ``now``."""
        self._last_turn = now

    @property
    def polls(self) -> int:
        """Number of polls for progress before going to sleep."""
        return self._polls

    def polled(self, *, was_worth_it: bool) -> None:
        """Adapt to a wait: polling, up to ``polls`` times, was long enough or not."""
        if was_worth_it:
            self._polls = min(2 * self._polls, self._most_polls)
            return
        self._vain_waits += 1
        if self._vain_waits % _PATIENT_EVERY == 0:
            self._polls = self._most_polls
        else:
            self._polls = max(self._polls // 2, self._fewest_polls)

    def _spin(self, turn: Turn, places: Sequence[int], round_: int) -> bool:
        """Poll for a moment; return whether the wait is over."""
        if self._is_settling:
            return False
        is_over = self.poll(lambda: turn.has_reached(places, round_))
        self.polled(was_worth_it=is_over)
        return is_over

    def poll(self, is_over: Callable[[], bool]) -> bool:
        """Poll for a moment; where ranks share cores, let another one run between two polls."""
        if self.shares_cores:
            end = time.monotonic() + _YIELDING_SECONDS
            for _ in range(self._polls):
                os.sched_yield()
                if is_over():
                    return True
                if time.monotonic() > end:
                    break
            return False
        return any(is_over() for _ in range(self._polls))

    # -- working -----------------------------------------------------------------------------------------------------

    def _advance_busy(self) -> bool:
        """Work on every channel that has something to do; return whether anything moved."""
        end = time.monotonic() + SLICE_SECONDS
        moved = False
        for run_queue, channel in list(self._busy.items()):
            head = run_queue.tasks[0] if run_queue.tasks else None
            wait = None if head is None else head.wait
            if self._advance(run_queue, channel, end):
                del self._busy[run_queue]
                moved = True
            elif run_queue.tasks and (run_queue.tasks[0] is not head or run_queue.tasks[0].wait is not wait):
                moved = True
        return moved

    def _advance(self, run_queue: RunQueue, channel: Channel, end: float) -> bool:
        """Work on the head of ``run_queue`` until it must wait or ``end`` is reached; return whether all is done."""
        tasks = run_queue.tasks
        while tasks or (run_queue.is_expecting and self._refill(run_queue)):
            task = tasks[0]
            if task.is_dead:
                if not self._pass(task, channel):
                    return False
                tasks.popleft()
            elif not task.is_wanted:
                return True
            elif not task.has_entered and not self._enter(task, channel):
                if not task.is_dead:
                    return False
            elif self._run_program(task, end):
                turn = task.turn
                assert turn is not None
                tasks.popleft()
                turn.end(is_completed=True)
                task.completed()
                if tasks and time.monotonic() > end:
                    self._continue_soon()
                    return False
            elif not task.is_dead:
                return False
        return not run_queue.is_expecting

    def _refill(self, run_queue: RunQueue) -> bool:
        """Queue the tasks that have got their turn, or get it in a moment; return False if there are none."""
        if run_queue.refill():
            return True
        if self._is_settling or not run_queue.is_worth_polling:
            return False
        is_over = False
        while not is_over and self.poll(run_queue.has_news):
            is_over = run_queue.refill()
        self.polled(was_worth_it=is_over)
        return is_over

    def _pass(self, task: Task, channel: Channel) -> bool:
        """Let the turn of a dead task pass; return False if it is too early."""
        if any(rank in self._lost for rank in channel.ranks):
            return True  # no rank will take a turn in this group again
        turn = task.turn or Turn(channel, task.sequence)
        if not task.has_entered and not channel.is_clear(turn.parity):
            return False
        turn.end(is_completed=False)
        return True

    def _enter(self, task: Task, channel: Channel) -> bool:
        parity = task.sequence & 1
        if not channel.is_clear(parity):
            task.blocked(channel.others)
            return False
        task.has_entered = True
        task.turn = turn = Turn(channel, task.sequence)
        task.program = task.begin(turn)
        return True

    def _run_program(self, task: Task, end: float) -> bool:
        """Return whether the program has ended; if not, the task waits, is dead, or the slice is over."""
        program, turn = task.program, task.turn
        assert program is not None
        assert turn is not None
        places, round_ = task.wait
        was_polled, task.was_polled = task.was_polled, False
        try:
            while True:
                if not turn.has_reached(places, round_) and (was_polled or not self._spin(turn, places, round_)):
                    task.blocked(turn.missing(places, round_))
                    return False
                task.wait = places, round_ = next(program)
                was_polled = False
                if time.monotonic() > end:
                    self._continue_soon()
                    return False
        except StopIteration:
            if turn.is_intact():
                return True
            task.wait = (turn.places_read, 1)  # never reached by those that abandoned it: a failure report follows
            return False
        except Mismatch as mismatch:
            task.mismatched(mismatch.place)
            return False
        except Exception as error:  # noqa: BLE001  # the caller gets it
            task.crashed(error)
            return False
