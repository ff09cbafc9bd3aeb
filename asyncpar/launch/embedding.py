"""An agent inside another program: the interface between the two."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from asyncpar.launch.failure import RankEnd


class AgentEmbedding:
    """Ties an agent to the program on whose event loop it runs; the signals of that program are not the agent's.

    ``on_address`` gets the ``host:port`` of the coordinator once it is known.  ``on_end`` is called after the last rank
    has ended; where the coordinator was served here, it gets the failed ranks of all hosts, the one that explains the
    others first.  After that ``paths`` are removed, as they are when the program dies.
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
        """Handle ``number`` as a launcher handles that signal: the first ends the job, the second kills it."""
        if self._take is None:
            self._early.append(number)
        else:
            self._take(number)

    def attach(self, take: Callable[[int], None] | None) -> None:
        """Let ``take`` handle all signals so far and from now on; None: the agent has ended."""
        self._take = take
        while take is not None and self._early:
            take(self._early.pop(0))
