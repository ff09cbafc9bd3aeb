"""Files for the output of ranks: ``LOG_DIR/attempt_N/RANK/{stdout,stderr}.log``."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

from asyncpar.launch.options import StreamChoice, Streams


class RankLogs:
    """Opens log files as asked for by ``--log-dir``, ``--redirects`` and ``--tee``."""

    def __init__(self, directory: Path | None, *, redirects: StreamChoice, tee: StreamChoice) -> None:
        self._directory = directory
        self._redirects = redirects
        self._tee = tee

    def is_shown(self, stream: Streams, *, local_rank: int) -> bool:
        """Does ``stream`` of that rank go to our own output?"""
        return stream not in self._redirects.of(local_rank) or stream in self._tee.of(local_rank)

    def open(self, stream: Streams, *, attempt: int, rank: int, local_rank: int) -> FileIO | None:
        """Return the new, unbuffered file for ``stream`` of that rank, None if none is wanted.  Raises ``OSError``."""
        wanted = self._redirects.of(local_rank) | self._tee.of(local_rank)
        if self._directory is None or stream not in wanted:
            return None
        directory = self._directory / f"attempt_{attempt}" / str(rank)
        directory.mkdir(parents=True, exist_ok=True)
        name = "stdout.log" if stream == Streams.STDOUT else "stderr.log"
        return FileIO(directory / name, "w", opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    """Open a file that this user alone can read: programs print what others need not see."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)  # it may be there already, with another mode
    return descriptor
