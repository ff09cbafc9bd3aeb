"""The example of elastic actors: alone, and with a rank that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program_host import ProgramHost

EXAMPLE = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "elastic_actors.py"
LINE = re.compile(r"^(\[\S+\] )?pid (\d+): step (\d+), ticket (\d+)$")
HOME = re.compile(r"^(\[\S+\] )?tickets: ")
pytestmark = pytest.mark.process


def test_the_example_runs_alone(host: ProgramHost, tmp_path: Path) -> None:
    done = host.run(EXAMPLE, "3", home=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr
    assert [match[4] for match in map(LINE.search, done.stdout.splitlines()) if match] == ["1", "2", "3"]
    assert done.stdout.splitlines()[-1] == "done: weight 3"


@pytest.mark.soak
@pytest.mark.timeout(150)
def test_the_example_goes_on_when_the_rank_of_the_actor_is_killed(tmp_path: Path) -> None:
    launch = ["-m", "asyncpar", "launch", "--nproc-per-node", "2", "--elastic", "ranks", "--max-restarts", "3"]
    command = [sys.executable, *launch, str(EXAMPLE), "40"]
    killed, home, tickets, lines = None, None, list[int](), list[str]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            home = home or HOME.search(line)
            match = LINE.search(line.rstrip())
            if match is None:
                continue
            tickets.append(int(match[4]))
            if killed is None and home is not None and match[1] == home[1] and int(match[3]) == 5:
                killed = int(match[2])
                os.kill(killed, signal.SIGKILL)
    text = "".join(lines)
    assert job.returncode == 0, text
    assert killed is not None
    assert "was killed by SIGKILL" in text
    assert "done: weight 40" in text
    assert len(set(tickets)) == len(tickets), "no number was given twice"
    assert max(tickets) <= 2 * 40 + 30, text  # those that were drawn in steps which came again
