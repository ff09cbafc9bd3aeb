"""The file operations of saving behind one interface, so that tests can make them fail or lose data."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

_UNKNOWN: Final = frozenset({errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
"""Error numbers of network file systems that support neither locks nor syncs of folders."""


class NewFile(ABC):
    """A file that is being written."""

    @abstractmethod
    def write(self, content: bytes | memoryview) -> None:
        """Append all of ``content``."""

    @abstractmethod
    def sync(self) -> None:
        """Wait until everything written has reached the disk."""

    @abstractmethod
    def close(self) -> None:
        """Free it; content that was not synced may be lost."""


class FileSystem(ABC):
    """The operations on files that saving needs; all block and raise ``OSError``.

    Changes of a folder (names created, changed and removed in it) have reached the disk when ``sync_folder`` of it
    returns, and the content of a file when its ``sync`` does.
    """

    @abstractmethod
    def make_folder(self, path: Path) -> None:
        """Create the folder and its missing parents, and ensure that they have reached the disk."""

    @abstractmethod
    def folders(self, path: Path) -> list[str]:
        """Return the names of the folders in ``path``, sorted."""

    @abstractmethod
    def has_folder(self, path: Path) -> bool:
        """Return whether there is such a folder."""

    @abstractmethod
    def is_link(self, path: Path) -> bool:
        """Return whether this is a symbolic link, whatever it points to."""

    @abstractmethod
    def has_file(self, path: Path) -> bool:
        """Return whether there is such a file."""

    @abstractmethod
    def size(self, path: Path) -> int:
        """Return the length of a file."""

    @abstractmethod
    def read(self, path: Path, *, limit: int) -> bytes:
        """Return the content of a file.  Raises ``OSError`` if it has more than ``limit`` bytes."""

    @abstractmethod
    def create(self, path: Path) -> NewFile:
        """Create a file, which must not exist."""

    @abstractmethod
    def sync_folder(self, path: Path) -> None:
        """Wait until the names in the folder have reached the disk."""

    @abstractmethod
    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically; a file replaces one that has the new name."""

    @abstractmethod
    def remove_file(self, path: Path) -> None:
        """Remove a file."""

    @abstractmethod
    def remove_folder(self, path: Path) -> None:
        """Remove a folder and its contents; of a link, only the link."""

    @abstractmethod
    def lock(self, path: Path) -> AbstractContextManager[None]:
        """Hold the lock of a name until the process ends.  Raises ``BlockingIOError`` if it is held elsewhere."""


class LocalFiles(FileSystem):
    """The file systems of this host, including network file systems."""

    def make_folder(self, path: Path) -> None:
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self.sync_folder(folder.parent)

    def folders(self, path: Path) -> list[str]:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def has_folder(self, path: Path) -> bool:
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        return path.is_symlink()

    def has_file(self, path: Path) -> bool:
        return path.is_file()

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def read(self, path: Path, *, limit: int) -> bytes:
        with path.open("rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"expected at most {limit} bytes", str(path))
        return content

    def create(self, path: Path) -> NewFile:
        return _LocalFile(path)

    def sync_folder(self, path: Path) -> None:
        if sys.platform == "win32":  # which writes names at once, and cannot open folders
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            try:
                _lock(descriptor)
            except OSError as error:
                if error.errno not in _UNKNOWN:
                    raise
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Raise ``BlockingIOError`` if another process has locked this file; the lock ends with the descriptor."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from error
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class _LocalFile(NewFile):
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._path = path

    def write(self, content: bytes | memoryview) -> None:
        left = memoryview(content)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError as error:
                error.filename = str(self._path)
                raise

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
