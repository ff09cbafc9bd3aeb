"""Jobs of scripts/bench, round after round, their figures, and what is written at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench.jobs import JobFailedError
from scripts.bench.rounds import Figures, Job, Record, Samples, play, report
from tests.bench.figures import figures_of


def fail() -> Iterator[Record]:
    yield {"what": "half"}
    raise JobFailedError("it broke")


def test_a_job_that_fails_is_reported_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    figures, failures = Figures(), list[str]()
    good = Job(title="good", run=lambda: [{"what": "call", "side": "mine"}], marks={"side": "theirs"})
    play([Job(title="bad", run=fail), good], figures, failures, turn=1, rounds=3)
    assert failures == ["bad: it broke"]
    assert figures.records == [(1, {"what": "call", "side": "theirs"})]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.partition(" (load")[0] for line in printed.err.splitlines()] == [
        "round 2 of 3: bad",
        "bad: it broke",
        "round 2 of 3: good",
    ]


@pytest.mark.parametrize(("failures", "faults", "code"), [([], [], 0), (["bad"], [], 1), ([], ["wrong"], 1)])
def test_the_document_has_everything_and_the_status_shows_failures(
    failures: list[str], faults: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, file = Figures([(2, {"what": "call"})]), tmp_path / "figures.json"
    assert report(figures, file, description="here", failures=failures, faults=faults, verdicts=["ok"]) == code
    assert json.loads(file.read_text()) == {
        "description": "here",
        "records": [{"round": 2, "what": "call"}],
        "verdicts": ["ok"],
        "failures": failures,
        "faults": faults,
    }
    assert capsys.readouterr().err.splitlines() == faults
    assert report(figures, None, description="here", failures=failures, faults=faults) == code


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
