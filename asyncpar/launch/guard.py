"""The agent's side of the reaper: whatever is registered here ends with the agent, even if it is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from asyncpar.errors import LaunchError

_REAPER = Path(__file__).with_name("reaper.py")
_PATIENCE = 5.0


class Guard:
    """A reaper process.  Registration is in the kernel's hands when a call returns; nothing is awaited."""

    def __init__(self) -> None:
        """Start the reaper.  Raises ``LaunchError`` if that is impossible."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_REAPER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise LaunchError(f"the reaper could not be started: {error.strerror}") from error
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def add_group(self, group: int) -> None:
        """Register the process group ``group``.  Raises ``LaunchError`` when the reaper is gone."""
        self._tell(b"+%d\n" % group)

    def forget_group(self, group: int) -> None:
        """The group is empty; its number may be used by others from now on."""
        with contextlib.suppress(LaunchError):  # a reaper that is gone kills nobody
            self._tell(b"-%d\n" % group)

    def add_path(self, path: Path) -> None:
        """Register a file, or a directory that holds files only, for removal."""
        self._tell(b"remove " + os.fsencode(path) + b"\n")

    def close(self) -> None:
        """Have everything that is still registered ended and removed, and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: bytes) -> None:
        try:
            os.write(self._pipe, line)
        except OSError as error:
            raise LaunchError("the reaper is gone; without it ranks could outlive the launcher") from error
