"""A failed job names only log files that are there."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.soak import first

pytestmark = pytest.mark.process


@pytest.mark.parametrize("options", first(1, [(), ("--tee", "1"), ("--redirects", "2"), ("--tee", "3")]))
def test_files_that_the_last_words_name_are_there(launcher: Any, options: tuple[str, ...]) -> None:
    done = launcher.run("--log-dir", "logs", "--nproc-per-node", "2", *options, launcher.script("sys.exit(3)"))
    assert done.returncode == 3
    named = re.findall(r"\S+/attempt_\d+/\S+", done.stderr)
    for rank in ("0", "1"):
        for path in named:
            assert (launcher.directory / path.replace("RANK", rank)).exists(), done.stderr
    assert named
