"""The program of every rank of `asyncpar bench`; rank 0 prints rows as they complete and writes the report file."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

import asyncpar as ap
from asyncpar.bench.cases import count_elements
from asyncpar.bench.measure import measure
from asyncpar.bench.report import BenchEnvironment, BenchReport, Measurement
from asyncpar.bench.settings import BenchSettings
from asyncpar.bench.sizes import short_size
from asyncpar.bench.table import COLUMNS, choose_columns, format_end, format_header, format_row, format_title
from asyncpar.core.observe.reporting import Reporter
from asyncpar.net.arena.limits import count_cores
from asyncpar.node import Node

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchAssignment:
    """The arguments that the command passes to its ranks.

    ``report`` is the file to write, ``width`` the room for rows (None: any); ``shows_rows`` and ``shows_progress``:
    rank 0 prints rows on stdout, and reports its progress to the launcher.
    """

    settings: BenchSettings
    report: str
    transport: str | None = None
    width: int | None = None
    shows_rows: bool = True
    shows_progress: bool = False

    def encode(self) -> str:
        """Return the assignment as one word of a command line."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> BenchAssignment:
        return msgspec.json.decode(text, type=cls)


class Narrator:
    """Shows the progress and the rows of a run on rank 0; nothing on other ranks."""

    def __init__(self, assignment: BenchAssignment, *, is_first: bool, reporter: Reporter, show: Show) -> None:
        self._columns = choose_columns(COLUMNS, assignment.width)
        self._shows_rows = is_first and assignment.shows_rows
        self._shows_progress = is_first and assignment.shows_progress
        self._reporter = reporter
        self._show = show
        self._operation = ""

    def begin(self, surroundings: BenchEnvironment) -> None:
        if self._shows_rows:
            self._show("\n".join(format_title(surroundings)))

    def next(self, operation: str, size: int, *, done: int, total: int) -> None:
        if self._shows_rows and operation != self._operation:
            self._show("\n".join(format_header(operation, self._columns)))
        if self._shows_progress:
            fields = {"size": short_size(size)}
            self._reporter.progress(description=operation, completed=done, total=total, fields=fields)
        self._operation = operation

    def row(self, measurement: Measurement) -> None:
        if self._shows_rows:
            self._show(format_row(measurement, self._columns))

    def end(self, report: BenchReport) -> None:
        if self._shows_rows:
            self._show("\n".join(format_end(report)))


async def work(assignment: BenchAssignment, *, reporter: Reporter, show: Show) -> None:
    """Run one rank: measure all requested operations and sizes."""
    settings = assignment.settings
    async with ap.init() as node:
        if settings.calibrates:
            await node.world.calibrate()
        allocate = node.empty if settings.shares else np.empty
        narrator = Narrator(assignment, is_first=node.rank == 0, reporter=reporter, show=show)
        surroundings = describe_environment(node, assignment.transport)
        narrator.begin(surroundings)
        measurements: list[Measurement] = []
        plan = list_cases(settings, node.size)
        for operation, size in plan:
            narrator.next(operation, size, done=len(measurements), total=len(plan))
            measurement = await measure(
                node.world, operation, size, settings, clock=time.perf_counter, allocate=allocate
            )
            measurements.append(measurement)
            narrator.row(measurements[-1])
        report = BenchReport(surroundings=surroundings, measurements=tuple(measurements))
        narrator.end(report)
        if node.rank == 0:
            Path(assignment.report).write_bytes(report.to_json())
        await node.world.barrier()


def list_cases(settings: BenchSettings, ranks: int) -> list[tuple[str, int]]:
    """Return the operations and sizes to measure; sizes that result in the same buffer are measured once."""
    return [
        (operation, size)
        for operation in settings.operations
        for size in dict.fromkeys(
            count_elements(operation, size, ranks=ranks, itemsize=settings.itemsize) * settings.itemsize
            for size in settings.sizes
        )
    ]


def describe_environment(node: Node, transport: str | None) -> BenchEnvironment:
    """Return the machine, the versions and the lane of this run."""
    return BenchEnvironment(
        ranks=node.size,
        hosts=len(node.membership.hosts),
        cores=count_cores(),
        lane=node.links.lane_kind(1) if node.size > 1 else "no",
        transport=transport,
        version=ap.__version__,
        python=platform.python_version(),
        numpy=np.__version__,
    )


def main() -> None:
    """Run a rank; the assignment is the process's only argument.  Signals must have their default dispositions."""
    assignment = BenchAssignment.decode(sys.argv[1])
    reporter = Reporter.from_environment(os.environ)

    def show(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which ``run`` replaces
    ap.run(lambda: work(assignment, reporter=reporter, show=show))
