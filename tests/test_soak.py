"""``--soak`` runs what the suite leaves out by default."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = """
import pytest
from tests.soak import chosen

@pytest.mark.parametrize("seed", chosen([1], soak=[1, 2, 3]))
def test_sampled(seed): ...

@pytest.mark.soak
def test_long(): ...

@pytest.mark.parametrize("size", [1, pytest.param(9, marks=pytest.mark.soak)])
def test_marked(size): ...
"""


def collect(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    settings = ("-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *settings, *options, str(path)]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.process
def test_what_takes_long_runs_with_soak_only(tmp_path: Path) -> None:
    path = tmp_path / "test_cases.py"
    path.write_text(CASES)
    found = {
        options: [line.partition("::")[2] for line in collect(path, *options).stdout.splitlines() if "::" in line]
        for options in ((), ("--soak",))
    }
    assert found[()] == ["test_sampled[1]", "test_marked[1]"]
    sampled = [f"test_sampled[{seed}]" for seed in (1, 2, 3)]
    assert found[("--soak",)] == [*sampled, "test_long", "test_marked[1]", "test_marked[9]"]
    refused = collect(path, "--soak", "--quick")
    assert refused.returncode == 4
    assert "leave one of them out" in refused.stderr
