"""Figures by round: medians over rounds, ratios within them."""

from __future__ import annotations

from scripts.bench.samples import Samples
from tests.bench.figures import figures_of


def test_ratios_are_taken_within_rounds() -> None:
    samples = Samples()
    for turn, (ours, base) in enumerate([(1.0, 2.0), (2.0, 8.0), (9.0, 12.0)]):
        samples.add(turn, ("ours",), ours)
        samples.add(turn, ("base",), base)
    samples.add(3, ("ours",), 1000.0)  # without its like in this round
    assert samples.ratio(("ours",), ("base",)) == 0.5
    assert samples.median(("base",)) == 8.0
    assert samples.ratio(("ours",), ("other",)) is None
    assert samples.median(("other",)) is None


def test_samples_are_of_one_kind_and_of_records_that_have_the_figure() -> None:
    figures = figures_of(
        [{"what": "call", "size": 4, "seconds": 1.0}, {"what": "step", "size": 4, "seconds": 9.0}],
        [{"what": "call", "size": 4, "seconds": 2.0}, {"what": "call", "size": 8}],
    )
    assert figures.samples("call", ["size"], "seconds").rounds == {("4",): {0: 1.0, 1: 2.0}}
    assert [record["seconds"] for _, record in figures.of("step")] == [9.0]
