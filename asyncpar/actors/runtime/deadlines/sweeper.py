"""Looks for the deadlines of asks that take long, and follows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from asyncpar.actors.runtime.deadlines.alarm import AlarmClock
from asyncpar.actors.runtime.deadlines.discovery import Iteration, find_deadline

PERIOD: Final = 0.005
"""Seconds after which an ask takes long: it is looked at once when it is one to two of them old."""
LOOKS: Final = 20
"""Most asks that are looked at in a row; a look takes about 10 microseconds.  The others wait for a period more."""


@dataclass(slots=True, eq=False)
class _Ask:
    task: asyncio.Task[Any]
    iterator: Iteration | None
    limit: float | None
    reported: float | None


class DeadlineSweeper:
    """Calls ``report(call, when)`` for every watched ask whose task turns out to have a deadline.

    Quick asks cost two operations on a dict each.  All asks together have one timer for the search, and one for what
    was found: when a deadline comes and the ask is still there, somebody has moved the deadline, so it is looked for
    again and reported anew; as None if there is none any more.
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
        self._alarms = AlarmClock[int](self._look_again)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Is no timer set?"""
        return self._timer is None and not self._alarms.is_ticking

    def watch(
        self, call: int, task: asyncio.Task[Any], limit: float | None = None, iterator: Iteration | None = None
    ) -> None:
        """Look for a deadline of ``task``, which has just sent ``call``, in a while.

        With ``iterator`` it is the deadline of the loop over that which counts.  ``limit`` is a deadline that the
        receiver knows of already; later ones are not reported.
        """
        self._young[call] = _Ask(task, iterator, limit, limit)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD, self._sweep)

    def forget(self, call: int) -> None:
        """The ask is over."""
        if self._young.pop(call, None) is not None or self._old.pop(call, None) is not None:
            return
        if self._found.pop(call, None) is not None:
            self._alarms.drop(call)

    def tighten(self, call: int, limit: float | None) -> None:
        """The limit of the ask turned out to be ``limit``."""
        ask = self._young.get(call) or self._old.get(call)
        if ask is not None:
            ask.limit = limit
            return
        ask = self._found.get(call)
        if ask is not None:
            ask.limit = limit
            self._examine(call, ask)

    def close(self) -> None:
        """Forget everything."""
        self._young.clear()
        self._old.clear()
        self._found.clear()
        self._alarms.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        for call in list(islice(self._old, LOOKS)):
            ask = self._found[call] = self._old.pop(call)
            self._examine(call, ask)
        self._old |= self._young
        self._young = {}
        if self._old:
            self._timer = asyncio.get_running_loop().call_later(PERIOD, self._sweep)

    def _look_again(self, call: int) -> None:
        ask = self._found.get(call)
        if ask is not None:
            self._examine(call, ask)

    def _examine(self, call: int, ask: _Ask) -> None:
        when = self._find(ask.task, ask.iterator)
        if ask.limit is not None and (when is None or when > ask.limit):
            when = ask.limit
        if when == ask.reported:  # also if it has just come: whoever set it is about to cancel the task
            return
        ask.reported = when
        if when is None or when == ask.limit:
            self._alarms.drop(call)
        else:
            self._alarms.set(call, when)
        self._report(call, when)
