"""Jobs of scripts/bench, round after round, and what is written at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench.environments import JobFailedError
from scripts.bench.rounds import Job, play, report
from scripts.bench.samples import Figures, Record


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
