"""Deadlines of calls: the ``asyncio.timeout`` around an ask also limits the endpoint that serves it.

``DeadlineSweeper`` looks for the timeouts of asks that take long (see ``deadline_discovery``), ``CallDeadlines``
reports them to the callee, and the callee ends late calls by an ``AlarmClock``.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import islice
from typing import Any, Final, Generic, TypeVar

import msgspec

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.calls import PendingCall
from asyncpar.actors.runtime.deadline_discovery import Iteration, check_interpreter, find_deadline
from asyncpar.actors.runtime.outbound import Outbound
from asyncpar.actors.runtime.window import OutboundMessage

K = TypeVar("K", bound=Hashable)

_SLACK: Final = 64


class AlarmClock(Generic[K]):
    """Calls ``ring(key)`` once for every key when its time has come.

    There is one timer for all keys, and none while no key is set.  Setting and dropping cost O(log n).
    """

    def __init__(self, ring: Callable[[K], None]) -> None:
        self._ring = ring
        self._times: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        """Also holds keys that were set again or dropped since, up to as many again as are set."""
        self._counter = 0
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for: float | None = None

    @property
    def is_ticking(self) -> bool:
        """Whether a timer is set."""
        return self._timer is not None

    @property
    def size(self) -> int:
        """Number of times that are kept, including dropped ones."""
        return len(self._heap)

    def set(self, key: K, when: float) -> None:
        """Ring for ``key`` at the loop time ``when``, instead of at the time that was set before."""
        self._times[key] = when
        self._counter += 1
        heapq.heappush(self._heap, (when, self._counter, key))
        self._arm()

    def drop(self, key: K) -> None:
        """Remove ``key``."""
        if self._times.pop(key, None) is not None:
            self._arm()

    def clear(self) -> None:
        """Remove all keys."""
        self._times.clear()
        self._arm()

    def _arm(self) -> None:
        if len(self._heap) > 2 * len(self._times) + _SLACK:
            self._heap = [entry for entry in self._heap if self._times.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        while self._heap and self._times.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        when = self._heap[0][0] if self._heap else None
        if when == self._armed_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = when
        self._timer = None if when is None else asyncio.get_running_loop().call_at(when, self._wake, when)

    def _wake(self, when: float) -> None:
        self._timer = self._armed_for = None
        now = max(when, asyncio.get_running_loop().time())  # a timer may fire a clock tick early
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            time, _, key = heapq.heappop(self._heap)
            if self._times.get(key) == time:
                del self._times[key]
                due.append(key)
        self._arm()
        for key in due:
            self._ring(key)


PERIOD: Final = 0.005
"""Seconds after which an ask takes long: it is inspected once when it is one to two periods old."""
INSPECTIONS: Final = 8
"""Maximum number of asks inspected in a row, so that inspections take at most 2 % of the time: one takes about 11
microseconds.

