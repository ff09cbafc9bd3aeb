"""Statistics can be read and shown whatever numbers they hold: zeros, infinities, no number, nothing."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import pytest

from asyncpar.bench import report as bench_report
from asyncpar.bench.table import COLUMNS, choose_columns, format_end, format_header, format_row, format_title
from asyncpar.collectives import ledger as collective_statistics
from asyncpar.gradsync import statistics as gradient_statistics
from asyncpar.hybrid import analysis as hybrid_analysis
from asyncpar.hybrid.monitor import render_report
from asyncpar.multinode import statistics as multinode_statistics
from asyncpar.pipeline.offload import manager as offload_manager
from asyncpar.zero import memory as zero_memory

MODULES = (
    bench_report,
    collective_statistics,
    gradient_statistics,
    hybrid_analysis,
    multinode_statistics,
    offload_manager,
    zero_memory,
)
WIDTHS = (32, 80, 200)

NUMBERS: dict[str, tuple[int, float]] = {
    "zero": (0, 0.0),
    "one": (1, 1.0),
    "negative": (-1, -1.0),
    "no number": (0, math.nan),
    "infinite": (2**63, math.inf),
    "minus infinite": (-(2**63), -math.inf),
    "largest": (2**63, 1.7e308),
    "smallest": (1, 5e-324),
}
LENGTHS = (0, 1, 3)
NEVER_EMPTY = {"PerformanceAnalysis"}  # it has a rank or more; ``analyze`` refuses to make one of none


class Filler:
    """Makes an object of any class of statistics, all numbers of it, and of what it holds, the same."""

    def __init__(self, numbers: tuple[int, float], length: int) -> None:
        self._whole, self._real = numbers
        self._length = length

    def of(self, hint: Any) -> Any:  # a line per kind
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return self.of(arguments[0])
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {self.of(arguments[0]): self.of(arguments[1]) for _ in range(self._length)}
        if origin is Sequence:
            return self._items(arguments)
        if origin in (tuple, list, frozenset, set):
            return origin(self._items(arguments))
        if not isinstance(hint, type):
            raise TypeError(f"this test does not know {hint}")
        if issubclass(hint, enum.Enum):
            return next(iter(hint))
        known: dict[type, Any] = {
            bool: bool(self._length),
            int: self._whole,
            float: self._real,
            str: "text",
            datetime: datetime.min,
        }
        if hint in known:
            return known[hint]
        return hint(self._real) if issubclass(hint, float) else self._of_class(hint)

    def _items(self, arguments: tuple[Any, ...]) -> list[Any]:
        if len(arguments) == 2 and arguments[1] is not Ellipsis:
            return [self.of(each) for each in arguments]
        return [self.of(arguments[0]) for _ in range(self._length)]

    def _of_class(self, kind: type) -> Any:
        made: Any = object.__new__(kind)  # statistics that no rule for input would let in
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            object.__setattr__(made, field.name, self.of(hints[field.name]))
        return made


def fillers(kind: type) -> dict[str, Filler]:
    lengths = LENGTHS[1:] if kind.__name__ in NEVER_EMPTY else LENGTHS
    return {
        f"{name}, {length} items": Filler(numbers, length) for name, numbers in NUMBERS.items() for length in lengths
    }


CLASSES = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
]


def readings(kind: type) -> list[str]:
    return [name for name, value in vars(kind).items() if isinstance(value, property | cached_property)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_statistics_can_be_read_and_shown(kind: type) -> None:
    for name, filler in fillers(kind).items():
        made = filler.of(kind)
        for reading in readings(kind):
            try:
                getattr(made, reading)
            except Exception as error:
                raise AssertionError(f"{kind.__name__}.{reading}: {name}") from error
        assert str(made), name
        assert repr(made), name


def test_any_performance_is_reported() -> None:
    for name, filler in fillers(hybrid_analysis.PerformanceAnalysis).items():
        analysis = filler.of(hybrid_analysis.PerformanceAnalysis)
        for width in WIDTHS:
            text = render_report(analysis, width=width)
            assert max(map(len, text.splitlines())) <= width, name


def test_any_measurements_are_shown_in_a_table() -> None:
    for name, filler in fillers(bench_report.BenchReport).items():
        report = filler.of(bench_report.BenchReport)
        for width in (None, *WIDTHS):
            columns = choose_columns(COLUMNS, width)
            lines = [
                *format_title(report.surroundings),
                *format_header("all_reduce", columns),
                *(format_row(row, columns) for row in report.measurements),
                *format_end(report),
            ]
            assert all(lines), name
        assert json.loads(report.to_json())["measurements"] is not None, name


def test_every_class_of_statistics_is_looked_at() -> None:
    known = {kind.__name__ for kind in CLASSES}
    assert {"MultiNodeStats", "PerformanceAnalysis", "SyncStatistics", "BenchReport", "CollectiveStatistics"} <= known
