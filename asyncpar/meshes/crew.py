"""The actors that were started together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asyncpar.meshes.notices import Notices
from asyncpar.meshes.tally import Tally
from asyncpar.runtime.error_text import sendable
from asyncpar.runtime.message import Abandon
from asyncpar.runtime.ref import ActorRef
from asyncpar.runtime.system import ActorSystem


class Crew:
    """What all references to parts of one mesh have in common.

    ``actors`` are by rank; their messages go through ``tally``.
    """

    def __init__(self, system: ActorSystem, mesh: str, actors: Mapping[int, ActorRef[Any]], tally: Tally) -> None:
        self.system = system
        self.actors = actors
        self.tally = tally
        self._mesh = mesh
        self._attempt = 0

    def round(self, ranks: Iterable[int]) -> Notices:
        """Begin a round of calls to the actors on ``ranks``."""
        called = list(ranks)
        return Notices(self.system.rank, called, lambda failed, text: self._give_up(called, failed, text))

    def _give_up(self, ranks: list[int], failed: int, text: str) -> None:
        """Let all groups with any of ``ranks`` begin anew, everywhere."""
        self._attempt += 1
        for rank in self.actors:
            self.system.abandon(rank, Abandon(self._mesh, self._attempt, ranks, failed, sendable(text)))
