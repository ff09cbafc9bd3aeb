"""Settings of a supervisor: accepted and refused values."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.actors.supervision.policy import Backoff, Intensity, Restart, Strategy, parse_restart, parse_strategy
from asyncpar.errors import UsageError


@pytest.mark.parametrize("word", ["one_for_one", "one_for_all", "rest_for_one"])
def test_a_strategy_may_be_given_as_a_word(word: str) -> None:
    assert parse_strategy(word) is Strategy(word)
    assert parse_strategy(Strategy(word)) is Strategy(word)


@pytest.mark.parametrize("word", ["permanent", "transient", "temporary"])
def test_a_kind_of_child_may_be_given_as_a_word(word: str) -> None:
    assert parse_restart(word) is Restart(word)
    assert parse_restart(Restart(word)) is Restart(word)


@pytest.mark.parametrize("word", ["one for all", "ONE_FOR_ALL", "", 1, None, ["one_for_all"]])
def test_another_strategy_is_refused_with_the_allowed_words(word: Any) -> None:
    with pytest.raises(UsageError, match=r"strategy: expected one of 'one_for_one', 'one_for_all', 'rest_for_one'"):
        parse_strategy(word)


@pytest.mark.parametrize("word", ["always", True, Strategy.ONE_FOR_ALL])
def test_another_kind_of_child_is_refused_with_the_allowed_words(word: Any) -> None:
    with pytest.raises(UsageError, match=r"restart: expected one of 'permanent', 'transient', 'temporary', got"):
        parse_restart(word)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("restarts", -1),
        ("restarts", 1.5),
        ("restarts", True),
        ("period", 0.0),
        ("period", -1.0),
        ("period", math.nan),
        ("period", "5"),
    ],
)
def test_an_impossible_intensity_is_refused_by_name(argument: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{argument}: expected .*, got {value!r}"):
        Intensity(**{argument: value})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("initial", -0.1),
        ("initial", math.inf),
        ("initial", math.nan),
        ("initial", None),
        ("factor", 0.5),
        ("factor", math.inf),
        ("factor", False),
        ("maximum", -1.0),
        ("maximum", math.inf),
        ("maximum", math.nan),
        ("jitter", 1.1),
        ("jitter", -0.1),
        ("jitter", "some"),
        ("reset_after", -1.0),
        ("reset_after", math.nan),
    ],
)
def test_an_impossible_backoff_is_refused_by_name(argument: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{argument}: expected .*, got {value!r}"):
        Backoff(**{argument: value})


def test_a_maximum_below_the_first_delay_is_refused() -> None:
    with pytest.raises(UsageError, match=r"maximum: expected at least initial = 2\.0 and finite, got 1\.0"):
        Backoff(initial=2.0, maximum=1.0)


def test_the_default_backoff_is_none() -> None:
    assert [Backoff().delay(failures, draw=0.5) for failures in (1, 2, 10_000)] == [0.0, 0.0, 0.0]


def test_delays_grow_by_the_factor_up_to_the_maximum() -> None:
    backoff = Backoff(initial=1.0, factor=3.0, maximum=20.0)
    assert [backoff.delay(failures, draw=0.0) for failures in range(1, 6)] == [1.0, 3.0, 9.0, 20.0, 20.0]


def test_a_factor_of_one_keeps_the_delay() -> None:
    assert Backoff(initial=2.0, factor=1.0).delay(1_000, draw=0.0) == 2.0


def test_jitter_takes_away_its_part_at_most() -> None:
    backoff = Backoff(initial=8.0, jitter=0.25)
    assert [backoff.delay(1, draw=draw) for draw in (0.0, 0.5, 1.0)] == [8.0, 7.0, 6.0]


@given(
    initial=st.floats(0.0, 1e6),
    factor=st.floats(1.0, 1e6),
    extra=st.floats(0.0, 1e6),
    jitter=st.floats(0.0, 1.0),
    failures=st.integers(1, 10**9),
    draw=st.floats(0.0, 1.0),
)
def test_a_delay_never_leaves_its_bounds(
    initial: float, factor: float, extra: float, jitter: float, failures: int, draw: float
) -> None:
    backoff = Backoff(initial=initial, factor=factor, maximum=initial + extra, jitter=jitter)
    assert 0.0 <= backoff.delay(failures, draw=draw) <= backoff.maximum
    assert backoff.delay(failures, draw=0.0) <= backoff.delay(failures + 1, draw=0.0)
