"""The expected result of a run follows from codec and mode."""

from __future__ import annotations

import pytest

from asyncpar.train import Expectation, encoded_ratio, expect, parse_mode

SHAPES = [(200, 100), (100,)]


def of(codec: str, mode: str = "sync") -> Expectation:
    return expect(codec, parse_mode(mode), shapes=SHAPES, steps=100)


def test_without_codec_every_loss_must_be_the_same() -> None:
    assert of("none") == Expectation(every_loss=1e-5)


def test_int8_must_shrink_the_traffic_by_what_it_always_promised() -> None:
    expected = of("int8")
    assert expected.last_loss == 0.02
    assert expected.least_ratio == pytest.approx(3.8, abs=0.01)


def test_rounds_multiply_the_saving() -> None:
    alone, rounds = of("int8"), of("int8", "diloco:20")
    assert alone.least_ratio is not None
    assert rounds.least_ratio is not None
    assert rounds.least_ratio > 12 * alone.least_ratio
    assert of("none", "local:2").least_ratio == pytest.approx(2 * 0.954)


@pytest.mark.parametrize(("codec", "ratio"), [("bf16", 2.0), ("sign", 32.0), ("topk:0.01", 60.0), ("powersgd:4", 16.0)])
def test_every_codec_has_a_ratio(codec: str, ratio: float) -> None:
    assert encoded_ratio(codec, SHAPES) == pytest.approx(ratio, rel=0.35)


@pytest.mark.parametrize(("codec", "mode"), [("auto", "sync"), ("int8", "hierarchical:4")])
def test_where_the_traffic_is_not_known_beforehand_none_is_expected(codec: str, mode: str) -> None:
    assert of(codec, mode).least_ratio is None
    assert of(codec, mode).last_loss is not None
