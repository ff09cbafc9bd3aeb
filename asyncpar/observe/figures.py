"""Recent durations of events of each kind: operations by algorithm and size, spans by name.  Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from asyncpar.collectives.cost import bus_factor
from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.errors import UsageError
from asyncpar.observe.image import Event
from asyncpar.observe.summary import MOST_FIGURES, FigureSummary

_Key = tuple[str, str, str, int, int]
"""Kind, name, algorithm, size, and ranks of a collective."""

Predict = Callable[[str, int, str], float]
"""Returns the seconds of an operation of all ranks, given its bytes and algorithm; raises ``UsageError``."""


def figures_of(
    events: Iterable[Event], sizes: Mapping[int, int] | None = None, predict: Predict | None = None
) -> tuple[FigureSummary, ...]:
    """Return the figures of successful events, those with the most total time first.

    Sizes are grouped by powers of two.  For each kind of event the first ``MOST_FIGURES`` are kept.  ``sizes`` are the
    numbers of ranks by group; operations of the largest are compared with ``predict``.
    """
    sizes = sizes or {}
    found: dict[_Key, list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        if event.ended is not None and event.state == EventState.COMPLETED:
            size = 1 << (event.nbytes - 1).bit_length() if event.nbytes else 0
            ranks = sizes.get(event.group, 0) if event.kind is EventKind.COLLECTIVE else 0
            key = event.kind.name.lower(), event.name, event.algorithm, size, ranks
            found[key].append((event.ended - event.created, event.nbytes))
    figures: list[FigureSummary] = []
    kept: Counter[str] = Counter()
    whole = max(sizes.values(), default=0)
    for key, took in sorted(found.items(), key=lambda item: -sum(seconds for seconds, _ in item[1])):
        kept[key[0]] += 1
        if kept[key[0]] <= MOST_FIGURES:
            figures.append(_figure(key, took, predict if key[-1] == whole else None))
    return tuple(figures)


def _figure(key: _Key, took: Sequence[tuple[float, int]], predict: Predict | None) -> FigureSummary:
    what, name, algorithm, size, ranks = key
    seconds = sorted(each for each, _ in took)
    last = len(seconds) - 1
    middle, nbytes = seconds[last // 2], sum(nbytes for _, nbytes in took) // len(took)
    if name == "all_gather":
        nbytes *= ranks  # of the result, as in the other operations
    is_sized = ranks > 1 and nbytes > 0
    return FigureSummary(
        what=what,
        name=name[:60],
        algorithm=algorithm[:40],
        bytes=size,
        count=len(seconds),
        p50=round(middle * 1e6),
        p99=round(seconds[last * 99 // 100] * 1e6),
        rate=round(nbytes * bus_factor(name, ranks) / middle) if is_sized and middle > 0.0 else 0,
        expected=_expected(name, nbytes, algorithm, predict) if is_sized else 0,
    )


def _expected(name: str, nbytes: int, algorithm: str, predict: Predict | None) -> int:
    """Return the microseconds of the cost model; 0 for operations and algorithms that it does not know."""
    if predict is None:
        return 0
    try:
        return round(predict(name, nbytes, algorithm) * 1e6)
    except UsageError:
        return 0
