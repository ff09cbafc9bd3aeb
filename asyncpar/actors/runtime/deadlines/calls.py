"""The deadlines of a caller's calls, on their way to those who serve them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.deadlines.discovery import Iteration, check_interpreter
from asyncpar.actors.runtime.deadlines.sweeper import DeadlineSweeper
from asyncpar.actors.runtime.outbound import Outbound
from asyncpar.actors.runtime.pending import Pending
from asyncpar.actors.runtime.window import OutboundMessage


class CallDeadlines:
    """Finds the deadlines of the calls in ``pending``, and says them to the ranks that were called.

    Raises ``UsageError`` on an interpreter on which they cannot be found.
    """

    def __init__(self, pending: Mapping[int, Pending], outbound: Outbound) -> None:
        check_interpreter()
        self._pending = pending
        self._outbound = outbound
        self._sweeper = DeadlineSweeper(self._found)
        self._held: dict[OutboundMessage, tuple[Pending, float | None]] = {}
        """Deadlines of calls that have not left yet."""

    def begin(self, pending: Pending, iterator: Iteration | None = None) -> None:
        """The current task is about to wait for ``pending``, or to iterate over it by ``iterator``."""
        task = asyncio.current_task()
        if task is not None:
            limit = None if pending.origin is None else pending.origin.deadline
            self._sweeper.watch(pending.call, task, limit, iterator)

    def end(self, pending: Pending) -> None:
        """The task waits no longer."""
        self._sweeper.forget(pending.call)
        if self._held and pending.outgoing is not None:
            self._held.pop(pending.outgoing, None)

    def sent(self, outgoing: OutboundMessage) -> None:
        """A call that had to wait has left."""
        held = self._held.pop(outgoing, None) if self._held else None
        if held is not None:
            self._say(*held)

    def tighten(self, calls: Iterable[int], deadline: float | None) -> None:
        """The endpoint that waits for ``calls`` turned out to have until ``deadline``."""
        for call in tuple(calls):
            self._sweeper.tighten(call, deadline)

    def close(self) -> None:
        """Forget everything."""
        self._sweeper.close()
        self._held.clear()

    def _found(self, call: int, deadline: float | None) -> None:
        pending = self._pending.get(call)
        if pending is None or pending.outgoing is None or pending.future.done():
            return
        if pending.outgoing.is_sent:
            self._say(pending, deadline)
        else:
            self._held[pending.outgoing] = pending, deadline

    def _say(self, pending: Pending, deadline: float | None) -> None:
        now = asyncio.get_running_loop().time()
        seconds = math.inf if deadline is None else max(0.0, deadline - now)
        self._outbound.say(pending.ref.rank, message.Deadline(pending.call, seconds))
