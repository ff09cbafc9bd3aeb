"""Pictures: the content of the page at one moment, as plain values for JSON, bounded for any number of ranks.  Pure.

The page is a function of only the latest picture: a browser that was away misses nothing, and a report is a picture in
a file.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any, Final

import msgspec

from asyncpar.dashboard.history import History
from asyncpar.dashboard.states import RankActivity, describe_job, find_states
from asyncpar.observe.ask_chains import AskChain, find_ask_chains
from asyncpar.observe.summary import (
    AskSummary,
    FigureSummary,
    JobSummary,
    LinkSummary,
    OperationSummary,
    RankReport,
    RankSummary,
)

MOST_RANKS: Final = 256
"""Maximum number of rows of tables by rank; if there are more, those in the worst state come first."""

MOST_LINKED: Final = 64
MOST_ALARMS: Final = 4
MOST_OPERATIONS: Final = 64
MOST_ACTORS: Final = 64
MOST_CHAINS: Final = 32
_MOST_STEPS: Final = 16
_LONGEST_LIST: Final = 16

Json = dict[str, Any]


class Painter:
    """Makes the pictures of a job.  ``paint`` one summary after the other, about once a second."""

    def __init__(self, history: History | None = None) -> None:
        self._history = History() if history is None else history
        self._bytes: dict[tuple[int, int], int] = {}
        self._cpu: dict[int, tuple[float, float, float | None]] = {}
        self._time: float | None = None

    def paint(self, job: JobSummary, *, ended: str = "", schedule: Json | None = None) -> Json:
        """Return the picture of ``job``; ``ended`` describes how it ended, "" while it runs.

        ``schedule`` is the last run of its pipeline: see ``draw_run``.
        """
        states = find_states(job)
        if ended:
            states = {rank: _at_the_end(state) for rank, state in states.items()}
        else:
            self._history.take(job, states)
        reports = job.ranks
        shown = _worst(reports, states)
        passed = None if self._time is None else job.time - self._time
        picture = {
            "version": 1,
            "job": job.job,
            "command": " ".join(job.command)[:500],
            "time": job.time,
            "started": job.started,
            "phase": job.phase,
            "generation": job.generation,
            "restarts": job.restarts,
            "past": [[one.generation, one.time, one.reason[:300]] for one in job.past],
            "world": job.world_size,
            "hosts": [host.host for host in job.hosts][:MOST_RANKS],
            "sentence": _capital(describe_job(job, states)),
            "alarms": [] if ended else [_capital(alarm)[:300] for alarm in job.alarms[:MOST_ALARMS]],
            "ended": ended,
            "counts": _counts(states),
            "total": len(reports),
            "progress": _progress(reports),
            "values": _values(reports),
            "heat": self._heat(),
            "series": {name: series.points for name, series in self._history.series.items()},
            "ranks": [self._rank(report, states[report.rank]) for report in shown],
            "links": self._links(shown, passed),
            "operations": _operations(reports, job.world_size),
            "figures": _figures(shown),
            "rounds": _rounds(shown),
            "gradients": _gradients(shown),
            "pipeline": _pipeline(shown),
            "schedule": schedule,
            "actors": _actors(reports, shown),
        }
        self._remember(shown, job.time)
        return picture

    def _heat(self) -> Json:
        history = self._history
        return {
            "ranksPerRow": history.ranks_per_row,
            "times": [round(time, 2) for time in history.times],
            "columns": [column.translate(_DIGITS).decode() for column in history.columns],
        }

    def _rank(self, report: RankReport, state: RankActivity) -> Json:
        row: Json = {"rank": report.rank, "host": report.host, "pid": report.pid, "state": int(state)}
        if report.ending:
            row["ending"] = report.ending[:500]
        if state is RankActivity.STOPPED:
            row["seconds"] = report.seconds
        if report.place:
            row["site"] = report.place
        summary = report.summary
        if summary is None:
            return row
        row |= {
            "age": round(report.age, 1),
            "phase": summary.phase or report.phase,
            "lag": summary.loop_lag,
            "rss": summary.rss,
            "arena": summary.arena,
            "cpu": self._processor(summary, is_stale=report.is_stale),
            "gc": summary.gc,
            "stolen": summary.stolen,
            "site": report.place or summary.user_site,
            "done": sum(summary.operations_done.values()),
        }
        if summary.progress is not None:
            row["step"], row["steps"] = summary.progress.completed, summary.progress.total
        if summary.blocked is not None:
            row["blocked"] = msgspec.to_builtins(summary.blocked)
        if (operation := summary.longest) is not None:
            row["operation"] = _operation(operation)
        return row

    def _processor(self, summary: RankSummary, *, is_stale: bool) -> float | None:
        """Return the number of processors that the rank uses; None if it is not known, or no longer valid."""
        at, used, speed = self._cpu.get(summary.rank, (summary.time, summary.cpu, None))
        if summary.time > at and summary.cpu >= used:
            speed = round((summary.cpu - used) / (summary.time - at), 3)
        self._cpu[summary.rank] = summary.time, summary.cpu, speed
        return None if is_stale else speed

    def _links(self, shown: Sequence[RankReport], passed: float | None) -> Json:
        """Return the matrix of links: rows are senders; a cell is round trip in us, MB/s and the lane's number."""
        linked = sorted(
            (report for report in shown if report.summary is not None and report.summary.links),
            key=lambda report: report.rank,
        )[:MOST_LINKED]
        places = {report.rank: place for place, report in enumerate(linked)}
        lanes: list[str] = []
        cells: list[list[float | int | None]] = []
        for report in linked:
            assert report.summary is not None
            for link in report.summary.links:
                if link.peer in places:
                    if link.lane not in lanes:
                        lanes.append(link.lane)
                    speed = self._speed(report.rank, link, passed)
                    trip = None if link.rtt is None else round(link.rtt * 1e6, 1)
                    cells.append([places[report.rank], places[link.peer], trip, speed, lanes.index(link.lane)])
        return {"ranks": list(places), "lanes": lanes, "cells": cells}

    def _speed(self, rank: int, link: LinkSummary, passed: float | None) -> float | None:
        before = self._bytes.get((rank, link.peer))
        if before is None or passed is None or passed <= 0.0:
            return None
        return round(max(0, link.bytes - before) / passed / 1e6, 3)

    def _remember(self, shown: Sequence[RankReport], time: float) -> None:
        summaries = [report.summary for report in shown if report.summary is not None]
        linked = sorted(summaries, key=lambda summary: summary.rank)[:MOST_LINKED]
        self._bytes = {(summary.rank, link.peer): link.bytes for summary in linked for link in summary.links}
        shown_ranks = {summary.rank for summary in summaries}
        self._cpu = {rank: used for rank, used in self._cpu.items() if rank in shown_ranks}
        self._time = time


