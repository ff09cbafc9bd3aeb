"""Durations of events, put together by kind and size."""

from __future__ import annotations

from collections import Counter

import msgspec

from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.errors import UsageError
from asyncpar.observe.figures import figures_of
from asyncpar.observe.image import Event
from asyncpar.observe.summary import MOST_FIGURES, FigureSummary


def event(name: str, micros: float | None, *, nbytes: int = 0, state: EventState = EventState.COMPLETED) -> Event:
    ended = None if micros is None else 1.0 + micros * 1e-6
    return Event(
        ticket=0, kind=EventKind.SPAN, state=state, created=1.0, ended=ended, name=name, nbytes=nbytes, algorithm="a"
    )


def test_events_are_put_together_by_name_and_power_of_two() -> None:
    events = [event("x", micros, nbytes=1000 + micros) for micros in range(1, 25)] + [event("x", 5.0, nbytes=1025)]

    assert figures_of(events) == (
        FigureSummary("span", "x", "a", 1024, 24, 12, 23),
        FigureSummary("span", "x", "a", 2048, 1, 5, 5),
    )


def test_collectives_have_bus_bandwidth_and_those_of_all_ranks_what_the_cost_model_expects() -> None:
    operation = msgspec.structs.replace(event("all_reduce", 100, nbytes=1000), kind=EventKind.COLLECTIVE, group=7)
    gather = msgspec.structs.replace(operation, name="all_gather", group=8)

    def predict(name: str, nbytes: int, algorithm: str) -> float:
        if name == "all_gather":
            raise UsageError("not known")
        assert (nbytes, algorithm) == (1000, "a")
        return 80e-6

    whole, part = figures_of([operation, operation, gather], {7: 4, 8: 2, 9: 4}, predict)
    assert (whole.name, whole.count, whole.rate, whole.expected) == ("all_reduce", 2, 15_000_000, 80)
    assert (part.name, part.rate, part.expected) == ("all_gather", 10_000_000, 0)
    (unknown,) = figures_of([msgspec.structs.replace(gather, group=9)], {9: 4}, predict)
    assert unknown.expected == 0


def test_what_is_under_way_or_has_failed_counts_for_nothing() -> None:
    started = event("x", None, state=EventState.STARTED)

    assert figures_of([started, event("x", 9.0, state=EventState.FAILED)]) == ()


def test_a_kind_of_many_events_leaves_room_for_others() -> None:
    others = [msgspec.structs.replace(event(f"bucket {number}", 1.0), kind=EventKind.BUCKET) for number in range(20)]
    figures = figures_of([*(event(f"span {number}", 1000.0) for number in range(50)), *others])

    assert Counter(figure.what for figure in figures) == {"span": MOST_FIGURES, "bucket": MOST_FIGURES}


def test_those_with_the_most_time_are_kept() -> None:
    figures = figures_of([event(f"span {number}", number) for number in range(1, 100)])

    assert [figure.name for figure in figures[:2]] == ["span 99", "span 98"]
    assert len(figures) == MOST_FIGURES
