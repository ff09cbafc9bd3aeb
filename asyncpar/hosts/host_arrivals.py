"""Decide when to report the hosts that have arrived, are missing, or were refused while a job waits for them.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FIRST_SECONDS: Final = 2.0
"""Seconds that hosts may take before the first report, and for which news wait for those of other hosts."""

AGAIN_SECONDS: Final = 30.0
"""Seconds after which a report is repeated although nothing has changed."""

_MOST_REFUSED: Final = 20
_MOST_NAMED: Final = 16


class HostArrivals:
    """The reports while hosts gather."""

    def __init__(self) -> None:
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

    def report(self, hosts: Sequence[str], wanted: int, now: float, *, absent: Sequence[int] = ()) -> str:
        """Return the report that is due now, "" if none is.

        ``hosts`` are here of the ``wanted`` ones; ``absent`` are the places of the others, if they are known.
        """
        if self._due is None or now < self._due:
            return ""
        self._due, self._is_known = now + AGAIN_SECONDS, True
        here = ", ".join(hosts[:_MOST_NAMED])
        more = f" and {len(hosts) - _MOST_NAMED} more" if len(hosts) > _MOST_NAMED else ""
        text = f"waiting for hosts: {len(hosts)} of {wanted} are here ({here}{more})"
        if not absent:
            return text
        named = ", ".join(map(str, absent[:_MOST_NAMED])) + (", ..." if len(absent) > _MOST_NAMED else "")
        return f"{text}; missing: --node-rank {named}"
