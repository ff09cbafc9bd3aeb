"""Metrics, by Prometheus and by OpenTelemetry."""

from __future__ import annotations

import math
import platform
import re
import urllib.request
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as text_string_to_families
from prometheus_client.parser import text_string_to_metric_families

import asyncpar
from asyncpar.errors import UsageError
from asyncpar.observe.durations import BOUNDS
from asyncpar.observe.metrics import collect_metrics, labels_of
from asyncpar.observe.opentelemetry import OpenTelemetrySink
from asyncpar.observe.prometheus import MetricsServer, RankCollector
from asyncpar.observe.summary import DurationSummary, RankReport, RankSummary
from asyncpar.testing.jobs import SyntheticJob, Trouble

LABELS = {"job_name", "rank", "host", "op", "group"}


def latest(size: int, seconds: int = 45) -> list[RankReport]:
    *_, job = SyntheticJob(size, trouble=Trouble.LATE).summaries(seconds)
    return job.ranks


def scrape(url: str) -> dict[str, list[Any]]:
    with urllib.request.urlopen(url) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {family.name: list(family.samples) for family in families}


def test_labels_are_job_rank_host_op_and_group_alone() -> None:
    for metric in collect_metrics(latest(4)):
        for sample in metric.samples:
            assert set(labels_of(metric, sample)) <= LABELS


def test_series_do_not_grow_with_time() -> None:
    def series(seconds: int) -> set[tuple[str, ...]]:
        found = collect_metrics(latest(4, seconds))
        return {(metric.name, *labels_of(metric, one).values()) for metric in found for one in metric.samples}

    assert series(45) == series(200)


def test_prometheus_reads_the_ranks_of_a_host() -> None:
    with MetricsServer("127.0.0.1", 0, lambda: latest(2)) as server:
        found = scrape(server.url)

    assert {sample.labels["rank"] for sample in found["asyncpar_up"]} == {"0", "1"}
    (loss,) = found["asyncpar_value_loss"]
    assert loss.labels == {"job_name": "", "rank": "0", "host": "node-00"}
    assert loss.value > 2.0
    (waiting,) = found["asyncpar_operation_waiting_seconds"]
    assert waiting.labels == {"job_name": "", "rank": "1", "host": "node-00", "op": "all_reduce", "group": "world"}
    assert found["asyncpar_cpu_seconds"][0].name == "asyncpar_cpu_seconds_total"


def test_a_rank_that_reports_nothing_is_still_up_or_down() -> None:
    stopped = RankReport(rank=3, host="a", pid=1, condition="stopped")

    up, restarts = collect_metrics([stopped])

    assert [(sample.rank, sample.value) for sample in up.samples] == [(3, 0.0)]
    assert [(sample.rank, sample.value) for sample in restarts.samples] == [(3, 0.0)]


COUNTS = (0, 3, *(0 for _ in BOUNDS[2:-1]), 1, 2)
TIMED = RankReport(
    rank=1,
    host="a",
    pid=7,
    job="train",
    restarts=2,
    summary=RankSummary(
        rank=1, pid=7, time=0.0, durations=(DurationSummary(name="all_reduce", counts=COUNTS, seconds=31.5),)
    ),
)


def test_prometheus_gets_histograms_of_operations_restarts_and_the_build_with_the_name_of_the_job() -> None:
    with MetricsServer("127.0.0.1", 0, lambda: [TIMED]) as server:
        found = scrape(server.url)

    labels = {"job_name": "train", "rank": "1", "host": "a", "op": "all_reduce"}
    series = {one.name: one.value for one in found["asyncpar_operation_seconds"] if "le" not in one.labels}
    assert (series["asyncpar_operation_seconds_count"], series["asyncpar_operation_seconds_sum"]) == (6.0, 31.5)
    buckets = [one for one in found["asyncpar_operation_seconds"] if one.name.endswith("_bucket")]
    assert all(one.labels == labels | {"le": one.labels["le"]} for one in buckets)
    heights = {float(one.labels["le"]): one.value for one in buckets}
    assert list(heights) == [*BOUNDS, math.inf]
    assert (heights[0.0001], heights[0.00025], heights[5.0], heights[10.0], heights[math.inf]) == (0, 3, 3, 4, 6)
    (restarts,) = found["asyncpar_restarts"]
    assert (restarts.name, restarts.value) == ("asyncpar_restarts_total", 2.0)
    assert restarts.labels == {"job_name": "train", "rank": "1", "host": "a"}
    (build,) = found["asyncpar_build_info"]
    assert build.labels == {"version": asyncpar.__version__, "python": platform.python_version()}


