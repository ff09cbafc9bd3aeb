"""Tables as text and as HTML, with units."""

from __future__ import annotations

from typing import Any

import pytest

from asyncpar.backends import CommunicationMetrics, OperationMetrics
from asyncpar.collectives.ledger import CollectiveStatistics, Traffic
from asyncpar.core.tables import bytes_text, html_table, seconds_text, text_table
from asyncpar.gradsync import SyncStatistics
from asyncpar.hybrid.step import StepResult
from asyncpar.multinode import MemorySavings, MemoryUsage, MultiNodeStats
from asyncpar.pipeline.offload.entry import MemoryUsageStats, Volume
from asyncpar.pipeline.result import PipelineResult
from asyncpar.zero import ZeROMemoryStats

ROWS = [("name", "figure"), ("<b>&", "12")]


def test_columns_are_aligned() -> None:
    assert text_table(ROWS, left=1) == "name  figure\n<b>&      12"


def test_texts_are_escaped() -> None:
    expected = (
        "<table><thead><tr><th>name</th><th>figure</th></tr></thead>"
        "<tbody><tr><td>&lt;b&gt;&amp;</td><td>12</td></tr></tbody></table>"
    )
    assert html_table(ROWS) == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (25e6, "25 MB"), (1.5e12, "1.5 TB")],
)
def test_bytes_have_units(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0 s"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-6, "4 us")])
def test_times_have_units(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


STATISTICS: dict[str, tuple[Any, dict[str, str]]] = {
    "gradients": (
        SyncStatistics(total_sync_operations=3, bytes_on_wire=25_000_000, average_sync_time_ms=12.345),
        {"sent": "25 MB", "time of a step": "12.3 ms"},
    ),
    "traffic": (Traffic(operations=()), {}),
    "nodes": (
        MultiNodeStats(
            num_nodes=2,
            devices_per_node=2,
            node_rank=1,
            local_rank=0,
            global_rank=2,
            steps=1200,
            memory_savings=MemorySavings(0.25),
            memory=MemoryUsage(parameters=4000, buffers=2_000_000),
        ),
        {"multi-node training": "rank 2 of 4", "steps": "1,200", "memory saved": "25%", "  buffers": "2 MB"},
    ),
    "memory of a trainer": (MemoryUsage(gradients=1500), {"gradients": "1.5 KB", "total": "1.5 KB"}),
    "ZeRO": (
        ZeROMemoryStats(
            parameters=4000,
            gradients=4000,
            states=2000,
            gathered=0,
            buffers=0,
            transient_peak=0,
            whole=16_000,
            values=1000,
        ),
        {"there to stay": "10 KB", "without sharding": "16 KB", "saved": "38%", "bytes per value": "10"},
    ),
    "one operation": (
        CollectiveStatistics(
            operation="all_reduce", algorithm="ring", calls=4, payload_bytes=8_000_000, messages=24, seconds=0.2
        ),
        {"all_reduce": "ring           4     8 MB        24      50 ms"},
    ),
    "values of micro-batches": (
        MemoryUsageStats(
            current_bytes=1500,
            peak_bytes=25_000_000,
            current_count=1,
            peak_count=12,
            stored=Volume(count=3, nbytes=4000),
            retrieved=Volume(),
            offloaded=Volume(count=2, nbytes=2000),
            restored=Volume(),
        ),
        {"now": "1  1.5 KB", "at the peak": "12   25 MB", "offloaded": "2    2 KB", "restored": "0     0 B"},
    ),
    "step": (
        StepResult(
            loss=2.34567,
            tokens=4096,
            gradient_norm=1.5,
            is_skipped=True,
            seconds=0.25,
            pipeline=PipelineResult(
                losses=(),
                peak_in_flight=1,
                peak_bytes=0,
                seconds=0.2,
                seconds_busy=0.15,
                seconds_waiting=0.05,
                sent=(),
                received=(),
            ),
            why="rank 1: <inf>",
        ),
        {"step": "skipped", "why": "rank 1: <inf>", "loss": "2.346", "tokens": "4,096", "time": "250 ms"},
    ),
    "backend": (
        CommunicationMetrics(operations={"all_reduce": OperationMetrics(count=4, bytes=8_000_000, seconds=0.2)}),
        {"all_reduce": "4  8 MB      50 ms       0", "all": "4  8 MB      50 ms       0"},
    ),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_are_tables(name: str) -> None:
    statistics, figures = STATISTICS[name]
    lines = str(statistics).splitlines()
    for what, figure in figures.items():
        assert any(line.startswith(f"{what}  ") and line.endswith(f" {figure}") for line in lines), str(statistics)
    assert max(map(len, lines)) <= 80
    assert repr(statistics) == str(statistics)  # what a prompt shows
    html = statistics._repr_html_()  # the name that notebooks call
    assert html.startswith("<table>")
    assert html.count("<tr>") == len(lines)
