"""Log messages about refused connections."""

from __future__ import annotations

from asyncpar.net.transport.refusals import LINES_PER_PERIOD, PERIOD_SECONDS, Refusals


def test_each_of_a_few_refusals_is_reported() -> None:
    refusals = Refusals()
    for turn in range(100):
        assert refusals.line(OSError("why"), now=turn * PERIOD_SECONDS) == "a connection was refused: why"


def test_a_flood_is_reported_in_a_few_lines_and_a_number() -> None:
    refusals = Refusals()
    lines = [refusals.line(OSError("why"), now=1.0) for _ in range(1000)]
    assert sum(line is not None for line in lines) == LINES_PER_PERIOD
    later = refusals.line(OSError("again"), now=1.0 + PERIOD_SECONDS)
    assert later == f"a connection was refused: again (and {1000 - LINES_PER_PERIOD} more before it)"
    assert refusals.line(OSError("again"), now=1.0 + PERIOD_SECONDS) == "a connection was refused: again"
