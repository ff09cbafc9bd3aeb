"""Decide what launchers say while they wait for hosts: who is there, who is missing, and who was refused.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from asyncpar.launch.protocol import AgentHello

FIRST_SECONDS: Final = 2.0
"""Seconds that hosts may take before anything is said, and that news wait for those of other hosts."""

AGAIN_SECONDS: Final = 30.0
"""Seconds after which it is said again, although nothing has changed."""

_MOST_REFUSED: Final = 20
_MOST_NAMED: Final = 16


class HostArrivals:
    """What is said while ``nnodes`` hosts gather; ``may_name``: places of hosts that are missing can be named."""

    def __init__(self, nnodes: int, *, may_name: bool) -> None:
        self._nnodes = nnodes
        self._may_name = may_name
        self._due: float | None = None
        self._is_known = True
        self._refused: set[tuple[str, str]] = set()

    @property
    def next_deadline(self) -> float | None:
        """When there is something to be said, None if there is nothing."""
        return self._due

    def change(self, now: float) -> None:
        """Take that a host came or went."""
        if self._is_known:
            self._due, self._is_known = now + FIRST_SECONDS, False

    def end(self) -> None:
        """Take that all are there."""
        self._due, self._is_known = None, True

    def refuse(self, who: str, why: str) -> str:
        """Return what is said of ``who``, which was refused; "" if it was said already."""
        if (who, why) in self._refused or len(self._refused) >= _MOST_REFUSED:
            return ""
        self._refused.add((who, why))
        return f"refused {who}: {why}"

    def say(self, hellos: Iterable[AgentHello], now: float) -> str:
        """Return what is to be said now, "" if nothing is."""
        if self._due is None or now < self._due:
            return ""
        self._due, self._is_known = now + AGAIN_SECONDS, True
        present = list(hellos)
        here = ", ".join(hello.host for hello in present[:_MOST_NAMED])
        more = f" and {len(present) - _MOST_NAMED} more" if len(present) > _MOST_NAMED else ""
        return f"waiting for hosts: {len(present)} of {self._nnodes} are here ({here}{more}){self._missing(present)}"

    def _missing(self, present: list[AgentHello]) -> str:
        taken = {hello.node_rank for hello in present}
        absent = [place for place in range(self._nnodes) if place not in taken]
        if not self._may_name or None in taken or len(absent) != self._nnodes - len(present):
            return ""
        named = ", ".join(map(str, absent[:_MOST_NAMED])) + (", ..." if len(absent) > _MOST_NAMED else "")
        return f"; missing: --node-rank {named}"
