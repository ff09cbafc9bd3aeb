"""Predicted times of each codec, and the choice among them."""

from __future__ import annotations

import pytest

from asyncpar.errors import UsageError
from asyncpar.gradsync.prediction import CodecSpeed, LinkSpeed, Measured, Prediction, pick, predict

NONE = CodecSpeed(name="none", value_bytes=4.0, encode=4e9, decode=6e9)
BF16 = CodecSpeed(name="bf16", value_bytes=2.0, encode=3e9, decode=6e9)
INT8 = CodecSpeed(name="int8", value_bytes=1.004, encode=2.5e9, decode=6e9)
INT4 = CodecSpeed(name="int4", value_bytes=0.516, encode=2e9, decode=4e9)
CODECS = (NONE, BF16, INT8, INT4)
COUNT = 6_250_000


def gigabits(speed: float, *, latency: float = 50e-6) -> LinkSpeed:
    return LinkSpeed(latency=latency, bandwidth=speed * 1e9 / 8)


def measured(link: LinkSpeed, *, ranks: int = 2) -> Measured:
    return Measured(ranks=ranks, link=link, codecs=CODECS)


def test_what_is_sent_is_that_of_an_all_reduce_of_least_traffic() -> None:
    two = predict(NONE, gigabits(1.0), ranks=2, count=COUNT)
    assert two.sent == pytest.approx(25e6)
    assert predict(NONE, gigabits(1.0), ranks=4, count=COUNT).sent == pytest.approx(1.5 * two.sent)
    assert two.wire == pytest.approx(0.2, rel=1e-2)


def test_the_longer_of_wire_and_compute_counts_whole() -> None:
    assert Prediction(name="x", sent=1.0, wire=0.8, compute=0.08).seconds == pytest.approx(0.81)
    assert Prediction(name="x", sent=1.0, wire=0.08, compute=0.8).seconds == pytest.approx(0.81)


@pytest.mark.parametrize(
    ("speed", "chosen"), [(0.1, "int4"), (1.0, "int4"), (3.5, "int8"), (6.0, "bf16"), (40.0, "none")]
)
def test_the_faster_the_link_the_less_is_lost(speed: float, chosen: str) -> None:
    assert measured(gigabits(speed)).choose(COUNT) == chosen


def test_small_gradients_are_sent_as_they_are() -> None:
    assert measured(gigabits(1.0, latency=1e-3)).choose(1000) == "none"


def test_a_codec_is_not_picked_for_less_than_a_fifth() -> None:
    def taking(name: str, seconds: float) -> Prediction:
        return Prediction(name=name, sent=1.0, wire=seconds, compute=1e-12)

    assert pick([taking("none", 1.19), taking("bf16", 1.0)]) == "none"
    assert pick([taking("none", 1.21), taking("bf16", 1.0)]) == "bf16"
    assert pick([taking("none", 1.3), taking("bf16", 1.1), taking("int8", 1.0)]) == "bf16"
    assert pick([taking("none", 1.0), taking("bf16", 2.0), taking("int8", 1.9)]) == "none"


def test_there_must_be_something_to_pick_from() -> None:
    with pytest.raises(UsageError, match="predictions: expected at least one"):
        pick([])


def test_the_table_shows_every_codec_and_marks_the_choice() -> None:
    lines = measured(gigabits(1.0)).table(COUNT).splitlines()
    assert lines[0] == "2 hosts, 1000 Mbit/s, 50 us:"
    assert [line.split()[0] for line in lines[2:]] == ["none", "bf16", "int8", "int4*"]


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("inf"), float("nan")])
def test_figures_must_be_positive_and_finite(bandwidth: float) -> None:
    with pytest.raises(UsageError, match="bandwidth: expected a positive number"):
        LinkSpeed(latency=1e-6, bandwidth=bandwidth)
