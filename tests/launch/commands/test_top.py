"""`asyncpar top` shows a job again and again until it ends, in place in a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.launch.commands.test_look_at_job import LIMIT, command, start

pytestmark = pytest.mark.process


def top(launcher: Any, *arguments: str, output: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    environment = os.environ | {"TMPDIR": str(launcher.temporary), "TERM": "xterm", "COLUMNS": "70", "LINES": "20"}
    environment.pop("XDG_RUNTIME_DIR", None)
    return subprocess.Popen(
        [sys.executable, "-m", "asyncpar", "top", *arguments], env=environment, stdout=output, stderr=subprocess.PIPE
    )


def test_without_a_terminal_one_picture_follows_the_other_until_the_job_ends(launcher: Any) -> None:
    job = start(launcher, 2)
    watching, following = top(launcher, "--every", "0.1"), top(launcher, "--every", "0.1", "--json", "look")
    assert watching.stdout is not None
    first = watching.stdout.readline().decode()
    assert first.startswith("job look: ")
    assert "2 ranks on 1 host" in first
    time.sleep(0.5)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=LIMIT)
    rest, errors = watching.communicate(timeout=LIMIT)
    assert (watching.returncode, errors) == (0, b"")
    assert rest.decode().count("job look: ") >= 1
    content, _ = following.communicate(timeout=LIMIT)
    assert {json.loads(line)["job"] for line in content.splitlines()} == {"look"}


def test_in_a_terminal_the_picture_stays_in_place_and_ctrl_c_ends_it(launcher: Any) -> None:
    job = start(launcher, 2)
    ours, theirs = pty.openpty()
    watching = top(launcher, "--every", "0.1", output=theirs)
    os.close(theirs)
    shown = b""
    limit = time.monotonic() + LIMIT
    while shown.count(b"job look") < 2:
        assert time.monotonic() < limit, shown
        shown += os.read(ours, 65536)
    assert b"\x1b[?1049h" in shown, "another screen"
    watching.send_signal(signal.SIGINT)
    while b"\x1b[?1049l" not in shown:
        shown += os.read(ours, 65536)
    watching.communicate(timeout=LIMIT)
    assert watching.returncode == 0
    os.close(ours)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=LIMIT)


def test_without_a_job_one_line_says_so(launcher: Any) -> None:
    done = command(launcher, "top")
    assert done.returncode == 1
    assert done.stderr.startswith("asyncpar top: no job of yours runs on this host")
    assert done.stdout == ""
