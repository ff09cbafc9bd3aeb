"""`asyncpar bench`: check the options, launch the ranks that measure, and report the outcome."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from asyncpar.bench.plot import check_plot, plot_report
from asyncpar.bench.report import BenchReport
from asyncpar.bench.settings import DTYPES, EVERY, OPERATIONS, REDUCTIONS, BenchSettings
from asyncpar.bench.sizes import parse_size, short_size, sizes_between
from asyncpar.bench.worker import BenchAssignment
from asyncpar.collectives.algorithms.catalog import ARENA
from asyncpar.errors import UsageError
from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_line, print_result
from asyncpar.launch.options import LaunchOptions, ProgramKind, check_transport, parse_count, parse_seconds
from asyncpar.net.arena.limits import count_cores

_WORKER = (
    "import _signal; _signal.signal(_signal.SIGINT, _signal.SIG_DFL); "  # no traceback from an interrupted import
    "from asyncpar.bench.worker import main; main()"
)
_DEFAULTS = {"min": "4", "max": "128M", "factor": "4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of `asyncpar bench`; ``nproc`` None stands for one rank per core."""

    settings: BenchSettings
    nproc: int | None
    transport: str | None = None
    prints_json: bool = False
    plot: Path | None = None

    def __post_init__(self) -> None:
        check_transport(self.transport)
        if self.settings.algorithm == ARENA and (self.nproc == 1 or self.transport not in (None, "shm")):
            with_what = "--nproc 1" if self.nproc == 1 else f"--transport {self.transport}"
            raise UsageError(f"--algorithm: arena needs several ranks that share memory, got {with_what}")


@click.command(cls=OneLineCommand)
@click.argument("operations", metavar="[OP]...", nargs=-1)
@option("--min", metavar="SIZE", default=None, help="Smallest size.  [4]")
@option("--max", metavar="SIZE", default=None, help="Largest size.  [128M]")
@option("--factor", metavar="N", default=None, help="Each size is N times the one before.  [4]")
@option("--sizes", metavar="SIZE,...", default=None, help="These sizes, instead of --min, --max, --factor.")
@option("--nproc", metavar="N", default="2", help="Ranks on this host; 'auto': one per core.  [2]")
@option(
    "--transport",
    metavar="NAME",
    default=None,
    envvar="ASYNCPAR_TRANSPORT",
    help="Pin the lane: shm, tcp, grpc, package.module:NAME.",
)
@option(
    "--algorithm",
    metavar="NAME",
    default=None,
    help="Pin the algorithm, such as ring, tree, ring/256k; otherwise as programs would get it.",
)
@option("--dtype", metavar="NAME", default="float32", help=f"{', '.join(DTYPES)}.  [float32]")
@option("--redop", metavar="NAME", default="sum", help=f"How to reduce: {', '.join(REDUCTIONS)}.  [sum]")
@option("--budget", metavar="SECONDS", default="0.5", help="Time for the iterations of one size, 5 to 10000.  [0.5]")
@option("--calibrate", is_flag=True, help="Measure lanes first, and choose and predict by that.")
@option("--shared", is_flag=True, help="Arrays in memory that ranks of a host share (Node.empty): no copy in.")
@option("--json", "prints_json", is_flag=True, help="One JSON document on stdout, and nothing else there.")
@option("--plot", metavar="FILE.png", default=None, help="Draw time and bandwidth; needs asyncpar[plot].")
def bench(operations: tuple[str, ...], **given: Any) -> None:
    """Time collective operations by size, and check every element of every
    result.  Launches ranks on this host.

    OP is all_reduce (the default), all_reduce_many (in arrays of 4 KiB),
    all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all,
    barrier, several of them, or all.

    \b
    asyncpar bench
    asyncpar bench all_gather --nproc 4 --min 64K --max 64M
    asyncpar bench all --sizes 4,1M,25MB --json > bench.json
    asyncpar bench all_reduce --transport tcp --plot tcp.png

    Sizes are bytes of the whole buffer, for all_gather say of all that a rank
    has in the end.  K, M and G are powers of 1024, as in nccl-tests; KB, MB and
    GB are powers of 1000.  Time is the median over the iterations on the
    slowest rank; algbw is size / time, and busbw is algbw times the factor of
    nccl-tests: 2 (n - 1) / n for all_reduce, 1 for broadcast and reduce,
    (n - 1) / n for the others.  predicted is what the cost model said about
    the algorithm that ran.

    Exits with 1 if any element was wrong, and as asyncpar launch does if a rank
    fails.
    """
    exit_with("bench", lambda: run_bench(parse_options(operations, given)))


