"""Sinks get what they can take, and disturb nobody."""

from __future__ import annotations

import sys
import threading

import pytest

from asyncpar.errors import UsageError
from asyncpar.observe.sinks import Sink, SinkThread, load_sink
from asyncpar.observe.summary import JobSummary
from asyncpar.testing.jobs import SyntheticJob


class Collecting:
    """A sink that keeps what it gets."""

    def __init__(self, *, fail_at: int | None = None, until: threading.Event | None = None) -> None:
        self.jobs: list[JobSummary] = []
        self.outcome = ""
        self._fail_at, self._until = fail_at, until

    def take(self, job: JobSummary) -> None:
        if self._until is not None:
            self._until.wait(10)
        if len(self.jobs) == self._fail_at:
            raise OSError("the disk is full")
        self.jobs.append(job)

    def close(self, outcome: str) -> None:
        self.outcome = outcome


def feed(sink: Sink, count: int, *, reported: list[str], before_close: threading.Event | None = None) -> SinkThread:
    thread = SinkThread("mine", lambda: sink, reported.append)
    thread.start()
    for job in SyntheticJob(1).summaries(count):
        thread.take(job)
    if before_close is not None:
        before_close.set()
    thread.close("exit code 0")
    return thread


def test_a_sink_gets_summaries_in_order_and_the_outcome() -> None:
    sink, reported = Collecting(), list[str]()
    feed(sink, 5, reported=reported)

    assert [job.time for job in sink.jobs] == sorted(job.time for job in sink.jobs)
    assert (len(sink.jobs), sink.outcome, reported) == (5, "exit code 0", [])


def test_a_slow_sink_loses_summaries_which_is_reported_at_the_end() -> None:
    go, reported = threading.Event(), list[str]()
    sink = Collecting(until=go)
    thread = feed(sink, 100, reported=reported, before_close=go)

    assert thread.dropped >= 90
    assert sink.outcome == "exit code 0"
    assert reported == [f"sink mine: {thread.dropped} summaries were dropped, because it was slow"]


def test_a_sink_that_fails_is_reported_once_and_left_out() -> None:
    reported: list[str] = []
    sink = Collecting(fail_at=2)
    feed(sink, 6, reported=reported)

    assert reported == ["sink mine has failed and gets nothing more: OSError: the disk is full"]
    assert len(sink.jobs) == 2


def test_a_sink_that_cannot_be_made_is_reported() -> None:
    def make() -> Sink:
        raise RuntimeError("no account")

    reported: list[str] = []
    thread = SinkThread("mine", make, reported.append)
    thread.start()
    thread.close("x")

    assert reported == ["sink mine has failed and gets nothing more: RuntimeError: no account"]


def test_sinks_are_found_by_entry_point_and_by_module() -> None:
    assert load_sink("opentelemetry").__name__ == "OpenTelemetrySink"
    assert load_sink(f"{__name__}:Collecting") is Collecting


def test_a_sink_without_its_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "asyncpar.observe.opentelemetry", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    with pytest.raises(UsageError, match=r"--sink: opentelemetry .*install asyncpar\[opentelemetry\]$"):
        load_sink("opentelemetry")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("wandb", r"expected one of those installed \(.*opentelemetry.*\)"),
        ("nowhere.at_all:Sink", "cannot be imported"),
        (f"{__name__}:Nothing", "cannot be imported"),
        (f"{__name__}:pytestmark", "cannot be imported"),
        ("asyncpar.observe.sinks:ENTRY_POINTS", "makes a sink, got str"),
    ],
)
def test_a_sink_that_is_not_there_is_a_usage_error(name: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"--sink: .*{problem}"):
        load_sink(name)
