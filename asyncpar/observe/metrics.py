"""Metrics of ranks for Prometheus and OpenTelemetry.  Pure.

Labels are the name of the job, rank, host, op and group; never a step or a sequence number, which would create endless
new series.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from asyncpar.observe.summary import RankReport, RankSummary

MOST_NAMES: Final = 64
"""Maximum number of names of reported values that become metrics; further names are left out."""

_BAD: Final = re.compile(r"[^a-zA-Z0-9_]")
_RESERVED: Final = re.compile(r"_(total|sum|count|bucket|info|created|gsum|gcount)$")
"""Endings of names of other types of metrics, by the conventions of Prometheus."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric for a rank; ``op`` and ``group`` are "" for metrics of the whole rank."""

    rank: int
    host: str
    value: float
    op: str = ""
    group: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric with its samples.  ``name`` has neither the package's prefix nor the suffix of counters."""

    name: str
    help: str
    unit: str = ""
    is_counter: bool = False
    by_operation: bool = False
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramSample:
    """Durations of an operation of a rank: ``counts`` by bucket (see ``durations.BOUNDS``), and the total."""

    rank: int
    host: str
    op: str
    counts: tuple[int, ...]
    seconds: float
    job: str = ""

    @property
    def labels(self) -> Mapping[str, str]:
        return {"job_name": self.job, "rank": str(self.rank), "host": self.host, "op": self.op}


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A metric of durations in seconds, with its samples."""

    name: str
    help: str
    samples: list[HistogramSample] = field(default_factory=list)


def _blocked(rank: RankSummary) -> float:
    return 0.0 if rank.blocked is None else rank.blocked.seconds


def _completed(rank: RankSummary) -> float | None:
    return None if rank.progress is None else rank.progress.completed


_Read = Callable[[RankSummary], float | None]
_COUNTERS: Final[tuple[tuple[str, str, str, _Read], ...]] = (
    ("cpu_seconds", "Processor time used.", "s", lambda rank: rank.cpu),
    ("gc_seconds", "Time in garbage collections.", "s", lambda rank: rank.gc),
    ("stolen_seconds", "Time that threads waited for a processor.", "s", lambda rank: rank.stolen),
    ("operations", "Operations that are over or called.", "", lambda rank: sum(rank.operations_done.values())),
    ("arena_bytes", "Bytes shown in shared memory.", "By", lambda rank: rank.bytes_moved.get("arena", 0)),
    ("messages_bytes", "Bytes sent over links.", "By", lambda rank: rank.bytes_moved.get("messages", 0)),
)
_GAUGES: Final[tuple[tuple[str, str, str, _Read], ...]] = (
    ("loop_lag_seconds", "Time in which the event loop answered last.", "s", lambda rank: rank.loop_lag),
    ("resident_bytes", "Resident memory.", "By", lambda rank: rank.rss),
    ("arena_size_bytes", "Shared memory of the host that the rank has mapped.", "By", lambda rank: rank.arena),
    ("blocked_seconds", "Time that code has blocked the event loop.", "s", _blocked),
    ("progress", "Steps that the program has done.", "", _completed),
    ("mailbox_messages", "Messages that wait for actors.", "", lambda rank: sum(box.waiting for box in rank.mailboxes)),
    ("pending_calls", "Calls of actors that wait for an answer.", "", lambda rank: len(rank.asks)),
)


def collect_metrics(reports: Iterable[RankReport]) -> list[Metric]:
    """Return the metrics of ``reports``."""
    reports = list(reports)
    up = Metric(name="up", help="Whether the rank runs: 1, or 0 when it is stopped, hung or ended.")
    up.samples.extend(_sample(one, float(one.condition == "well")) for one in reports)
    restarts = Metric(name="restarts", help="Processes of the rank that others took the place of.", is_counter=True)
    restarts.samples.extend(_sample(one, float(one.restarts)) for one in reports)
    reported = [(one, one.summary) for one in reports if one.summary is not None]
    metrics = [up, restarts]
    for table, is_counter in ((_COUNTERS, True), (_GAUGES, False)):
        for name, text, unit, read in table:
            metric = Metric(name=name, help=text, unit=unit, is_counter=is_counter)
            for report, summary in reported:
                if (value := read(summary)) is not None:
                    metric.samples.append(_sample(report, float(value)))
            metrics.append(metric)
    metrics += [_waiting(reported), *_values(reported)]
    return [metric for metric in metrics if metric.samples]


def collect_histograms(reports: Iterable[RankReport]) -> list[Histogram]:
    """Return the histograms of ``reports``."""
    found = Histogram(name="operation_seconds", help="Time of collective operations from their call to their end.")
    for report in reports:
        for took in () if report.summary is None else report.summary.durations:
            found.samples.append(
                HistogramSample(
                    rank=report.rank,
                    host=report.host,
                    op=took.name,
                    counts=took.counts,
                    seconds=took.seconds,
                    job=report.job,
                )
            )
    return [found] if found.samples else []


def split_histogram(histogram: Histogram) -> tuple[Metric, Metric]:
    """Return the seconds and the number of operations as counters, for systems that cannot accept finished buckets."""
    seconds = Metric(name=f"{histogram.name}_sum", help=histogram.help, unit="s", is_counter=True, by_operation=True)
    number = Metric(name=f"{histogram.name}_count", help=histogram.help, is_counter=True, by_operation=True)
    for one in histogram.samples:
        seconds.samples.append(Sample(one.rank, one.host, one.seconds, one.op, job=one.job))
        number.samples.append(Sample(one.rank, one.host, float(sum(one.counts)), one.op, job=one.job))
    return seconds, number


def _sample(report: RankReport, value: float, op: str = "", group: str = "") -> Sample:
    return Sample(report.rank, report.host, value, op, group, report.job)


def _waiting(reported: Iterable[tuple[RankReport, RankSummary]]) -> Metric:
    metric = Metric(
        name="operation_waiting_seconds",
        help="Time since the last progress of the operation that has waited longest.",
        unit="s",
        by_operation=True,
    )
    for report, summary in reported:
        longest: dict[tuple[str, str], float] = {}
        for operation in summary.operations:
            key = operation.kind, operation.group
            longest[key] = max(longest.get(key, 0.0), operation.seconds)
        metric.samples.extend(_sample(report, seconds, op, group) for (op, group), seconds in longest.items())
    return metric


def _values(reported: Iterable[tuple[RankReport, RankSummary]]) -> Iterable[Metric]:
    metrics: dict[str, Metric] = {}
    for report, summary in reported:
        for name, value in summary.values.items():
            known = f"value_{_BAD.sub('_', name)}"
            known += "_value" if _RESERVED.search(known) else ""
            if known not in metrics:
                if len(metrics) >= MOST_NAMES:
                    continue
                metrics[known] = Metric(name=known, help="Reported by the program with ap.observe.report.")
            metric = metrics[known]
            if not metric.samples or metric.samples[-1].rank != report.rank:  # two names may become one
                metric.samples.append(_sample(report, value))
    return metrics.values()


def labels_of(metric: Metric, sample: Sample) -> Mapping[str, str]:
    """Return the labels of ``sample``."""
    labels = {"job_name": sample.job, "rank": str(sample.rank), "host": sample.host}
    return labels | {"op": sample.op, "group": sample.group} if metric.by_operation else labels
