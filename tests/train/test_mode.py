"""Modes of training have names, and wrong ones are answered with the right ones."""

from __future__ import annotations

import pytest

from asyncpar.errors import UsageError
from asyncpar.train import ModeKind, TrainingMode, parse_mode


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("sync", TrainingMode()),
        ("async", TrainingMode(kind=ModeKind.ASYNC)),
        ("stale:3", TrainingMode(kind=ModeKind.STALE, staleness=3)),
        ("local:8", TrainingMode(kind=ModeKind.LOCAL, every=8)),
        ("diloco:20", TrainingMode(kind=ModeKind.DILOCO, every=20, learning_rate=0.7, momentum=0.9)),
        ("diloco:20:0.5", TrainingMode(kind=ModeKind.DILOCO, every=20, learning_rate=0.5, momentum=0.9)),
        ("diloco:20:0.5:0.1", TrainingMode(kind=ModeKind.DILOCO, every=20, learning_rate=0.5, momentum=0.1)),
        ("hierarchical:4", TrainingMode(kind=ModeKind.HIERARCHICAL, every=4)),
        ("hierarchical:4:0.7:0.9", TrainingMode(kind=ModeKind.HIERARCHICAL, every=4, learning_rate=0.7, momentum=0.9)),
    ],
)
def test_modes_are_read_with_their_numbers(text: str, mode: TrainingMode) -> None:
    assert parse_mode(text) == mode


@pytest.mark.parametrize("text", ["", "fast", "sync:2", "local", "local:x", "diloco:1:2:3:4", "stale", "local:2.5"])
def test_others_are_answered_with_what_there_is(text: str) -> None:
    with pytest.raises(UsageError, match=r"sync: expected one of sync, local:H, diloco:H\[:RATE"):
        parse_mode(text)


@pytest.mark.parametrize("text", ["local:0", "diloco:4:-1", "diloco:4:inf", "stale:0"])
def test_numbers_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="sync: expected a number of at least"):
        parse_mode(text)


def test_rounds_are_counted_up() -> None:
    assert [parse_mode("local:4").rounds(steps) for steps in (1, 4, 5)] == [1, 1, 2]
