"""The durable state of a voter: one small file, replaced as a whole and stored before any answer depends on it.

A new state is written beside the file, stored with ``fsync``, and renamed over it; then the directory is stored.  So
after a crash the file has either the state before or the state after, complete: its checksum proves it.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Protocol

import msgspec

from asyncpar.core.private_files import open_private
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import LaunchError, UsageError
from asyncpar.hosts.consensus_messages import DurableState

_MAGIC = b"asyncpar votes 1\n"
_MOST_BYTES = 16 << 20


class VoteFileError(LaunchError):
    """The votes of a node cannot be stored or read: it must not vote."""


class VoteDisk(Protocol):
    """The storage of the file; both methods raise ``OSError``."""

    def read(self, name: str) -> bytes:
        """Return all of the file ``name``.  Raises ``FileNotFoundError``."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Replace the content of the file by ``data`` atomically; on return it survives a crash of the host."""
        ...


class DirectoryDisk:
    """The files in ``directory``, accessible only to their owner."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, name: str) -> bytes:
        """See ``VoteDisk``."""
        path = self._directory / name
        if path.stat().st_size > _MOST_BYTES:
            raise VoteFileError(f"{path}: too large for a file of votes; give another state directory")
        return path.read_bytes()

    def replace(self, name: str, data: bytes) -> None:
        """See ``VoteDisk``; blocks for two ``fsync``."""
        path = self._directory / name
        beside = path.with_name(f"{name}.new")
        descriptor = open_private(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(beside, path)
        _store_directory(self._directory)


class VoteFile:
    """The file with the durable state of one node of one job; its directory is accessible only to its owner."""

    def __init__(self, path: Path, *, job: str, disk: VoteDisk | None = None) -> None:
        """``job`` is compared when the file is read: votes of another job are not accepted.

        ``disk`` None: the directory of ``path``.
        """
        self.path = path
        self._job = job
        self._disk = DirectoryDisk(path.parent) if disk is None else disk

    def read(self) -> DurableState | None:
        """Return the state stored last; None if there is none.

        Raises ``VoteFileError`` if the file is damaged, of another version, or cannot be read, and ``UsageError`` if it
        is that of another job.
        """
        try:
            content = self._disk.read(self.path.name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise VoteFileError(f"{self.path}: the votes cannot be read: {os_reason(error)}") from error
        return self._decode(content)

    def _decode(self, content: bytes) -> DurableState:
        if not content.startswith(_MAGIC):
            raise VoteFileError(
                f"{self.path}: not a file of votes of this version of asyncpar; give another state directory, or "
                "remove the file if this host has never voted"
            )
        body = content[len(_MAGIC) + 4 :]
        if zlib.crc32(body) != int.from_bytes(content[len(_MAGIC) : len(_MAGIC) + 4], "little"):
            raise VoteFileError(
                f"{self.path}: the votes are damaged; a node that has forgotten its votes must not vote: join as a new "
                "host, with another state directory"
            )
        try:
            job, state = msgspec.msgpack.decode(body, type=tuple[str, DurableState])
        except (msgspec.DecodeError, UsageError) as error:
            raise VoteFileError(f"{self.path}: the votes cannot be decoded: {error}") from error
        if job != self._job:
            raise UsageError(f"{self.path}: holds votes of job {job!r}, not of {self._job!r}; give another directory")
        return state

    def write(self, state: DurableState) -> None:
        """Store ``state``; on return it survives a crash of the host.  Blocks for one or two ``fsync``.

        Raises ``VoteFileError`` if it cannot be stored; the previous state is kept then.
        """
        body = msgspec.msgpack.encode((self._job, state))
        content = _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body
        try:
            self._disk.replace(self.path.name, content)
        except OSError as error:
            raise VoteFileError(
                f"{self.path}: the votes cannot be stored: {os_reason(error)}; this host must not vote until there is "
                "room, or another state directory"
            ) from error


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _store_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
