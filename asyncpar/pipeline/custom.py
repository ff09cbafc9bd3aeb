"""User-defined schedules: rows of cells such as ``2F0``, in memory or in files of comma-separated values."""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.pipeline.check import check_schedule
from asyncpar.pipeline.layout import StageLayout, check_index
from asyncpar.pipeline.operation import OperationKind, PipelineOp
from asyncpar.pipeline.schedule import Schedule

_KINDS = {kind.symbol: kind for kind in OperationKind if kind.is_compute}
_CELL = re.compile(r"([0-9]{1,6})([A-Za-z_]+)([0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextCell:
    """A cell with ``text`` at ``row`` and ``column`` (counted from 0)."""

    row: int
    column: int
    text: str
    stage: int
    kind: OperationKind
    micro_batch: int


class CustomSchedule(Schedule):
    """A schedule from ``rows``: one per rank, each a sequence of cells in the order in which the rank works.

    A cell is virtual stage, kind (F forward, B backward, I input half, W weight half) and micro-batch: ``0F1``.  Empty
    cells are ignored.  Sends and receives are not written: they are added between stages of different ranks.  A stage
    belongs to the rank whose row contains most of its cells.

    Raises UsageError for an invalid cell and InvalidSchedule for a schedule that cannot run, naming ``name``, row and
    column, both counted from 1.
    """

    __slots__ = ("_columns", "_layout", "_name", "_orders", "num_microbatches", "num_model_chunks", "num_stages")

    def __init__(self, rows: Sequence[Sequence[str]], *, name: str = "custom schedule") -> None:
        cells = [_read_row(name, row, texts) for row, texts in enumerate(rows)]
        self._name = name
        self._layout = _layout(name, cells)
        self.num_stages = len(cells)
        self.num_model_chunks = self._layout.num_model_chunks
        self.num_microbatches = 1 + max(cell.micro_batch for row in cells for cell in row)
        chunks = self._layout.chunks
        self._columns = tuple(tuple(cell.column for cell in row) for row in cells)
        self._orders = tuple(
            tuple(
                PipelineOp(kind=cell.kind, stage=cell.stage, micro_batch=cell.micro_batch, chunk=chunks[cell.stage])
                for cell in row
            )
            for row in cells
        )
        check_schedule(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def layout(self) -> StageLayout:
        return self._layout

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        check_index("rank", rank, self.num_stages)
        return self._orders[rank]

    def place_of(self, rank: int, action: int) -> str:
        return _place(self._name, rank, self._columns[rank][action], str(self._orders[rank][action]))

    def row_of(self, rank: int) -> str:
        return f"{self._name}: row {rank + 1} (rank {rank})"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}: {self.num_stages} ranks, {self.num_microbatches} micro-batches>"


def _read_row(name: str, row: int, texts: Sequence[str]) -> list[_TextCell]:
    if isinstance(texts, str):
        raise UsageError(f"{name}: row {row + 1}: expected a sequence of cells, got one text {texts!r}")
    cells = [_read_cell(name, row, column, str(text).strip()) for column, text in enumerate(texts)]
    found = [cell for cell in cells if cell is not None]
    if not found:
        raise UsageError(f"{name}: row {row + 1} (rank {row}): expected at least one cell such as '0F0', got none")
    return found


def _read_cell(name: str, row: int, column: int, text: str) -> _TextCell | None:
    if not text:
        return None
    match = _CELL.fullmatch(text)
    kind = _KINDS.get(match[2].upper()) if match else None
    if match is None or kind is None:
        hint = "; sends and receives are added, so leave them out" if "SEND" in text or "RECV" in text else ""
        raise UsageError(
            f"{_place(name, row, column, text)}: expected stage, F, B, I or W, and micro-batch, such as '0F1'{hint}"
        )
    return _TextCell(row=row, column=column, text=text, stage=int(match[1]), kind=kind, micro_batch=int(match[3]))


def _layout(name: str, cells: Sequence[Sequence[_TextCell]]) -> StageLayout:
    """Assign each stage to the rank with most of its cells; in case of a tie, to the first."""
    if not cells:
        raise UsageError(f"{name}: expected one row per rank, got none")
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for row in cells:
        for cell in row:
            counts[cell.stage][cell.row] += 1
    absent = next((stage for stage in range(len(counts)) if stage not in counts), None)
    if absent is not None:
        last = max(counts)
        raise UsageError(f"{name}: expected every stage from 0 to {last}, got no cell of stage {absent}")
    ranks = tuple(counts[stage].most_common(1)[0][0] for stage in range(len(counts)))
    held = Counter(ranks)
    for rank in range(len(cells)):
        if held[rank] != held[0]:
            raise UsageError(
                f"{name}: row {rank + 1} (rank {rank}): expected as many stages on each row, "
                f"got {held[rank]} here and {held[0]} on row 1"
            )
    return StageLayout(ranks=ranks, num_stages=len(cells))


def _place(name: str, row: int, column: int, text: str) -> str:
    return f"{name}: row {row + 1} (rank {row}), column {column + 1}, cell {text!r}"


def load_schedule(path: str | Path) -> CustomSchedule:
    """Load a schedule from a file (see ``CustomSchedule`` for cells), checked that it can run.

    Raises UsageError, naming file, row, column and cell, for errors in it or in reading it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"path: expected a file that can be read, got {str(path)!r}: {os_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"path: expected a text file (UTF-8), got {str(path)!r}: {error}") from error
    return parse_schedule(text, name=path.name)


def parse_schedule(text: str, *, name: str = "schedule") -> CustomSchedule:
    """Return the schedule that ``text`` describes in the format of the files; errors call it ``name``.

    Spaces around cells, empty cells and empty rows at the end are ignored.
    """
    try:
        rows = list(csv.reader(text.rstrip().splitlines(), strict=True, skipinitialspace=True))
    except csv.Error as error:
        raise UsageError(f"{name}: expected comma-separated values, got something else: {error}") from error
    return CustomSchedule(rows, name=name)


def format_schedule(schedule: Schedule) -> str:
    """Return the text from which ``parse_schedule`` makes an equal schedule."""
    rows = (",".join(map(str, schedule.compute_order(rank))) for rank in range(schedule.num_stages))
    return "".join(f"{row}\n" for row in rows)


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write any schedule to a file, for editing by hand and reading back by ``load_schedule``."""
    try:
        Path(path).write_text(format_schedule(schedule), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"path: expected a place for a file, got {str(path)!r}: {os_reason(error)}") from error
