"""The default suite finds a defect in each package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.breakages.planted import PLANTED, Planted

ROOT = Path(__file__).resolve().parents[2]


def packages() -> set[str]:
    return {path.parent.name for path in (ROOT / "asyncpar").glob("*/__init__.py")}


def test_there_is_one_in_each_package() -> None:
    elsewhere = {"_proto", "bench", "torch", "v1"}  # generated; measured by scripts; a suite of its own; generated
    assert packages() - elsewhere == {planted.module.partition("/")[0] for planted in PLANTED}


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_it_can_be_planted(planted: Planted) -> None:
    assert (ROOT / "asyncpar" / planted.module).read_text().count(planted.right) == 1
    assert all((ROOT / place).exists() for place in planted.found_by.split())


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_it_is_found(planted: Planted, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "asyncpar", tmp_path / "asyncpar", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "docs", "scripts", "proto", "pyproject.toml", "README.md", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    module = tmp_path / "asyncpar" / planted.module
    module.write_text(module.read_text().replace(planted.right, planted.wrong))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header"]
    found = subprocess.run(
        [*command, *planted.found_by.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == pytest.ExitCode.TESTS_FAILED, found.stdout
    assert "1 failed" in found.stdout, found.stdout
