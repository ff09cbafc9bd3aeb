"""The example of a run that is killed and goes on with another number of ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program_host import ProgramHost

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "train_resume.py"
LINE = re.compile(r"step (\d+) on (\d) ranks, from (\d+): loss ([0-9.]+)")
pytestmark = pytest.mark.process


def start(ranks: int, *arguments: object, steps: int = 200) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", str(ranks), str(EXAMPLE)]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"STEPS": str(steps)},
    )


def test_a_killed_run_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    first = start(3, folder, steps=100_000)
    assert first.stdout is not None
    while (told := LINE.match(first.stdout.readline())) is None or int(told[1]) < 20:
        assert first.poll() is None
    first.send_signal(signal.SIGKILL)  # its ranks end with it
    first.communicate(timeout=50)
    second = start(2, folder, steps=10 * (int(told[1]) // 10 + 8))
    output, errors = second.communicate(timeout=50)
    assert second.returncode == 0, errors
    lines = LINE.findall(output)
    assert lines
    assert all(ranks == "2" and int(origin) >= int(told[1]) - 10 for _, ranks, origin, _ in lines)
    assert float(lines[-1][3]) < 1.0


@pytest.mark.parametrize(("arguments", "what"), [(["saved"], "at least 2 ranks"), ([], "a folder")])
def test_what_is_wrong_is_one_line(arguments: list[str], what: str, tmp_path: Path, host: ProgramHost) -> None:
    done = host.run(EXAMPLE, *arguments, home=tmp_path, environment=os.environ)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"train_resume: expected {what}")
