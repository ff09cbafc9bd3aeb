"""Decide when to report the hosts that have arrived, are missing, or were refused while launchers wait.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from asyncpar.launch.protocol import AgentHello

FIRST_SECONDS: Final = 2.0
"""Seconds that hosts may take before the first report, and for which news wait for those of other hosts."""

AGAIN_SECONDS: Final = 30.0
"""Seconds after which a report is repeated although nothing has changed."""

_MOST_REFUSED: Final = 20
_MOST_NAMED: Final = 16


class HostArrivals:
    """The reports while ``nnodes`` hosts gather; ``may_name``: the places of missing hosts can be named."""

    def __init__(self, nnodes: int, *, may_name: bool) -> None:
        self._nnodes = nnodes
        self._may_name = may_name
        self._due: float | None = None
        self._is_known = True
        self._refused: set[tuple[str, str]] = set()

    @property
    def next_deadline(self) -> float | None:
        """When the next report is due, None if there is nothing to report."""
        return self._due

    def change(self, now: float) -> None:
        """Record that a host came or went."""
        if self._is_known:
            self._due, self._is_known = now + FIRST_SECONDS, False

    def end(self) -> None:
        """Record that all hosts have arrived."""
        self._due, self._is_known = None, True

    def refuse(self, who: str, why: str) -> str:
        """Return the report that ``who`` was refused; "" if it was made already."""
        if (who, why) in self._refused or len(self._refused) >= _MOST_REFUSED:
            return ""
        self._refused.add((who, why))
        return f"refused {who}: {why}"

    def report(self, hellos: Iterable[AgentHello], now: float) -> str:
        """Return the report that is due now, "" if none is."""
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
