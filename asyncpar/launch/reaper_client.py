"""The agent's client of the reaper: registered processes and files end with the agent, even if it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import LaunchError, UsageError

_REAPER = Path(__file__).with_name("reaper.py")
_PATIENCE = 5.0
_LOOK_SECONDS = 0.25


def require_process_groups() -> None:
    """Raise ``UsageError`` on a system where ranks cannot be ended with all of their descendants."""
    if not hasattr(os, "killpg"):
        raise UsageError(
            "system: launchers and agents end ranks as groups of processes, which Linux and macOS have and "
            f"{sys.platform} has not; on Windows start them in WSL"
        )


class ReaperClient:
    """A reaper process.  A registration is in the kernel's pipe when the call returns; nothing is awaited.

    A reaper that is killed is replaced by another one, which gets all registrations: at once while ``watch`` runs,
    otherwise with the next registration.
    """

    def __init__(self) -> None:
        """Start the reaper.

        Raises ``LaunchError`` if that is impossible, and ``UsageError`` on a system without process groups.
        """
        require_process_groups()
        self._groups: set[int] = set()
        self._paths: list[Path] = []
        self._folder: Path | None = None
        self._is_closed = False
        self._process = _start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def watch(self, replaced: Callable[[], None]) -> None:
        """Replace the reaper whenever it ends, and call ``replaced``, until cancelled.

        Raises ``LaunchError`` when it cannot be replaced.
        """
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._process.poll() is not None and not self._is_closed:
                self._replace()
                replaced()

    def add_group(self, group: int) -> None:
        """Register the process group ``group``.  Raises ``LaunchError`` when there is no reaper and can be none."""
        self._groups.add(group)
        self._send(_group_line(group))

    def forget_group(self, group: int) -> None:
        """Unregister a group that is empty: its number may be reused."""
        self._groups.discard(group)
        with contextlib.suppress(LaunchError):  # a reaper that is gone kills nothing
            self._send(b"-%d\n" % group)

    def add_path(self, path: Path) -> None:
        """Register a file, or a directory that holds files only, for removal."""
        self._paths.append(path)
        self._send(_path_line(path))

    def explain(self, folder: Path) -> None:
        """Register the folder of a post-mortem, to be explained if the agent is killed."""
        self._folder = folder
        self._send(b"explain " + os.fsencode(folder) + b"\n")

    def forget_folder(self) -> None:
        """Unregister the folder: the agent explains it itself, or there is nothing to explain."""
        folder, self._folder = self._folder, None
        if folder is not None:
            with contextlib.suppress(LaunchError):
                self._send(b"-explain " + os.fsencode(folder) + b"\n")

    def close(self) -> None:
        """End and remove everything that is still registered, and wait for that."""
        self._is_closed = True
        if self._process.poll() is not None:
            with contextlib.suppress(LaunchError):  # then nothing can remove the rest
                self._replace()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, line: bytes) -> None:
        try:
            self._write(line)
        except OSError:  # the reaper is gone
            self._replace()

    def _replace(self) -> None:
        """Start another reaper and register everything with it."""
        stdin, self._process = self._process.stdin, _start()
        assert stdin is not None
        stdin.close()
        try:
            for group in self._groups:
                self._write(_group_line(group))
            for path in self._paths:
                self._write(_path_line(path))
            if self._folder is not None:
                self._write(b"explain " + os.fsencode(self._folder) + b"\n")
        except OSError as error:
            raise LaunchError("the reaper is gone; without it ranks could outlive the launcher") from error

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), line)


def _start() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_REAPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise LaunchError(f"the reaper could not be started: {os_reason(error)}") from error


def _group_line(group: int) -> bytes:
    return b"+%d\n" % group


def _path_line(path: Path) -> bytes:
    return b"remove " + os.fsencode(path) + b"\n"
