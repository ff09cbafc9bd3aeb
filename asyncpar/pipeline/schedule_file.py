"""Schedules in files of comma-separated values: one row per rank, one cell per action."""

from __future__ import annotations

import csv
from pathlib import Path

from asyncpar.errors import UsageError
from asyncpar.pipeline.custom import CustomSchedule
from asyncpar.pipeline.schedule import Schedule


def load_schedule(path: str | Path) -> CustomSchedule:
    """Return the schedule that a file holds (``CustomSchedule`` says what a cell is), checked that it can run.

    Raises UsageError, naming file, row, column and cell, for what is wrong with it or with reading it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"path: expected a file that can be read, got {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"path: expected a text file (UTF-8), got {str(path)!r}: {error}") from error
    return parse_schedule(text, name=path.name)


def parse_schedule(text: str, *, name: str = "schedule") -> CustomSchedule:
    """Return the schedule that ``text`` describes in the format of the files; errors call it ``name``.

    Spaces around cells, empty cells and empty rows at the end mean nothing.
    """
    try:
        rows = list(csv.reader(text.rstrip().splitlines(), strict=True, skipinitialspace=True))
    except csv.Error as error:
        raise UsageError(f"{name}: expected comma-separated values, got something else: {error}") from error
    return CustomSchedule(rows, name=name)


def format_schedule(schedule: Schedule) -> str:
    """Return the text that ``parse_schedule`` makes an equal schedule from."""
    rows = (",".join(map(str, schedule.compute_order(rank))) for rank in range(schedule.num_stages))
    return "".join(f"{row}\n" for row in rows)


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write any schedule to a file, to be changed by hand and read back by ``load_schedule``."""
    try:
        Path(path).write_text(format_schedule(schedule), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"path: expected a place for a file, got {str(path)!r}: {error.strerror}") from error
