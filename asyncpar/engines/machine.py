"""The decisions of a job over places: when they begin, when the rest is stopped, and when it is over.  Pure.

The coordinator, which the first place serves, decides about ranks; this machine is for what only the caller sees: lost
places, the caller's own wish to end, and places that do not end.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.engines.interface import BeginRanks, Interrupt, Kill, PlaceCommand, PlaceLost, PlaceReport, PlaceServes

LOST_SECONDS = 0.5
"""Seconds that the other places have to end by themselves after one was lost."""
MARGIN_SECONDS = 5.0
"""Seconds beyond the ranks' grace that a place may take to report its end, and that killed places may take."""


@dataclass(frozen=True, slots=True)
class CallerInterrupted:
    """The caller no longer wants the result; the second time, it no longer waits, either."""


@dataclass(frozen=True, slots=True)
class PlaceTick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class PlaceReported:
    """A place has ended."""

    place: int
    report: PlaceReport


JobEvent = PlaceServes | PlaceReported | PlaceLost | CallerInterrupted | PlaceTick


@dataclass(frozen=True, slots=True)
class SendToPlace:
    """Send ``command`` to ``place``."""

    place: int
    command: PlaceCommand


class PlacesMachine:
    """Decides for ``places`` places; ``is_over`` when all have ended or been given up."""

    def __init__(self, places: int, *, grace: float) -> None:
        self._grace = grace
        self._open = set(range(places))
        self._interrupts = 0
        self._has_killed = False
        self._deadline: float | None = None
        self.reports: dict[int, PlaceReport] = {}
        self.lost: list[PlaceLost] = []
        """In the order in which they were reported to the caller."""
        self.unreported: tuple[int, ...] = ()
        """Places that were killed and have not reported their end."""
        self.is_over = places == 0

    @property
    def next_deadline(self) -> float | None:
        """When a ``PlaceTick`` is due; None: never."""
        return None if self.is_over else self._deadline

    def handle(self, event: JobEvent, *, now: float) -> list[SendToPlace]:
        """Return the commands that follow from ``event``."""
        if self.is_over:
            return []
        match event:
            case PlaceServes(address):
                return [SendToPlace(place, BeginRanks(address)) for place in sorted(self._open - {0})]
            case PlaceReported(place, report) if place in self._open:
                self._open.discard(place)
                self.reports[place] = report
                return self._ended(now, self._grace + MARGIN_SECONDS if place == 0 or report.exit_code else None)
            case PlaceLost(place, _) if place in self._open:
                self._open.discard(place)
                self.lost.append(event)
                return self._ended(now, LOST_SECONDS)
            case CallerInterrupted():
                return self._interrupted(now)
            case PlaceTick() if self._deadline is not None and now >= self._deadline:
                return self._expired(now)
        return []

    def _ended(self, now: float, patience: float | None) -> list[SendToPlace]:
        """Handle the end of a place; the others must end within ``patience`` seconds (None: they may go on)."""
        self.is_over = not self._open
        if patience is not None and not self._has_killed:
            due = now + patience
            self._deadline = due if self._deadline is None else min(self._deadline, due)
        return []

    def _interrupted(self, now: float) -> list[SendToPlace]:
        self._interrupts += 1
        if self._interrupts > 1:
            return self._expired(now)
        self._deadline = now + self._grace + MARGIN_SECONDS
        return [SendToPlace(place, Interrupt()) for place in sorted(self._open)]

    def _expired(self, now: float) -> list[SendToPlace]:
        """Kill the remaining places; give up those that were killed and do not end."""
        if self._has_killed and self._deadline is not None and now >= self._deadline:
            self.unreported = tuple(sorted(self._open))
            self._open.clear()
            self.is_over = True
            return []
        if self._has_killed:
            return []
        self._has_killed, self._deadline = True, now + MARGIN_SECONDS
        return [SendToPlace(place, Kill()) for place in sorted(self._open)]
