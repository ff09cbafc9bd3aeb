"""Stay awake for an answer that will be here sooner than a sleeper wakes.

Theory of operation.  An event loop with nothing to do sleeps in the kernel, and to be woken takes longer than a small
message takes on its way: 20 to 50 us on a virtual machine.  So after a small frame the loop is kept turning for a
moment.  Every turn asks the kernel for news without sleeping, and all else that is ready gets its turn as ever.  That
burns a processor, so it is only done where every rank of the host has one, and for as long as it pays: the time halves
when nothing came and doubles when something did, and once in a while the whole time is tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

LONGEST_SECONDS: Final = 50e-6
SHORTEST_SECONDS: Final = 4e-6
TRY_AGAIN: Final = 32
"""After so many vigils in vain, one lasts the longest time."""

_FEW_TURNS: Final = 2
"""A vigil of fewer turns says nothing: something else kept the loop busy."""


class Patience:
    """How long it pays to stay awake.  ``seconds`` says it for the next time."""

    def __init__(self) -> None:
        self.seconds = LONGEST_SECONDS
        self._in_vain = 0

    def paid(self) -> None:
        """Something came."""
        self._in_vain = 0
        self.seconds = min(2 * self.seconds, LONGEST_SECONDS)

    def was_in_vain(self) -> None:
        """Nothing came."""
        self._in_vain += 1
        self.seconds = max(self.seconds / 2, SHORTEST_SECONDS)
        if self._in_vain % TRY_AGAIN == 0:
            self.seconds = LONGEST_SECONDS


class Vigil:
    """Keeps the running loop awake for a moment when a peer's answer is due.  One for all lanes of a node.

    Does nothing until ``is_allowed`` is set.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_allowed = False
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._patience = Patience()
        self._until = 0.0
        self._turns = 0
        self._is_watching = False

    def expect(self) -> None:
        """Something small may come at once."""
        if self.is_allowed:
            self._until = self._clock() + self._patience.seconds
            if not self._is_watching:
                self._is_watching = True
                self._turns = 0
                self._loop.call_soon(self._watch)

    def arrived(self) -> None:
        """Something came."""
        if self._is_watching:
            self._patience.paid()
            self._turns = 0

    def _watch(self) -> None:
        if self._clock() < self._until:
            self._turns += 1
            self._loop.call_soon(self._watch)
            return
        self._is_watching = False
        if self._turns >= _FEW_TURNS:
            self._patience.was_in_vain()
