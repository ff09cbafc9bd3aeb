"""The disk of a simulated node: unsynced data is lost when the machine goes down, and the last write may be torn.

The methods are those that files of voters need (see ``hosts/votes.py``).  All raise ``OSError``.
"""

from __future__ import annotations

import errno
from random import Random

from asyncpar.testing.simulation.process import CURRENT


class SimulatedFile:
    """The content of a file, and the part of it that survives a crash."""

    __slots__ = ("content", "synced")

    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self.synced: bytes | None = None
        """The content that is certainly on the disk; None: not even the file's name."""


class SimulatedDisk:
    """The files of one node, by name.  ``capacity`` is its size in bytes, None for no limit."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice
        self._files: dict[str, SimulatedFile] = {}
        self.capacity: int | None = None
        self.is_broken = False
        """Whether writes and syncs fail."""

    def read(self, name: str) -> bytes:
        """Return all of the file ``name``.  Raises ``FileNotFoundError``."""
        if name not in self._files:
            raise FileNotFoundError(errno.ENOENT, "No such file", name)
        return bytes(self._files[name].content)

    def append(self, name: str, data: bytes) -> None:
        """Append ``data`` to the file, which is created if necessary; durable after ``sync``."""
        if self._is_muted():
            return
        self._check_room(name, len(data))
        self._files.setdefault(name, SimulatedFile()).content += data

    def truncate(self, name: str, size: int) -> None:
        """Drop everything after the first ``size`` bytes; durable after ``sync``."""
        if not self._is_muted():
            self._check_room(name, 0)
            del self._files[name].content[size:]

    def sync(self, name: str) -> None:
        """Make all writes so far durable before this returns."""
        if not self._is_muted():
            self._check_room(name, 0)
            self._files[name].synced = bytes(self._files[name].content)

    def replace(self, name: str, data: bytes) -> None:
        """Make ``data`` the content of the file, whole or not at all; durable when this returns."""
        if not self._is_muted():
            self._check_room(name, len(data))
            self._files[name] = SimulatedFile(data)
            self._files[name].synced = bytes(data)

    def lose_unsynced(self) -> None:
        """Simulate a power failure: of data appended since the last sync, a drawn part is left."""
        for name, file in list(self._files.items()):
            if file.synced is None and self._dice.random() < 1 / 2:
                del self._files[name]
                continue
            kept = b"" if file.synced is None else file.synced
            if file.content.startswith(kept):
                more = bytes(file.content[len(kept) :])
                kept += more[: self._dice.randint(0, len(more))]
            file.content = bytearray(kept)
            file.synced = kept

    def _check_room(self, name: str, size: int) -> None:
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error", name)
        used = sum(len(file.content) for file in self._files.values())
        if self.capacity is not None and used + size > self.capacity:
            raise OSError(errno.ENOSPC, "No space left on device", name)

    @staticmethod
    def _is_muted() -> bool:
        """Return whether the process that writes is dead."""
        process = CURRENT.get()
        return process is not None and process.is_dead
