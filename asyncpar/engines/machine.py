"""The decisions of a job over places: when they begin, when the rest is stopped, and when it is over.  Pure.

The coordinator, which the first place serves, decides about ranks; this machine is for what only the caller sees: a
place that is lost, the caller's own wish to end, and places that do not come to an end.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.engines.interface import BeginRanks, Interrupt, Kill, PlaceCommand, PlaceLost, PlaceReport, PlaceServes

LOST_SECONDS = 0.5
"""Seconds that the other places have to end in by themselves after one was lost."""
MARGIN_SECONDS = 5.0
"""Seconds beyond the ranks' grace that a place has to report its end, and that killed ones have."""


@dataclass(frozen=True, slots=True)
class CallerInterrupted:
    """The caller does not want the result any more; the second time it will not wait, either."""


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
class TellPlace:
    """Have ``place`` obey ``command``."""

    place: int
    command: PlaceCommand


class PlacesMachine:
    """Decides for ``places`` places; ``is_over`` when all have ended, or cannot be waited for any more."""

    def __init__(self, places: int, *, grace: float) -> None:
        self._grace = grace
        self._open = set(range(places))
        self._interrupts = 0
        self._has_killed = False
        self._deadline: float | None = None
        self.reports: dict[int, PlaceReport] = {}
        self.lost: list[PlaceLost] = []
        """In the order in which the caller heard of them."""
        self.unheard: tuple[int, ...] = ()
        """Places that were told to die, and have not said that they did."""
        self.is_over = places == 0

    @property
    def next_deadline(self) -> float | None:
        """When a ``PlaceTick`` is due, None if never."""
        return None if self.is_over else self._deadline

    def handle(self, event: JobEvent, *, now: float) -> list[TellPlace]:
        """Return what is to be done about ``event``."""
        if self.is_over:
            return []
        match event:
            case PlaceServes(address):
                return [TellPlace(place, BeginRanks(address)) for place in sorted(self._open - {0})]
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

    def _ended(self, now: float, patience: float | None) -> list[TellPlace]:
        """Handle the end of a place; the others must end within ``patience`` seconds (None: they may go on)."""
        self.is_over = not self._open
        if patience is not None and not self._has_killed:
            due = now + patience
            self._deadline = due if self._deadline is None else min(self._deadline, due)
        return []

    def _interrupted(self, now: float) -> list[TellPlace]:
        self._interrupts += 1
        if self._interrupts > 1:
            return self._expired(now)
        self._deadline = now + self._grace + MARGIN_SECONDS
        return [TellPlace(place, Interrupt()) for place in sorted(self._open)]

    def _expired(self, now: float) -> list[TellPlace]:
        """Kill what is left; give up what was killed and does not end."""
        if self._has_killed and self._deadline is not None and now >= self._deadline:
            self.unheard = tuple(sorted(self._open))
            self._open.clear()
            self.is_over = True
            return []
        if self._has_killed:
            return []
        self._has_killed, self._deadline = True, now + MARGIN_SECONDS
        return [TellPlace(place, Kill()) for place in sorted(self._open)]
