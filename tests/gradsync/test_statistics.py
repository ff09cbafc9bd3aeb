"""Figures follow from events."""

from __future__ import annotations

import pytest

from asyncpar.gradsync import SyncStatistics
from asyncpar.gradsync.statistics import StepRecord, SyncTraffic, merge_intervals


def test_intervals_are_merged_where_they_touch() -> None:
    assert merge_intervals([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)]) == [(0.0, 4.0), (5.0, 6.0)]


def test_time_that_buckets_share_counts_once_in_the_total() -> None:
    statistics = SyncStatistics()
    StepRecord(intervals=[(0.0, 3.0), (1.0, 4.0)], last_gradient_at=4.0).add_to(statistics)
    assert statistics.total_sync_time == 4.0
    assert statistics.total_bucket_sync_time == 6.0
    assert (statistics.total_sync_operations, statistics.total_buckets_synced) == (1, 2)
    assert statistics.overlap_fraction == 1.0


def test_what_comes_after_the_last_gradient_is_exposed() -> None:
    statistics = SyncStatistics()
    StepRecord(intervals=[(0.0, 1.0), (2.0, 5.0)], last_gradient_at=4.0).add_to(statistics)
    assert statistics.total_exposed_time == 1.0
    assert statistics.overlap_fraction == pytest.approx(0.75)


def test_averages_and_ratios_are_over_all_steps() -> None:
    statistics = SyncStatistics()
    for sent, plain, seconds in ((100, 400, 1.0), (100, 380, 3.0)):
        record = StepRecord(
            intervals=[(0.0, seconds)],
            traffic=SyncTraffic(payload_bytes=sent, bandwidth=80.0),
            bytes_uncompressed=plain,
        )
        record.add_to(statistics)
    assert statistics.average_sync_time_ms == 2000.0
    assert statistics.compression_ratio_achieved == pytest.approx(3.9)
    assert statistics.communication_efficiency == pytest.approx(200 / (4.0 * 100.0))


def test_no_step_gives_no_figures() -> None:
    statistics = SyncStatistics()
    statistics.update_average_sync_time()
    assert statistics.average_sync_time_ms == 0.0
    assert statistics.compression_ratio_achieved == 1.0
    assert statistics.overlap_fraction == 0.0


def test_efficiency_is_that_of_the_best_rate_that_was_measured() -> None:
    """In operations, by all of them together in a step, or before; whatever was built in."""
    statistics = SyncStatistics()
    assert statistics.communication_efficiency == 1.0
    for seconds, bandwidth, efficiency in (
        (2.0, 80.0, 100 / (2 * 80)),
        (1.0, 80.0, 200 / (3 * 100)),
        (1.0, 400.0, 300 / (4 * 400)),
    ):
        traffic = SyncTraffic(payload_bytes=100, bandwidth=bandwidth)
        StepRecord(intervals=[(0.0, seconds)], traffic=traffic).add_to(statistics)
        assert statistics.communication_efficiency == pytest.approx(efficiency)
    assert statistics.measured_bandwidth == 400.0
