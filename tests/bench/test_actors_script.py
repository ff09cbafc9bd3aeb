"""scripts/bench/compare/actors.py as people run it: small, and with peers that are stand-ins."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.compare.actors import main
from tests.bench.refusals import refusal_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "compare" / "actors.py"
SMALL = ("--rounds", "1", "--budget", "0.02", "--sizes", "1K", "--idle", "20", "--first", "1000")
ASK = '{"figure": "ask", "seconds": %s, "p99": 1.0, "calls": 1, "wrong": %d}'


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def make_peer(root: Path, name: str, body: str) -> None:
    """A Python that knows a version, and measures by doing ``body``."""
    path = root / name / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo 2.0; else {body}; fi\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def document(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text())
    return read


@pytest.mark.soak
@pytest.mark.process
def test_without_peers_our_own_figures_are_shown(tmp_path: Path) -> None:
    done = run(*SMALL, "--soak", "1000", "--envs", tmp_path / "none", "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    for peer in ("xoscar", "Ray", "Monarch"):
        assert f"{peer} is left out: not in {tmp_path / 'none'}" in done.stderr
    for shown in (
        "ask",
        "asks, 100 under way",
        "asks, 1,000 under way",
        "first messages",
        "1 KiB array",
        "ask in the process",
        "20 idle actors",
        "caller holds",
    ):
        assert shown in done.stdout
    written = document(tmp_path / "figures.json")
    assert written["wrong"] == 0
    assert [sample["asks"] for sample in written["records"]["soak"]["asyncpar"]] == [100, 500, 1000]


@pytest.mark.soak
@pytest.mark.process
def test_peers_stand_beside_us_with_ratios_and_verdicts(tmp_path: Path) -> None:
    make_peer(tmp_path, "xoscar", f"echo '{ASK % (1000.0, 0)}'")
    make_peer(tmp_path, "ray", f"echo '{ASK % (1e-9, 0)}'")
    options = ("--figures", "ask", "--envs", tmp_path, "--peers", "xoscar,ray", "--json", tmp_path / "figures.json")
    done = run(*SMALL, *options)
    assert done.returncode == 0, done.stderr
    assert "xoscar (xoscar 2.0), Ray (ray 2.0)" in done.stdout
    written = document(tmp_path / "figures.json")
    assert written["ratios"]["ask"]["xoscar"] > 1 > written["ratios"]["ask"]["ray"]
    assert [(one["what"], one["ok"]) for one in written["verdicts"]] == [("ask, against xoscar", True)]


@pytest.mark.soak
@pytest.mark.process
def test_wrong_answers_and_failures_of_a_peer_are_reported(tmp_path: Path) -> None:
    make_peer(tmp_path, "xoscar", f"echo '{ASK % (1.0, 3)}'")
    make_peer(tmp_path, "monarch", "echo no luck >&2; exit 3")
    done = run(*SMALL, "--figures", "ask", "--envs", tmp_path, "--peers", "xoscar,monarch")
    assert done.returncode == 1
    assert "wrong answers: 3" in done.stderr
    assert "no luck" in done.stderr
    assert "| ask " in done.stdout


@pytest.mark.soak
@pytest.mark.process
def test_a_peer_that_cannot_be_installed_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of the environments")
    done = run(*SMALL, "--figures", "ask", "--envs", tmp_path / "file", "--peers", "xoscar", "--install")
    assert done.returncode == 0, done.stderr
    assert "xoscar cannot be installed here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--figures", "juggle"),
            "--figures: expected some of ask, concurrent, concurrent 1000, first, array, local, idle, got 'juggle'",
        ),
        (("--peers", "gloo"), "--peers: expected some of xoscar, ray, monarch, got 'gloo'"),
        (("--sizes", "4T"), "--sizes: expected a size"),
        (("--rounds", "0"), "expected positive numbers"),
        (("--soak", "5"), "--soak: expected at least 1000 asks, got 5"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = refusal_of(main, options, capsys)
    assert code == 2
    assert message in printed