The others wait for another period.
"""


class _Ask(msgspec.Struct, eq=False):
    task: asyncio.Task[Any]
    iterator: Iteration | None
    limit: float | None
    reported: float | None


class DeadlineSweeper:
    """Calls ``report(call, when)`` for every watched ask whose task turns out to have a deadline.

    Quick asks cost two dict operations each.  All asks together have one timer for the search, and one for the
    deadlines found: when a deadline passes and the ask still waits, the deadline was moved, so it is searched for and
    reported again, as None if there is none left.
    """

    def __init__(
        self,
        report: Callable[[int, float | None], None],
        *,
        find: Callable[[asyncio.Task[Any], Iteration | None], float | None] = find_deadline,
    ) -> None:
        self._report = report
        self._find = find
        self._young: dict[int, _Ask] = {}
        self._old: dict[int, _Ask] = {}
        self._found: dict[int, _Ask] = {}
        self._alarms = AlarmClock[int](self._examine_again)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no timer is set."""
        return self._timer is None and not self._alarms.is_ticking

    def watch(
        self, call: int, task: asyncio.Task[Any], limit: float | None = None, iterator: Iteration | None = None
    ) -> None:
        """Look for a deadline of ``task``, which has just sent ``call``, after a while.

        With ``iterator`` the deadline of the loop over it counts.  ``limit`` is a deadline that the receiver already
        knows; later ones are not reported.
        """
        self._young[call] = _Ask(task, iterator, limit, limit)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD, self._sweep)

    def forget(self, call: int) -> None:
        """Stop looking for deadlines of an ask, which is over."""
        if self._young.pop(call, None) is not None or self._old.pop(call, None) is not None:
            return
        if self._found.pop(call, None) is not None:
            self._alarms.drop(call)

    def tighten(self, call: int, limit: float | None) -> None:
        """Set the limit of an ask to ``limit``."""
        ask = self._young.get(call) or self._old.get(call)
        if ask is not None:
            ask.limit = limit
            return
        ask = self._found.get(call)
        if ask is not None:
            ask.limit = limit
            self._examine(call, ask)

    def close(self) -> None:
        """Forget all asks and cancel the timers."""
        self._young.clear()
        self._old.clear()
        self._found.clear()
        self._alarms.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        for call in list(islice(self._old, INSPECTIONS)):
            ask = self._found[call] = self._old.pop(call)
            self._examine(call, ask)
        self._old |= self._young
        self._young = {}
        if self._old:
            self._timer = asyncio.get_running_loop().call_later(PERIOD, self._sweep)

    def _examine_again(self, call: int) -> None:
        ask = self._found.get(call)
        if ask is not None:
            self._examine(call, ask)

    def _examine(self, call: int, ask: _Ask) -> None:
        when = self._find(ask.task, ask.iterator)
        if ask.limit is not None and (when is None or when > ask.limit):
            when = ask.limit
        if when == ask.reported:  # even if it has just passed: the timeout is about to cancel the task
            return
        ask.reported = when
        if when is None or when == ask.limit:
            self._alarms.drop(call)
        else:
            self._alarms.set(call, when)
        self._report(call, when)


class CallDeadlines:
    """Finds the deadlines of the calls in ``pending``, and reports them to the ranks that were called.

    Raises ``UsageError`` on an interpreter on which they cannot be found.
    """

    def __init__(self, pending: Mapping[int, PendingCall], outbound: Outbound) -> None:
        check_interpreter()
        self._pending = pending
        self._outbound = outbound
        self._sweeper = DeadlineSweeper(self._found)
        self._held: dict[OutboundMessage, tuple[PendingCall, float | None]] = {}
        """Deadlines of calls that have not left yet."""

    def begin(self, pending: PendingCall, iterator: Iteration | None = None) -> None:
        """Look for the deadline of the current task, which awaits ``pending``, or of its loop over ``iterator``."""
        task = asyncio.current_task()
        if task is not None:
            limit = None if pending.origin is None else pending.origin.deadline
            self._sweeper.watch(pending.call, task, limit, iterator)

    def end(self, pending: PendingCall) -> None:
        """Stop looking for the deadline of ``pending``."""
        self._sweeper.forget(pending.call)
        if self._held and pending.outgoing is not None:
            self._held.pop(pending.outgoing, None)

    def sent(self, outgoing: OutboundMessage) -> None:
        """Report the deadline of a queued call, which was sent now."""
        held = self._held.pop(outgoing, None) if self._held else None
        if held is not None:
            self._send_deadline(*held)

    def tighten(self, calls: Iterable[int], deadline: float | None) -> None:
        """Limit ``calls``, which an endpoint waits for, to the ``deadline`` of that endpoint."""
        for call in tuple(calls):
            self._sweeper.tighten(call, deadline)

    def close(self) -> None:
        """Forget all asks and cancel the timers."""
        self._sweeper.close()
        self._held.clear()

    def _found(self, call: int, deadline: float | None) -> None:
        pending = self._pending.get(call)
        if pending is None or pending.outgoing is None or pending.future.done():
            return
        if pending.outgoing.is_sent:
            self._send_deadline(pending, deadline)
        else:
            self._held[pending.outgoing] = pending, deadline

    def _send_deadline(self, pending: PendingCall, deadline: float | None) -> None:
        now = asyncio.get_running_loop().time()
        seconds = math.inf if deadline is None else max(0.0, deadline - now)
        self._outbound.send_message(pending.ref.rank, message.Deadline(pending.call, seconds))
