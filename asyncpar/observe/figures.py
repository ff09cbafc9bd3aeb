"""Durations of events of each kind lately: operations by algorithm and size, spans by name.  Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.observe.image import Event
from asyncpar.observe.summary import MOST_FIGURES, FigureSummary

_Key = tuple[str, str, str, int]


def figures_of(events: Iterable[Event]) -> tuple[FigureSummary, ...]:
    """Return the figures of the events that have ended well, those with the most time in all first.

    Sizes are put together by powers of two.  Of each kind of event the first ``MOST_FIGURES`` are kept.
    """
    found: dict[_Key, list[float]] = defaultdict(list)
    for event in events:
        if event.ended is not None and event.state == EventState.COMPLETED:
            nbytes = 0 if event.kind is EventKind.STEP else event.nbytes
            size = 1 << (nbytes - 1).bit_length() if nbytes else 0
            found[event.kind.name.lower(), event.name, event.algorithm, size].append(event.ended - event.created)
    figures: list[FigureSummary] = []
    kept: Counter[str] = Counter()
    for key, seconds in sorted(found.items(), key=lambda item: -sum(item[1])):
        kept[key[0]] += 1
        if kept[key[0]] <= MOST_FIGURES:
            figures.append(_figure(key, sorted(seconds)))
    return tuple(figures)


def _figure(key: _Key, seconds: Sequence[float]) -> FigureSummary:
    what, name, algorithm, size = key
    last = len(seconds) - 1
    return FigureSummary(
        what=what,
        name=name[:60],
        algorithm=algorithm[:40],
        bytes=size,
        count=len(seconds),
        p50=round(seconds[last // 2] * 1e6),
        p99=round(seconds[last * 99 // 100] * 1e6),
    )