def parse_options(operations: tuple[str, ...], given: dict[str, Any]) -> BenchOptions:
    """Parse the options.  Raises ``UsageError`` for values that cannot work."""
    settings = BenchSettings(
        operations=OPERATIONS if EVERY in operations else tuple(dict.fromkeys(operations)) or ("all_reduce",),
        sizes=_sizes(given),
        dtype=given["dtype"],
        reduction=given["redop"],
        algorithm=given["algorithm"],
        budget=parse_seconds("--budget", given["budget"]),
        calibrates=given["calibrate"],
        shares=given["shared"],
    )
    return BenchOptions(
        settings=settings,
        nproc=None if given["nproc"] == "auto" else parse_count("--nproc", given["nproc"], least=1),
        transport=given["transport"] or None,
        prints_json=given["prints_json"],
        plot=None if given["plot"] is None else Path(given["plot"]),
    )


def run_bench(options: BenchOptions) -> int:
    """Launch the ranks and return the exit code.

    Raises ``UsageError`` before any process starts when the options do not fit this machine.
    """
    nproc = options.nproc or count_cores()
    _check_memory(options.settings, nproc)
    if options.plot is not None:
        check_plot(options.plot)
    with tempfile.TemporaryDirectory(prefix="asyncpar-bench-") as directory:
        file = Path(directory) / "report.json"
        exit_code = _launch(options, nproc, file)
        if exit_code != 0:
            return exit_code
        report = BenchReport.from_json(file.read_bytes())
    return finish(report, options)


def finish(report: BenchReport, options: BenchOptions) -> int:
    """Print and draw the report and return the exit code: 1 if any element was wrong."""
    if options.prints_json:
        print_result("the report", report.to_json() + b"\n")
    if options.plot is not None:
        plot_report(report, options.plot)
    if report.wrong_sizes:
        print_line(f"asyncpar bench: sizes with wrong elements: {report.wrong_sizes}", err=True)
        return 1
    return 0


def _launch(options: BenchOptions, nproc: int, file: Path) -> int:
    """Run the ranks; rank 0 writes the report into ``file``."""
    environment = dict(os.environ)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors that matter are raised as exceptions
    from asyncpar.launch.run import run_launch

    assignment = BenchAssignment(
        settings=options.settings,
        report=str(file),
        transport=options.transport,
        width=_terminal_width(),
        shows_rows=not options.prints_json,
        shows_progress=os.isatty(2) and (options.prints_json or not os.isatty(1)),
    )
    launch = LaunchOptions(
        program=sys.executable,
        arguments=("-c", _WORKER, assignment.encode()),
        kind=ProgramKind.PROGRAM,
        nproc=nproc,
        transport=options.transport,
    )
    return run_launch(launch, environment)


def _sizes(given: dict[str, Any]) -> tuple[int, ...]:
    ladder = {name: given[name] for name in _DEFAULTS if given[name] is not None}
    if given["sizes"] is not None:
        if ladder:
            raise UsageError(f"--sizes: expected without --min, --max and --factor, got --{next(iter(ladder))} too")
        return tuple(parse_size("--sizes", text) for text in given["sizes"].split(","))
    ladder = _DEFAULTS | ladder
    smallest, largest = (parse_size(f"--{name}", ladder[name]) for name in ("min", "max"))
    factor = parse_count("--factor", ladder["factor"], least=2)
    if smallest > largest:
        raise UsageError(f"--min: expected at most --max = {short_size(largest)}, got {short_size(smallest)}")
    return sizes_between(smallest, largest, factor)


def _check_memory(settings: BenchSettings, nproc: int) -> None:
    needed, available = settings.memory_of(nproc), psutil.virtual_memory().available
    if needed > available:
        raise UsageError(
            f"sizes: {short_size(max(settings.sizes))} on {nproc} ranks needs {needed / (1 << 30):.1f} GiB of memory, "
            f"{available / (1 << 30):.1f} GiB are available"
        )


def _terminal_width() -> int | None:
    """Return the number of columns of the terminal that shows the rows, None if it is not one."""
    try:
        return os.get_terminal_size(1).columns or None
    except OSError:
        return None
