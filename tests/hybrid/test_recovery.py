"""Ranks choose a recovery from the states of all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from asyncpar.errors import UsageError
from asyncpar.hybrid.recovery import Intent, RankStatus, RecoveryPlan, StepTaken, plan_recovery
from asyncpar.zero.errors import StepTorn

FINE = RankStatus(
    intent=Intent.TRAIN_STEP,
    rate=0.1,
    attempt=4,
    steps=7,
    last_norm=2.5,
    last_rate=0.2,
    has_failed=False,
    was_taken=False,
    is_ready=False,
    is_torn=False,
)


def among(**changes: Any) -> RecoveryPlan:
    """Settle three ranks, of which the second stands elsewhere."""
    return plan_recovery([FINE, replace(FINE, **changes), FINE])


@pytest.mark.parametrize("change", [{}, {"intent": Intent.LOAD}, {"last_norm": math.inf}, {"is_torn": True}])
def test_a_row_says_all(change: dict[str, Any]) -> None:
    status = replace(FINE, **change)
    assert RankStatus.of_row(status.row()) == status


def test_ranks_that_stand_alike_go_on() -> None:
    plan = among()
    assert (plan.attempt, plan.must_resume, plan.error) == (4, False, None)


def test_a_failure_on_one_begins_another_attempt_on_all() -> None:
    plan = among(has_failed=True, attempt=2)
    assert (plan.attempt, plan.must_resume, plan.error) == (5, True, None)


def test_who_is_a_step_behind_takes_it_as_the_others_have() -> None:
    plan = among(has_failed=True, steps=6, is_ready=True, last_norm=1.0, last_rate=9.0)
    assert isinstance(plan.error, StepTaken)
    assert (plan.ahead.steps, plan.ahead.last_norm, plan.ahead.last_rate) == (7, 2.5, 0.2)
    assert not plan.was_taken, "it has been reported now"


@pytest.mark.parametrize("intent", [intent for intent in Intent if not intent.trains and intent is not Intent.LOAD])
def test_what_does_not_train_leaves_the_news_for_later(intent: Intent) -> None:
    plan = plan_recovery([replace(FINE, intent=intent), replace(FINE, intent=intent, was_taken=True)])
    assert plan.error is None
    assert plan.was_taken


def test_a_step_that_failed_everywhere_after_it_was_taken_is_told() -> None:
    failed = replace(FINE, has_failed=True, was_taken=True)
    assert isinstance(plan_recovery([failed, failed]).error, StepTaken)


@pytest.mark.parametrize("change", [{"steps": 5, "is_ready": True}, {"steps": 6}, {"is_torn": True}])
def test_what_cannot_be_made_whole_needs_a_checkpoint(change: dict[str, Any]) -> None:
    error = among(has_failed=True, **change).error
    assert isinstance(error, StepTorn)
    assert error.rank == 1
    loading = [replace(one, intent=Intent.LOAD) for one in (FINE, replace(FINE, has_failed=True, **change))]
    assert plan_recovery(loading).error is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"intent": Intent.SAVE}, "train_step: expected it to be called on all ranks, got save on rank 1"),
        ({"rate": 0.3}, "expected the same on all ranks, got 0.1 on rank 0, 0.3 on rank 1"),
        ({"rate": math.nan}, "learning_rate: expected a finite number of 0 or more, got nan on rank 1"),
        ({"rate": -1.0}, "got -1.0 on rank 1"),
    ],
)
def test_ranks_that_are_about_to_do_different_things_are_told(change: dict[str, Any], text: str) -> None:
    error = among(**change).error
    assert isinstance(error, UsageError)
    assert text in str(error)
