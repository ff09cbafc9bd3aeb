"""Rounds of a rank: from the end of a step, or operation of a group, to that of the next, with times by cause.  Pure.

A rank that trains reports for each step how much of it was its own time (see ``core.observe.steps``).  If it records no
steps, rounds are those of the group's unkeyed operations: the time that a rank spends between two of them is its own.
No other rank is the cause of it, and it is a difference on one clock.  Waits within an operation may be caused by
others.  So slow ranks differ from the others in their own time, even if all finish at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

from asyncpar.core.observe.pauses import COLLECTION, TAKEN
from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.observe.image import Event

INPUT_NAMES: Final = ("load", "input", "data", "batch", "read", "fetch")
"""Spans whose names begin with one of these wait for input."""

_TURNS: Final = 8
"""Number of last steps, among which are those of all that take turns."""


class Cause(StrEnum):
    """Cause of spent time."""

    COMPUTE = "compute"
    INPUT = "input"
    """Spans of the program that are named as loading, see ``INPUT_NAMES``."""
    BLOCKED = "blocked loop"
    """Code that kept the event loop from continuing."""
    COLLECTION = "garbage collection"
    TAKEN = "processor taken"
    """The thread could have run, but the processor was used by another program."""
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round: ``own`` is the rank's own time, ``seconds`` the whole round; ``parts`` divide ``own``.

    ``ran`` are the seconds of ``own`` in which its busiest thread had a processor; 0.0 if it did not wait for one.
    """

    number: int
    own: float
    seconds: float
    parts: dict[Cause, float] = field(default_factory=dict)
    ran: float = 0.0


def rounds_of(events: Sequence[Event], group: int, most: int) -> list[Round]:
    """Return the last ``most`` rounds of ``group`` (a number on the wire), from events in the order of their begins.

    They are those of its steps, if there are any, else of its operations.
    """
    pauses = [event for event in events if event.kind in (EventKind.SPAN, EventKind.BLOCKED)]
    steps = [event for event in events if event.kind == EventKind.STEP and event.group == group]
    return _rounds_of_steps(steps, pauses, most) if steps else _rounds_of_operations(events, group, pauses)[-most:]


def join_rounds(known: Sequence[Round], found: Sequence[Round], most: int) -> list[Round]:
    """Return the last ``most`` rounds of an earlier inspection and of this one.

    A known round stays unchanged: its pauses may be gone by now.  Numbers that start again belong to other rounds.
    """
    if known and found and found[-1].number < known[-1].number:
        known = ()
    last = known[-1].number if known else -1
    return [*known, *(each for each in found if each.number > last)][-most:]


def _rounds_of_steps(steps: Sequence[Event], pauses: Sequence[Event], most: int) -> list[Round]:
    """Return the rounds of one series of steps: of several that take turns, the first by name."""
    name = min(step.name for step in steps[-_TURNS:])
    chosen = [step for step in steps if step.name == name][-most - 1 :]
    found = []
    for before, this in pairwise(chosen):
        if this.state != EventState.COMPLETED or before.ended is None or this.ended is None:
            continue
        seconds = max(0.0, this.ended - before.ended)
        own = min(this.own, seconds)
        parts = _parts(pauses, before.ended, this.ended) if own else {}
        ran = _ran(pauses, before.ended, this.ended) if own else 0.0
        found.append(Round(number=this.sequence, own=own, seconds=seconds, parts=_rest(own, parts), ran=min(own, ran)))
    return found


def _rounds_of_operations(events: Sequence[Event], group: int, pauses: Sequence[Event]) -> list[Round]:
    operations = [
        event
        for event in events
        if event.kind == EventKind.COLLECTIVE and event.group == group and event.is_over and not event.is_keyed
    ]
    operations.sort(key=lambda event: event.sequence)
    found = []
    for before, this in pairwise(operations):
        if this.sequence != before.sequence + 1 or before.ended is None or this.ended is None:
            continue
        own = max(0.0, this.created - before.ended)
        parts = _parts(pauses, before.ended, this.created) if own else {}
        ran = _ran(pauses, before.ended, this.created) if own else 0.0
        seconds = max(own, this.ended - before.ended)
        found.append(Round(number=this.sequence, own=own, seconds=seconds, parts=_rest(own, parts), ran=ran))
    return found


def _parts(pauses: Iterable[Event], start: float, stop: float) -> dict[Cause, float]:
    parts: dict[Cause, float] = {}
    for pause in pauses:
        cause = _cause_of(pause)
        if cause is None:
            continue
        begun, ended = pause.created, stop if pause.ended is None else pause.ended
        if cause is Cause.BLOCKED:  # it had begun before it was detected
            begun -= pause.sequence * 1e-6
        if cause is Cause.TAKEN:  # at the end of the sampled time
            begun, ended = pause.created - pause.sequence * 1e-6, pause.created
        shared = min(ended, stop) - max(begun, start)
        if shared <= 0.0:
            continue
        if cause is Cause.TAKEN:
            shared *= min(1.0, pause.nbytes * 1e-6 / max(ended - begun, 1e-9))
        parts[cause] = parts.get(cause, 0.0) + shared
    return parts


def _ran(pauses: Iterable[Event], start: float, stop: float) -> float:
    """Return the seconds in which the busiest thread had a processor, according to samples."""
    ran = 0.0
    for pause in pauses:
        if _cause_of(pause) is Cause.TAKEN and pause.sequence:
            period = pause.sequence * 1e-6
            shared = min(pause.created, stop) - max(pause.created - period, start)
            ran += max(0.0, shared) * pause.group * 1e-6 / period
    return ran


def _cause_of(pause: Event) -> Cause | None:
    if pause.kind == EventKind.BLOCKED:
        return Cause.BLOCKED
    if pause.name == COLLECTION:
        return Cause.COLLECTION
    if pause.name == TAKEN:
        return Cause.TAKEN
    return Cause.INPUT if pause.name.lower().startswith(INPUT_NAMES) else None


def _rest(own: float, parts: dict[Cause, float]) -> dict[Cause, float]:
    """Return ``parts`` without overlaps, and with the rest, which is compute."""
    left, found = own, {}
    for cause in (Cause.TAKEN, Cause.COLLECTION, Cause.INPUT, Cause.BLOCKED):
        part = min(left, parts.get(cause, 0.0))
        if part > 0.0:
            found[cause] = part
            left -= part
    if left > 0.0:
        found[Cause.COMPUTE] = left
    return found