_DIGITS: Final = bytes(48 + min(code, 9) for code in range(256))


def _worst(reports: Sequence[RankReport], states: Mapping[int, RankActivity]) -> list[RankReport]:
    """Return at most ``MOST_RANKS`` reports, those in the worst states, in the order of ranks."""
    if len(reports) <= MOST_RANKS:
        return list(reports)
    worst = sorted(reports, key=lambda report: (-states[report.rank], report.rank))[:MOST_RANKS]
    return sorted(worst, key=lambda report: report.rank)


def _at_the_end(state: RankActivity) -> RankActivity:
    return RankActivity.FAILED if state is RankActivity.FAILED else RankActivity.ENDED


def _counts(states: Mapping[int, RankActivity]) -> dict[str, int]:
    counted = Counter(states.values())
    return {str(int(state)): counted[state] for state in RankActivity if counted[state]}


def _progress(reports: Sequence[RankReport]) -> Json | None:
    for report in reports:
        if report.summary is not None and report.summary.progress is not None:
            found: Json = msgspec.to_builtins(report.summary.progress)
            return found
    return None


def _values(reports: Sequence[RankReport]) -> dict[str, float]:
    for report in reports:
        if report.summary is not None and report.summary.values:
            return {name: value for name, value in report.summary.values.items() if math.isfinite(value)}
    return {}


def _operation(operation: OperationSummary) -> Json:
    return {
        "label": operation.label,
        "text": operation.text[:200],
        "group": operation.group,
        "bytes": operation.bytes,
        "seconds": round(operation.seconds, 3),
        "site": operation.site,
        "waitsFor": list(operation.waits_for[:_LONGEST_LIST]),
        "awaited": operation.is_awaited,
    }


def _operations(reports: Sequence[RankReport], world_size: int) -> list[Json]:
    """Return the pending operations by group and number, those that have waited longest first."""
    found: dict[tuple[str, int, str], list[tuple[int, OperationSummary]]] = defaultdict(list)
    for report in reports:
        for operation in () if report.summary is None else report.summary.operations:
            found[operation.group, operation.sequence, operation.label].append((report.rank, operation))
    rows: list[Json] = []
    for members in found.values():
        first = max((operation for _, operation in members), key=lambda operation: operation.seconds)
        missing = sorted({peer for _, operation in members for peer in operation.waits_for})
        rows.append(
            _operation(first)
            | {
                "sequence": first.sequence,
                "kind": first.kind,
                "dtype": first.dtype,
                "here": sorted(rank for rank, _ in members)[:_LONGEST_LIST],
                "hereCount": len(members),
                "waitsFor": missing[:_LONGEST_LIST],
                "world": world_size,
            }
        )
    return sorted(rows, key=lambda row: -row["seconds"])[:MOST_OPERATIONS]


