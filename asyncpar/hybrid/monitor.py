"""Recording of the last steps' measurements, gathering of those of all ranks, and rendering of the analysis."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.hybrid.analysis import (
    Bottleneck,
    BottleneckKind,
    PerformanceAnalysis,
    RankPerformance,
    StepMeasure,
    analyze,
    summarize,
)

LEAST_WIDTH = 32
_MOST_ROWS = 8
_BAR = 30

_WORDS = MappingProxyType(
    {
        BottleneckKind.COMMUNICATION: ("communication takes", "of the time, more than"),
        BottleneckKind.MEMORY: ("memory is", "of its limit, more than"),
        BottleneckKind.PIPELINE: ("pipeline stages are busy", "of the time, less than"),
        BottleneckKind.TENSOR_PARALLEL: ("tensor parallelism is", "efficient, less than"),
    }
)


def render_report(analysis: PerformanceAnalysis, *, width: int = 80) -> str:
    """Return plain text in lines of at most ``width`` characters (32 or more), without a newline at the end."""
    if width < LEAST_WIDTH:
        raise UsageError(f"width: expected at least {LEAST_WIDTH} characters, got {width}")
    sections = [_summary(analysis, width), _times(analysis, width), _ranks(analysis, width), _causes(analysis, width)]
    return "\n\n".join("\n".join(section) for section in sections)


def _summary(analysis: PerformanceAnalysis, width: int) -> Iterator[str]:
    count = len(analysis.ranks)
    steps = max(one.steps for one in analysis.ranks)
    last = max(one.last_step for one in analysis.ranks)
    who = f"{count} ranks" if count > 1 else f"rank {analysis.ranks[0].rank}"
    what = f"{steps} steps, the last one {last}" if steps > 1 else f"step {last}"
    text = f"Performance of {who} over {what}: {seconds_text(analysis.seconds_per_step)} per step"
    if analysis.tokens_per_second:
        text += f", {count_text(analysis.tokens_per_second)} tokens/s"
    yield from textwrap.wrap(text, width)


def _times(analysis: PerformanceAnalysis, width: int) -> Iterator[str]:
    """Yield the shares of time of all ranks, as bars."""
    shares = {
        "compute": analysis.compute_share,
        "communication": analysis.communication_share,
        "tensor parallel": analysis.tensor_parallel_share,
        "pipeline wait": analysis.pipeline_wait_share,
    }
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    yield "Time"
    for name, share in shares.items():
        head = f"  {name:15} {percent_text(share):>6}"
        room = min(_BAR, width - len(head) - 1)
        bar = "#" * round(min(1.0, share) * room)
        yield f"{head} {bar}".rstrip()


def _ranks(analysis: PerformanceAnalysis, width: int) -> Iterator[str]:
    """Yield the table of the ranks that compute longest, with as many columns as fit."""
    columns: list[tuple[str, Callable[[RankPerformance], str]]] = [
        ("rank", lambda one: str(one.rank)),
        ("compute", lambda one: seconds_text(one.compute_per_step)),
        ("step", lambda one: seconds_text(one.seconds_per_step)),
        ("communication", lambda one: percent_text(one.communication_share)),
        ("pipeline use", lambda one: percent_text(one.pipeline_utilization)),
        ("memory", _memory_text),
    ]
    by_compute = sorted(analysis.ranks, key=lambda one: one.compute_per_step, reverse=True)
    shown = by_compute[:_MOST_ROWS]
    yield "Ranks, the slowest first"
    yield from _table([(title, [text(one) for one in shown]) for title, text in columns], width)
    if len(by_compute) > len(shown):
        yield f"  and {len(by_compute) - len(shown)} more"
    if len(by_compute) > 1:
        slowest = analysis.slowest
        text = f"Rank {slowest.rank} computes longest, {analysis.imbalance:.2f} times the mean."
        yield from textwrap.wrap(text, width)


def _table(columns: Sequence[tuple[str, Sequence[str]]], width: int) -> Iterator[str]:
    """Yield the rows of the first ``columns``, right-aligned, as many as fit into ``width``."""
    lines = ["" for _ in range(1 + len(columns[0][1]))]
    for title, cells in columns:
        size = max(map(len, (title, *cells)))
        if len(lines[0]) + 2 + size > width:
            break
        lines = [f"{line}  {cell:>{size}}" for line, cell in zip(lines, (title, *cells), strict=True)]
    yield from lines


def _causes(analysis: PerformanceAnalysis, width: int) -> Iterator[str]:
    if not analysis.bottlenecks:
        yield "No bottlenecks"
        return
    yield "Bottlenecks"
    for bottleneck in analysis.bottlenecks:
        yield from textwrap.wrap(
            _cause(bottleneck, alone=len(analysis.ranks) == 1), width, initial_indent="  ", subsequent_indent="    "
        )
        yield from textwrap.wrap(f"To do: {bottleneck.advice}.", width, initial_indent="    ", subsequent_indent="    ")


def _cause(bottleneck: Bottleneck, *, alone: bool) -> str:
    before, after = _WORDS[bottleneck.kind]
    where = "" if alone else f" on rank {bottleneck.rank}"
    value, threshold = percent_text(bottleneck.value), percent_text(bottleneck.threshold)
    return f"{bottleneck.severity.upper()}: {before} {value} {after} {threshold}{where}"


def _memory_text(one: RankPerformance) -> str:
    if not one.memory_limit:
        return bytes_text(one.memory_used)
    return f"{bytes_text(one.memory_used)} ({percent_text(one.memory_share)})"


def seconds_text(seconds: float) -> str:
    """Return a duration with about three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{_digits(seconds / size)}f} {unit}"
    return f"{seconds * 1e6:.{_digits(seconds * 1e6)}f} us"


