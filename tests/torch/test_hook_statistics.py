"""Figures of the gradient hook: what they add up."""

from __future__ import annotations

import re
from typing import Any

from asyncpar.gradsync.statistics import SyncTraffic
from asyncpar.gradsync.step import RunTimes
from asyncpar.torch.hook.state import HookStatistics, HookTally, StepTally


def add_step(tally: HookTally, *intervals: tuple[float, float], sent: int, **figures: Any) -> None:
    step = StepTally(**figures)
    for interval in intervals:
        step.add(interval, RunTimes(sending=0.125, exchanging=0.25, receiving=0.5))
    tally.add_step(step, SyncTraffic(payload_bytes=sent))


def test_steps_add_up_and_time_under_way_counts_once() -> None:
    tally = HookTally(codec="int8", ranks=2)
    add_step(tally, (1.0, 3.0), (2.0, 4.0), (6.0, 7.0), sent=100, compressed=2, not_finite=1, bytes_uncompressed=300)
    tally.add_wait(1.5)
    add_step(tally, (8.0, 9.0), sent=150, compressed=1, bytes_uncompressed=200)
    tally.add_wait(0.25)
    assert tally.statistics(residual_norm=7.0) == HookStatistics(
        codec="int8",
        ranks=2,
        steps=2,
        buckets=4,
        buckets_compressed=3,
        buckets_not_finite=1,
        bytes_sent=150,
        bytes_uncompressed=500,
        encode=4 * 0.125,
        exchange=4 * 0.25,
        decode=4 * 0.5,
        under_way=3.0 + 1.0 + 1.0,
        exposed=1.75,
        residual_norm=7.0,
    )


def test_after_a_reset_nothing_of_before_counts() -> None:
    tally = HookTally(codec="int8", ranks=2)
    add_step(tally, (1.0, 2.0), sent=100, bytes_uncompressed=400)
    tally.add_wait(1.0)
    assert tally.statistics(residual_norm=0.0).compression_ratio == 4.0
    tally.reset()
    assert tally.statistics(residual_norm=0.0) == HookStatistics(codec="int8", ranks=2)
    assert tally.statistics(residual_norm=0.0).compression_ratio == 1.0
    add_step(tally, (3.0, 4.0), sent=130, bytes_uncompressed=60)
    again = tally.statistics(residual_norm=0.0)
    assert (again.steps, again.bytes_sent, again.compression_ratio, again.exposed) == (1, 30, 2.0, 0.0)


def test_what_people_read_has_each_figure_in_its_place() -> None:
    tally = HookTally(codec="topk:0.1", ranks=4)
    add_step(tally, (1.0, 4.0), sent=2_500, compressed=1, not_finite=1, bytes_uncompressed=5_000_000)
    tally.add_wait(2.0)
    statistics = tally.statistics(residual_norm=0.0)
    figures = {
        "gradient hook": "codec topk:0.1, 4 ranks",
        "steps": "1",
        "buckets": "1",
        "buckets compressed": "1",
        "buckets not finite": "1",
        "sent": "2.5 KB",
        "without a codec": "5 MB",
        "compression": "2000 x",
        "encode": "125 ms",
        "exchange": "250 ms",
        "decode": "500 ms",
        "under way": "3 s",
        "backward waited": "2 s",
        "residual norm": "0",
    }
    lines = [tuple(re.split(r"  +", line)) for line in str(statistics).splitlines()]
    assert lines == list(figures.items())
    assert repr(statistics) == str(statistics)
    assert statistics._repr_html_().count("<tr>") == len(lines)  # the name that notebooks call
