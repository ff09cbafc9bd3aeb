"""Figures, and the document that carries them."""

from __future__ import annotations

import json
from dataclasses import replace

from asyncpar.bench.report import BenchReport, bandwidths, root_column
from tests.bench.samples import ROW, SURROUNDINGS


def test_the_document_can_be_read_again() -> None:
    report = BenchReport(surroundings=SURROUNDINGS, measurements=(ROW,))
    assert BenchReport.from_json(report.to_json()) == report
    document = json.loads(report.to_json())
    assert document["surroundings"]["ranks"] == 4
    assert document["measurements"][0]["predicted_us"] == 8.0


def test_sizes_with_wrong_elements_are_counted() -> None:
    report = BenchReport(surroundings=SURROUNDINGS, measurements=(ROW, replace(ROW, wrong=3), replace(ROW, wrong=1)))
    assert report.wrong_sizes == 2


def test_the_mean_bandwidth_leaves_out_what_has_none() -> None:
    barrier = replace(ROW, operation="barrier", size=0, busbw=0.0)
    assert (
        BenchReport(surroundings=SURROUNDINGS, measurements=(ROW, barrier, replace(ROW, busbw=0.25))).mean_busbw == 0.2
    )
    assert BenchReport(surroundings=SURROUNDINGS, measurements=(barrier,)).mean_busbw == 0.0


def test_bandwidths_are_in_gigabytes_per_second() -> None:
    assert bandwidths("all_reduce", 2_000_000, 0.001, 4) == (2.0, 3.0)
    assert bandwidths("all_reduce", 0, 0.0, 4) == (0.0, 0.0)


def test_only_operations_with_a_root_show_one() -> None:
    assert [root_column(operation, 0) for operation in ("all_reduce", "broadcast", "barrier", "gather")] == [
        -1,
        0,
        -1,
        0,
    ]
