"""`asyncpar top` shows a job again and again until it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.launch.commands.test_look_at_job import LIMIT, start

pytestmark = pytest.mark.process


def top(launcher: Any, *arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"TMPDIR": str(launcher.temporary)}
    environment.pop("XDG_RUNTIME_DIR", None)
    return subprocess.Popen(
        [sys.executable, "-m", "asyncpar", "top", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_without_a_terminal_one_picture_follows_the_other_until_the_job_ends(launcher: Any) -> None:
    job = start(launcher, 2)
    watching, following = top(launcher, "--every", "0.1"), top(launcher, "--every", "0.1", "--json", "look")
    assert watching.stdout is not None
    first = watching.stdout.readline().decode()
    assert first.startswith("job look: ")
    assert "2 ranks on 1 host" in first
    while not watching.stdout.readline().startswith(b"job look: "):
        assert watching.poll() is None
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=LIMIT)
    _, errors = watching.communicate(timeout=LIMIT)
    assert (watching.returncode, errors) == (0, b"")
    content, _ = following.communicate(timeout=LIMIT)
    assert {json.loads(line)["job"] for line in content.splitlines()} == {"look"}


def test_without_a_job_one_line_says_so(launcher: Any) -> None:
    done = launcher.look("top")
    assert done.returncode == 1
    assert done.stderr.startswith("asyncpar top: no job of yours runs on this host")
    assert done.stdout == ""
