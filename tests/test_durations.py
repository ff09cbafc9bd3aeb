"""``--durations-file`` stores what files of tests take, so that a difference can be read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.durations import SELECTING, SHOWN, Durations, changes, pytest_configure

ROOT = Path(__file__).parents[1]
STORED = {"test_gone.py": 1.0, "test_one.py": 70.5, "test_two.py": 2.0}


def report(test: str, seconds: float, when: str = "call") -> pytest.TestReport:
    location = (test.partition("::")[0], 1, test)
    return pytest.TestReport(test, location, {}, "passed", None, when, duration=seconds)  # type: ignore[arg-type]


@pytest.mark.process
def test_files_that_were_run_are_stored_and_the_others_keep_what_they_had(tmp_path: Path) -> None:
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps(STORED))
    (tmp_path / "test_one.py").write_text("def test_fails():\n    assert False\n")
    (tmp_path / "test_two.py").write_text("")
    command = [sys.executable, "-m", "pytest", "-p", "tests.durations", "-p", "no:cacheprovider", "-n", "1"]
    done = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", tmp_path, f"--durations-file={stored}", "test_one.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(stored.read_text())
    assert sorted(found) == ["test_one.py", "test_two.py"]
    assert found["test_two.py"] == 2.0
    assert re.search(r"^ +\d+\.\d s +-\d+\.\d  test_one\.py$", done.stdout, re.MULTILINE), done.stdout


def test_a_file_is_the_sum_of_its_tests_with_their_fixtures(tmp_path: Path) -> None:
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).touch()
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps(STORED))
    durations = Durations(stored, tmp_path)
    durations.pytest_runtest_logreport(report("test_one.py::test_b", 0.5, "setup"))
    durations.pytest_runtest_logreport(report("test_one.py::test_a[1::2]", 0.74))
    durations.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert json.loads(stored.read_text()) == STORED, "a part of a session says nothing of a file"
    durations.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    assert stored.read_text() == '{\n  "test_one.py": 1.2,\n  "test_two.py": 2.0\n}\n'


def test_the_slowest_are_shown_with_what_has_changed() -> None:
    after = {f"test_{number:02}.py": float(number) for number in range(SHOWN + 1)}
    lines = changes({"test_30.py": 31.5}, after)
    assert lines[:2] == ["   30.0 s     -1.5  test_30.py", "   29.0 s      new  test_29.py"]
    assert len(lines) == SHOWN


@pytest.mark.parametrize(("option", "given"), SELECTING.items())
def test_a_choice_among_the_tests_of_a_file_is_refused(option: str, given: str) -> None:
    options = {"durations_file": "stored.json", given: True}
    config: Any = SimpleNamespace(getoption=lambda name, default=None: options.get(name, default))
    with pytest.raises(pytest.UsageError, match=f"stores what whole files take: leave out {option}$"):
        pytest_configure(config)
