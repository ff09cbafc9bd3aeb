"""Busy polling for an answer that will arrive sooner than a sleeping loop can wake up.

Theory of operation.  An event loop with nothing to do sleeps in the kernel, and waking it takes longer than a small
message is in transit: 20 to 100 us on a virtual machine.  So after a small frame the loop is kept spinning for a
moment.  Every turn polls the kernel without sleeping, and everything else that is ready runs as usual.  That burns a
processor, so it is only done where every rank of the host has one, and for as long as it pays: the time doubles when
something arrived so soon after it was expected that an awake loop would have received it in time, and halves when
nothing arrived or it arrived later.  This is judged whether the loop was awake or not, so polling that pays again is
rediscovered.  Where other processes keep the processors busy, a polling rank keeps them from running, possibly the very
peer it waits for; so no rank polls then (see ``CpuPressure``).

Pressure on the processors (``CpuPressure``).  Linux counts the time during which some process could run but had no
processor (pressure stall information).  While this process burns processor time only for speed, it checks now and then
how fast that counter grows.  If it grows fast, there is no processor to spare, so polling pauses, for longer each time,
until it harms no process.  Where the system does not count, there is never contention.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOOK_SECONDS: Final = 0.05
MOST_LOOK_SECONDS: Final = 0.25
"""A longer time between two checks proves nothing: for most of it this process was not polling."""

MOST_WAITING: Final = 0.5
"""The most time, as a share, for which some process may wait for a processor."""

LEAST_REST_SECONDS: Final = 0.1
MOST_REST_SECONDS: Final = 2.0

_TOTAL = re.compile(rb"some .*total=(\d+)")
_PRESSURE = Path("/proc/pressure/cpu")


def read_waiting() -> float | None:
    """Return the total seconds in which a process waited for a processor; None if they are not counted."""
    try:
        match = _TOTAL.search(_PRESSURE.read_bytes())
    except OSError:
        return None
    return None if match is None else int(match[1]) / 1e6


class CpuPressure:
    """Decides whether processor time may be burnt.  ``read`` is ``read_waiting``, or simulates it."""

    def __init__(self, read: Callable[[], float | None] = read_waiting) -> None:
        self._read = read
        self._looked = float("-inf")
        self._waited: float | None = None
        self._rest_until = float("-inf")
        self._rest = LEAST_REST_SECONDS

    def has_to_rest(self, now: float) -> bool:
        """Return whether polling must pause at time ``now``.  Call it before each polling: most calls are cheap."""
        if now < self._rest_until:
            return True
        if now - self._looked < LOOK_SECONDS:
            return False
        waited = self._read()
        before, self._waited = self._waited, waited
        passed, self._looked = now - self._looked, now
        if waited is None or before is None or passed > MOST_LOOK_SECONDS:
            return False
        if waited - before <= MOST_WAITING * passed:
            self._rest = max(self._rest - passed, LEAST_REST_SECONDS)
            return False
        self._waited = None  # the pressure while nothing polls does not count
        self._rest_until = now + self._rest
        self._rest = min(2 * self._rest, MOST_REST_SECONDS)
        return True


LONGEST_SECONDS: Final = 200e-6
"""A request and its reply, both in Python, take less; so does one segment of a collective."""

SHORTEST_SECONDS: Final = 4e-6
"""At this length there is no polling at all."""

WAKING_SECONDS: Final = 300e-6
"""Most seconds by which an arrival at a sleeping loop may be later than at one that is awake.

Both ends had to be woken up, perhaps from the deep sleep of an idle machine.
"""

_FEW_TURNS: Final = 2
"""A poll of fewer turns that lasted much too long proves nothing: something else kept the loop busy."""


class SpinPolicy:
    """Chooses how long to poll.  ``seconds`` is the time for the next wait."""

    def __init__(self) -> None:
        self.seconds = LONGEST_SECONDS

    def came(self, gap: float, *, was_awake: bool) -> None:
        """Note an arrival ``gap`` seconds after it was expected."""
        if gap - (0.0 if was_awake else WAKING_SECONDS) <= LONGEST_SECONDS:
            self.seconds = min(2 * self.seconds, LONGEST_SECONDS)
        else:
            self.was_in_vain()

    def was_in_vain(self) -> None:
        """Note that nothing came."""
        self.seconds = max(self.seconds / 2, SHORTEST_SECONDS)


class BusyPoll:
    """Keeps the running loop awake for a moment when a peer's answer is due.  One for all lanes of a node.

    Does nothing until ``is_allowed`` is set.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, contention: CpuPressure | None = None) -> None:
        self.is_allowed = False
        self._contention = contention or CpuPressure()
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._patience = SpinPolicy()
        self._since: float | None = None
        """When something was first expected; None once something came, or nothing for so long that this was judged."""
        self._expected = 0.0
        """When something was last expected."""
        self._until = 0.0
        self._turns = 0
        self._is_watching = False

    def expect(self) -> None:
        """Expect a small frame soon."""
        if not self.is_allowed:
            return
        self._expected = now = self._clock()
        if self._since is None:
            self._since = now
        elif now - self._since >= LONGEST_SECONDS:
            self._patience.was_in_vain()
            self._since = now
        self._until = now + self._patience.seconds
        if self._is_watching or self._patience.seconds <= SHORTEST_SECONDS:
            return
        if not self._contention.has_to_rest(now):
            self._is_watching = True
            self._turns = 0
            self._loop.call_soon(self._watch)

    def arrived(self) -> None:
        """Note an arrival."""
        if self._since is not None:
            self._patience.came(self._clock() - self._expected, was_awake=self._is_watching)
            self._since = None
            self._turns = 0

    def _watch(self) -> None:
        now = self._clock()
        if now < self._until:
            self._turns += 1
            self._loop.call_soon(self._watch)
            return
        self._is_watching = False
        if self._turns < _FEW_TURNS and now - self._until > LONGEST_SECONDS:
            self._since = None
