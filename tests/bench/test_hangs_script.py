"""The script of planted hangs counts the verdicts of torch's analyzer that name culprit and cause."""

from __future__ import annotations

import pytest

from asyncpar.observe.explain import HangCause
from scripts.bench.chaos.hangs import judge
from tests.observe.planted import Planted, absent


@pytest.mark.parametrize(
    ("verdict", "cause", "culprits", "expected"),
    [
        ("missing ranks: {2}", HangCause.ABSENT, (2,), (True, True)),
        ("missing ranks: {2}", HangCause.SLEEPING, (2,), (True, False)),
        ("missing ranks: {1, 2}", HangCause.ABSENT, (1, 2), (True, True)),
        ("missing ranks: {1, 2}", HangCause.ABSENT, (2,), (False, False)),
        ("Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH, ...", HangCause.OTHER_OPERATION, (2,), (True, True)),
        ("Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH, ...", HangCause.ORDER, (2,), (True, False)),
        ("Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH, ...", HangCause.SHAPE, (2,), (False, False)),
        ("nothing wrong", HangCause.ROOT, (2,), (False, False)),
    ],
)
def test_a_verdict_counts_where_it_names_the_culprits_and_the_cause(
    verdict: str, cause: HangCause, culprits: tuple[int, ...], expected: tuple[bool, bool]
) -> None:
    assert judge(verdict, Planted(absent, cause, culprits)) == expected
