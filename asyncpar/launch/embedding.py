"""An agent inside of another program: what that program gives it, and gets from it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from asyncpar.launch.failure import RankEnd


class AgentEmbedding:
    """Ties an agent to the program on whose event loop it runs; the signals of that program are not the agent's.

    ``on_address`` gets the ``host:port`` of the coordinator once it is known.  ``on_end`` is called after the last rank
    has ended, with the ranks of all hosts that failed, the one that explains the others first, where the coordinator
    was served here; after that ``paths`` are removed, as they are when the program dies.
    """

    def __init__(
        self,
        *,
        on_address: Callable[[str], None],
        on_end: Callable[[tuple[RankEnd, ...]], None],
        paths: tuple[Path, ...],
    ) -> None:
        self.on_address = on_address
        self.on_end = on_end
        self.paths = paths
        self._take: Callable[[int], None] | None = None
        self._early: list[int] = []

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Handle ``number`` as a launcher does that gets this signal: the first ends the job, the second kills it."""
        if self._take is None:
            self._early.append(number)
        else:
            self._take(number)

    def attach(self, take: Callable[[int], None] | None) -> None:
        """Let ``take`` handle the signals that come and have come; None: the agent has ended."""
        self._take = take
        while take is not None and self._early:
            take(self._early.pop(0))
