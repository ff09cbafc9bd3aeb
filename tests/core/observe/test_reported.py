"""Values that a program reports."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from asyncpar.core.observe.reported import MOST_VALUES, ReportedValues, reported
from asyncpar.core.observe.reporting import Reporter
from asyncpar.errors import UsageError


def test_the_latest_of_each_name_counts() -> None:
    values = ReportedValues()
    values.take({"loss": 2.0, "lr": 1})
    values.take({"loss": np.float32(1.5)})

    assert values.values == {"loss": 1.5, "lr": 1.0}


def test_without_other_progress_reports_are_counted() -> None:
    values = ReportedValues()
    assert progress_of(values) is None

    values.take({"loss": 2.0})
    values.take({"loss": 1.0})

    assert progress_of(values) == ("reports", 2.0, None)


def test_progress_that_is_reported_counts_and_not_the_reports() -> None:
    values = ReportedValues()
    values.take({"loss": 2.0})
    values.note_progress("train", 7.0, 10.0)

    assert values.progress == ("train", 7.0, 10.0)


def progress_of(values: ReportedValues) -> object:
    return values.progress


@pytest.mark.parametrize("value", ["a lot", None, [1.0], 1j])
def test_no_number_is_refused_with_its_name(value: object) -> None:
    with pytest.raises(UsageError, match="report: loss: expected a number"):
        ReportedValues().take({"loss": value})  # type: ignore[dict-item]


def test_names_are_bounded_in_number_and_length() -> None:
    values = ReportedValues()
    values.take({f"v{number}": 0.0 for number in range(MOST_VALUES)})

    with pytest.raises(UsageError, match="at most 32 names"):
        values.take({"one more": 0.0})
    for name in ("", "x" * 61, "a\nb"):
        with pytest.raises(UsageError, match="expected names"):
            values.take({name: 0.0})
    assert len(values.values) == MOST_VALUES


def test_progress_that_is_shown_carries_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = ReportedValues()
    monkeypatch.setattr("asyncpar.core.observe.reporting.reported", fresh)
    receiver, sender = os.pipe()
    fresh.take({"loss": 2.0, "shown": 1.0})

    Reporter(sender).progress(description="train", completed=3, total=9, fields={"shown": "by the program"})

    record = json.loads(os.read(receiver, 4096))
    assert record["fields"] == {"shown": "by the program", "loss": "2"}
    assert fresh.progress == ("train", 3.0, 9.0)
    os.close(receiver)
    os.close(sender)


def test_a_process_has_one_place_for_its_values() -> None:
    import asyncpar as ap

    with pytest.raises(UsageError, match="at least one value"):
        ap.observe.report()
    ap.observe.report(loss=0.25)

    assert reported.values["loss"] == 0.25