def bytes_text(nbytes: int) -> str:
    """Return a number of bytes in a readable unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.{_digits(nbytes / size)}f} {unit}"
    return f"{nbytes} B"


def percent_text(share: float) -> str:
    """Return a share in per cent, with a decimal digit if it is not whole."""
    text = f"{100 * share:.1f}"
    return f"{text.removesuffix('.0')} %"


def count_text(count: float) -> str:
    """Return a large number with separators, a small one with decimal digits."""
    return f"{count:,.0f}" if count >= 100 else f"{count:.{_digits(count)}f}"


def _digits(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2


DEFAULT_CAPACITY = 100


class Performance3DMonitor:
    """The last ``capacity`` steps of ``rank``."""

    def __init__(self, rank: int = 0, *, capacity: int = DEFAULT_CAPACITY) -> None:
        if rank < 0:
            raise UsageError(f"rank: expected 0 or more, got {rank}")
        if capacity < 1:
            raise UsageError(f"capacity: expected at least 1 step, got {capacity}")
        self._rank = rank
        self._measures: deque[StepMeasure] = deque(maxlen=capacity)

    @property
    def measures(self) -> tuple[StepMeasure, ...]:
        """The recorded steps, oldest first."""
        return tuple(self._measures)

    def record(self, measure: StepMeasure) -> None:
        """Record ``measure``, replacing the oldest one if there are ``capacity``.

        Steps that do not precede it are forgotten: training has gone back, for example to a checkpoint.
        """
        while self._measures and self._measures[-1].step >= measure.step:
            self._measures.pop()
        self._measures.append(measure)

    def clear(self) -> None:
        """Forget all steps, such as those of a warm-up."""
        self._measures.clear()

    def performance(self) -> RankPerformance:
        """Return the figures of this rank."""
        return summarize(self._rank, self._measures)

    def analyze(self) -> PerformanceAnalysis:
        """Return the analysis of this rank alone.  Raises ``UsageError`` before the first step."""
        return analyze([self.performance()])

    async def analyze_all(self, communicator: Communicator) -> PerformanceAnalysis:
        """Return the analysis of all ranks of ``communicator``, which call this together; equal on all of them.

        Raises ``UsageError``, on every rank, if no rank has recorded a step.
        """
        gathered = await communicator.all_gather_object(self.performance(), wanted=RankPerformance)
        return analyze(gathered)

    def report(self, *, width: int = 80) -> str:
        """Return a report on this rank for people, ``width`` columns wide; see ``render_report``."""
        return render_report(self.analyze(), width=width)
