"""scripts/bench/chaos/chaos_peers.py: how it reads what ranks write, and what it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from scripts.bench.chaos.chaos_peers import Job, main
from tests.bench.refusals import refusal_of


def job(folder: Path) -> Job:
    options = argparse.Namespace(peer="torchrun", environments=folder, ranks=2, faults=1, every=2)
    return Job(options, folder)


def test_steps_are_read_from_whole_lines(tmp_path: Path) -> None:
    lines = [{"kind": "start", "pid": 1, "time": 0.0, "step": 0}, {"kind": "step", "step": 3, "time": 1.5}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "rank0.jsonl").write_text(text + '{"kind": "step", "st')
    (tmp_path / "rank1.jsonl").write_text(json.dumps({"kind": "step", "step": 3, "time": 1.25}) + "\n")
    found = job(tmp_path)
    assert found.position() == 3
    assert found.wait_for(3) == 1.25
    assert {line["rank"] for line in found.lines()} == {"rank0", "rank1"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["torchrun", "--faults", "0"], "at least 1"),
        (["torchrun", "--environments", "/nowhere"], "give --install"),
        (["horovod"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_reported(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = refusal_of(main, arguments, capsys)
    assert code != 0
    assert text in printed