def test_opentelemetry_gets_the_sums_of_histograms_and_the_versions() -> None:
    reader = InMemoryMetricReader()
    sink = OpenTelemetrySink([reader])
    (job,) = SyntheticJob(2).summaries(1)
    host = msgspec.structs.replace(job.hosts[0], ranks=(TIMED,))
    sink.take(msgspec.structs.replace(job, hosts=(host,)))

    read = reader.get_metrics_data()
    assert read is not None
    (resource,) = read.resource_metrics
    assert resource.resource.attributes["service.version"] == asyncpar.__version__
    found = {one.name: one.data.data_points[0] for one in resource.scope_metrics[0].metrics}
    assert found["asyncpar.operation_seconds_sum"].value == 31.5  # type: ignore[union-attr]
    assert found["asyncpar.operation_seconds_count"].value == 6  # type: ignore[union-attr]
    assert dict(found["asyncpar.restarts"].attributes or {})["job_name"] == "train"
    sink.close("exit code 0")


def test_names_of_values_become_valid_and_are_bounded() -> None:
    values = {f"loss/{number}": float(number) for number in range(200)} | {"a.b": 1.0, "a/b": 2.0}
    summary = RankSummary(rank=0, pid=1, time=0.0, values={"a.b": 1.0, "a/b": 2.0, **values})
    metrics = collect_metrics([RankReport(rank=0, host="a", pid=1, summary=summary)])

    names = [metric.name for metric in metrics if metric.name.startswith("value_")]
    assert len(names) == 64
    assert "value_a_b" in names
    assert all(len(metric.samples) == 1 for metric in metrics)


def test_an_address_that_is_taken_is_a_usage_error() -> None:
    with MetricsServer("127.0.0.1", 0, list) as server:
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(UsageError, match=r"--metrics: .* cannot be bound"), MetricsServer("127.0.0.1", port, list):
            pass


def test_opentelemetry_gets_the_same_metrics() -> None:
    reader = InMemoryMetricReader()
    sink = OpenTelemetrySink([reader])
    for job in SyntheticJob(2).summaries(3):
        sink.take(job)

    read = reader.get_metrics_data()
    assert read is not None
    (resource,) = read.resource_metrics
    assert resource.resource.attributes["service.instance.id"] == "gpt-small"
    found = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert {dict(point.attributes or {})["rank"] for point in found["asyncpar.up"].data.data_points} == {"0", "1"}
    assert found["asyncpar.cpu_seconds"].unit == "s"
    sink.close("exit code 0")


def test_names_follow_the_conventions_whatever_the_program_calls_its_values() -> None:
    names = ["loss", "tokens_total", "lr/head", "", "é", "x_bucket", "y_created", "z_info", "a_sum", "b_count", "1st"]
    summary = RankSummary(
        rank=0,
        pid=1,
        time=0.0,
        cpu=1.0,
        values=dict.fromkeys(names, 1.0),
        operations_done={"called": 3},
        bytes_moved={"arena": 5, "messages": 6},
        durations=(DurationSummary(name="barrier", counts=(1,) * (len(BOUNDS) + 1), seconds=1.0),),
    )
    report = RankReport(rank=0, host="h", pid=1, summary=summary)
    for metric in collect_metrics([report]):
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", metric.name)
        assert not re.search(r"_(total|sum|count|bucket|info|created)$", metric.name), metric.name
        assert metric.help.endswith(".")
        suffix = {"s": "_seconds", "By": "_bytes", "": ""}[metric.unit]
        assert metric.name.endswith(suffix)
    registry = CollectorRegistry()
    registry.register(RankCollector(lambda: [report]))
    text = generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    families = list(text_string_to_families(text))  # type: ignore[no-untyped-call]  # a strict one
    assert {family.type for family in families} == {"gauge", "counter", "histogram", "info"}
    assert sum(family.name.startswith("asyncpar_value_") for family in families) == len(names)