def _figures(shown: Sequence[RankReport]) -> list[Json]:
    """Return the durations of events on all ranks: medians of medians, and the worst of the 99th percentiles."""
    found: dict[tuple[str, str, str, int], list[FigureSummary]] = defaultdict(list)
    for report in shown:
        for figure in () if report.summary is None else report.summary.figures:
            found[figure.what, figure.name, figure.algorithm, figure.bytes].append(figure)
    rows: list[Json] = []
    for (what, name, algorithm, size), figures in found.items():
        middle = sorted(figure.p50 for figure in figures)[(len(figures) - 1) // 2]
        row = {"what": what, "name": name, "algorithm": algorithm, "bytes": size, "p50": middle}
        row |= {"count": sum(figure.count for figure in figures), "p99": max(figure.p99 for figure in figures)}
        row |= {"rate": _middle(figure.rate for figure in figures if figure.rate)}
        row |= {"expected": _middle(figure.expected for figure in figures if figure.expected)}
        rows.append(row)
    return sorted(rows, key=lambda row: -row["p50"] * row["count"])[:MOST_OPERATIONS]


def _middle(values: Iterable[float]) -> float | None:
    """Return the median; None if there are no values."""
    return median_low(known) if (known := list(values)) else None


def _gradients(shown: Sequence[RankReport]) -> Json:
    """Return the medians over ranks of their gradient synchronization."""
    gradients = [report.summary.gradients for report in shown if report.summary and report.summary.gradients]
    return {"hidden": _middle(one.hidden for one in gradients), "ratio": _middle(one.ratio for one in gradients)}


def _rounds(shown: Sequence[RankReport]) -> list[list[int]]:
    """Return, by rank, the number of its last rounds, and the microseconds that they and its own work in them took."""
    return [
        [report.rank, len(rounds), sum(one.micros for one in rounds), sum(one.own for one in rounds)]
        for report in shown
        if report.summary is not None and (rounds := report.summary.rounds)
    ]


def _pipeline(shown: Sequence[RankReport]) -> list[Json]:
    """Return the figures of the pipeline's actions, by rank."""
    return [
        {"rank": report.rank, "name": figure.name, "count": figure.count, "p50": figure.p50, "p99": figure.p99}
        for report in shown
        if report.summary is not None
        for figure in report.summary.figures
        if figure.what == "pipeline"
    ]


def _actors(reports: Sequence[RankReport], shown: Sequence[RankReport]) -> Json:
    """Return mailboxes and calls of the ranks that are ``shown``, and chains and dead letters of all ``reports``."""
    summaries = [report.summary for report in shown if report.summary is not None]
    boxes: list[Json] = [
        {"rank": summary.rank, "actor": box.actor, "waiting": box.waiting}
        for summary in summaries
        for box in summary.mailboxes
    ]
    asks = [_asked(summary.rank, ask) for summary in summaries for ask in summary.asks]
    return {
        "mailboxes": sorted(boxes, key=lambda box: -box["waiting"])[:MOST_ACTORS],
        "asks": sorted(asks, key=lambda ask: -ask["seconds"])[:MOST_ACTORS],
        "chains": [_chain(chain) for chain in find_ask_chains(reports)[:MOST_CHAINS]],
        "letters": _letters(reports),
        "lettersCount": sum(report.summary.dead_letters for report in reports if report.summary is not None),
    }


def _asked(rank: int, ask: AskSummary) -> Json:
    return {
        "from": rank,
        "caller": ask.caller,
        "rank": ask.rank,
        "actor": ask.actor,
        "endpoint": ask.endpoint,
        "seconds": ask.seconds,
        "site": ask.site,
    }


def _chain(chain: AskChain) -> Json:
    return {
        "ranks": list(chain.ranks[:_MOST_STEPS]),
        "count": len(chain.ranks),
        "caller": chain.caller,
        "steps": [step._asdict() for step in chain.steps[:_MOST_STEPS]],
        "more": max(0, len(chain.steps) - _MOST_STEPS),
        "end": chain.end[:300],
        "cycle": chain.is_cycle,
    }


def _letters(reports: Sequence[RankReport]) -> list[Json]:
    """Return the last dead letters, the last one of each rank first."""
    found = [
        (place, summary.rank, letter)
        for summary in (report.summary for report in reports)
        if summary is not None
        for place, letter in enumerate(summary.letters)
    ]
    found.sort(key=lambda one: one[:2])
    return [{"on": on, **msgspec.to_builtins(letter)} for _, on, letter in found[:MOST_ACTORS]]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
