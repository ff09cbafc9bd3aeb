"""Stay awake for an answer that will be here sooner than a sleeper wakes.

Theory of operation.  An event loop with nothing to do sleeps in the kernel, and to be woken takes longer than a small
message takes on its way: 20 to 100 us on a virtual machine.  So after a small frame the loop is kept turning for a
moment.  Every turn asks the kernel for news without sleeping, and all else that is ready gets its turn as ever.  That
burns a processor, so it is only done where every rank of the host has one, and for as long as it pays: the time doubles
when something came so soon after it was expected that an awake loop would have seen it come, and halves when nothing
came or it came later.  This is judged whether the loop was awake or not, so a vigil that pays again is found again.

Where others keep the processors busy, whoever stays awake may keep the peer itself from running.  That does not show
from here, but it takes longer then; so both ways are tried now and then, and the quicker one is chosen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

LONGEST_SECONDS: Final = 200e-6
"""An ask and its answer, both in Python, take less; so does one segment of a collective."""

SHORTEST_SECONDS: Final = 4e-6
"""At this length no vigil is kept at all."""

WAKING_SECONDS: Final = 100e-6
"""What comes to a sleeper would have come to one who is awake sooner by about this: both ends had to wake."""

TRY_EVERY: Final = 256
TRY_FOR: Final = 4
"""Of so many arrivals so many are waited for in the other way than the one that was quicker."""

_FEW_TURNS: Final = 2
"""A vigil of fewer turns says nothing: something else kept the loop busy."""


class Patience:
    """How long it pays to stay awake.  ``seconds`` says it for the next time."""

    def __init__(self) -> None:
        self.seconds = LONGEST_SECONDS

    def came(self, gap: float, *, was_awake: bool) -> None:
        """Something came ``gap`` seconds after it was expected."""
        if gap - (0.0 if was_awake else WAKING_SECONDS) <= LONGEST_SECONDS:
            self.seconds = min(2 * self.seconds, LONGEST_SECONDS)
        else:
            self.was_in_vain()

    def was_in_vain(self) -> None:
        """Nothing came."""
        self.seconds = max(self.seconds / 2, SHORTEST_SECONDS)


class Preference:
    """Which way of waiting is quicker here.  ``is_awake`` says how to wait for the next arrival."""

    def __init__(self) -> None:
        self.is_awake = True
        self._gaps: dict[bool, float] = {}
        self._arrivals = 0

    def came(self, gap: float) -> None:
        """Something came ``gap`` seconds after it was expected, waited for as ``is_awake`` says."""
        if gap <= LONGEST_SECONDS + 3 * WAKING_SECONDS:  # else it took its time for another reason
            before = self._gaps.get(self.is_awake, gap)
            self._gaps[self.is_awake] = before + (gap - before) / 8
        self._arrivals += 1
        is_awake_quicker = self._gaps.get(True, 0.0) <= self._gaps.get(False, 1.0)
        self.is_awake = is_awake_quicker != (self._arrivals % TRY_EVERY >= TRY_EVERY - TRY_FOR)


class Vigil:
    """Keeps the running loop awake for a moment when a peer's answer is due.  One for all lanes of a node.

    Does nothing until ``is_allowed`` is set.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_allowed = False
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._patience = Patience()
        self._preference = Preference()
        self._since: float | None = None
        """When something was expected first; None once something came, or nothing for so long that this was judged."""
        self._expected = 0.0
        """When something was expected last."""
        self._until = 0.0
        self._turns = 0
        self._is_watching = False

    def expect(self) -> None:
        """Something small may come at once."""
        if not self.is_allowed:
            return
        self._expected = now = self._clock()
        if self._since is None:
            self._since = now
        elif now - self._since >= LONGEST_SECONDS:
            self._patience.was_in_vain()
            self._since = now
        self._until = now + self._patience.seconds
        if not self._is_watching and self._preference.is_awake and self._patience.seconds > SHORTEST_SECONDS:
            self._is_watching = True
            self._turns = 0
            self._loop.call_soon(self._watch)

    def arrived(self) -> None:
        """Something came."""
        if self._since is not None:
            gap = self._clock() - self._expected
            self._patience.came(gap, was_awake=self._is_watching)
            self._preference.came(gap)
            self._since = None
            self._turns = 0

    def _watch(self) -> None:
        if self._clock() < self._until and self._preference.is_awake:
            self._turns += 1
            self._loop.call_soon(self._watch)
            return
        self._is_watching = False
        if self._turns < _FEW_TURNS and self._preference.is_awake:
            self._since = None
