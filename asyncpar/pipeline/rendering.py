"""Timelines and tables of pipeline ranks' operations, as text.  Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from asyncpar.errors import UsageError
from asyncpar.pipeline.operation import PipelineOp

Drawn = Sequence[tuple[PipelineOp, float, float]]
"""The work of one rank: operations with their starts and ends."""

_LEAST_WIDTH = 20
_MOST_BLOCKS = 6
_BUSY, _PARTLY, _IDLE = "#", "+", "."
_MOSTLY = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one rank."""

    rank: int
    stages: tuple[int, ...]
    busy: float
    idle: float
    peak: int


def table(rows: Sequence[Row], width: int) -> list[str]:
    """Return the lines of a table with one row per rank; columns that do not fit into ``width`` are left out."""
    check_width(width)
    columns = [
        ["rank", *(str(row.rank) for row in rows)],
        ["peak", *(str(row.peak) for row in rows)],
        ["idle", *(f"{row.idle:g}" for row in rows)],
        ["busy", *(f"{row.busy:g}" for row in rows)],
        ["stages", *(" ".join(map(str, row.stages)) for row in rows)],
    ]
    kept, used = list[list[str]](), -2
    for column in columns:
        room = max(map(len, column)) + 2
        if used + room > width:
            break
        used += room
        kept.append([cell.rjust(room - 2) for cell in column])
    return ["  ".join(cells) for cells in zip(*kept, strict=True)]


def timeline(ranks: Sequence[Drawn], width: int) -> list[str]:
    """Return a timeline of all ranks: one line per rank, dots where it idles.

    Operations are drawn with widths proportional to their durations, labelled with their cell (stage, kind,
    micro-batch), and continue in further blocks of lines if they do not fit into ``width``.  If that takes many blocks,
    they shrink to letters of their kind; if even that does, one block shows only how busy each rank is in each part of
    the time.
    """
    check_width(width)
    end = max(drawn[-1][2] for drawn in ranks)
    if not end:
        return []
    label = len(f"rank {len(ranks) - 1} ")
    room = width - label
    per_unit = _characters_per_unit(ranks, end, room)
    if per_unit is None:
        lines = [_density(drawn, room / end, room) for drawn in ranks]
        legend = [f"{_BUSY} computes", f"{_PARTLY} partly", f"{_IDLE} idles"]
        return [*_labelled(lines, label), *textwrap.wrap(", ".join(legend), width)]
    lines = [_line(drawn, per_unit, round(end * per_unit)) for drawn in ranks]
    blocks = [
        _labelled([line[first : first + room] for line in lines], label) for first in range(0, len(lines[0]), room)
    ]
    return [line for block in blocks for line in ["", *block]][1:]


def _labelled(lines: Sequence[str], label: int) -> list[str]:
    return [(f"rank {rank}".ljust(label) + line).rstrip() for rank, line in enumerate(lines)]


def _characters_per_unit(ranks: Sequence[Drawn], end: float, room: int) -> float | None:
    """Return the scale that fits names, or single letters, whichever takes few blocks; None if neither does."""
    shortest = min(stop - start for drawn in ranks for _, start, stop in drawn if stop > start)
    name = max(len(str(operation)) for drawn in ranks for operation, _, _ in drawn)
    for characters in (name + 1, 1):
        if end / shortest * characters <= room * _MOST_BLOCKS:
            return characters / shortest
    return None


def check_width(width: int) -> int:
    """Return ``width``; raise a UsageError if lines of so many characters are too short."""
    if width < _LEAST_WIDTH:
        raise UsageError(f"width: expected at least {_LEAST_WIDTH} characters, got {width!r}")
    return width


def _line(drawn: Drawn, per_unit: float, length: int) -> str:
    line = [_IDLE] * length
    for operation, start, end in drawn:
        first, last = round(start * per_unit), round(end * per_unit)
        line[first:last] = _cell(operation, last - first)
    return "".join(line)


def _cell(operation: PipelineOp, width: int) -> str:
    """Return the operation's name and a blank if there is room for both, else the letter of its kind repeated."""
    name = str(operation)
    return name.ljust(width - 1, "-") + " " if len(name) < width else operation.kind.symbol * width


def _density(drawn: Drawn, per_unit: float, length: int) -> str:
    busy = [0.0] * length
    for _, start, end in drawn:
        first, last = start * per_unit, end * per_unit
        for column in range(int(first), min(int(last) + 1, length)):
            busy[column] += max(0.0, min(last, column + 1) - max(first, column))
    return "".join(_BUSY if part > _MOSTLY else _IDLE if part < 1 - _MOSTLY else _PARTLY for part in busy)
