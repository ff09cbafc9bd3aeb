"""A disk in memory that dies after so many bytes and operations, and may lose what was not synced."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeAlias

from asyncpar.checkpoint import FileSystem, NewFile

OPERATION_COST = 60
"""Bytes that dying at an operation is as likely as."""


class Died(BaseException):
    """The machine, or the process, is no more: nothing catches it."""


@dataclass(eq=False)
class File:
    """``synced`` is how much of the content is on the disk for certain."""

    content: bytearray = field(default_factory=bytearray)
    synced: int = 0


Node: TypeAlias = "File | Folder"


@dataclass(eq=False)
class Folder:
    """``durable`` is what is on the disk for certain, ``changes`` what was done since: (old name, new name, node)."""

    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    changes: list[tuple[str | None, str | None, Node]] = field(default_factory=list)

    def change(self, old: str | None, new: str | None, node: Node) -> None:
        self.changes.append((old, new, node))
        _apply(self.entries, old, new, node)

    def sync(self) -> None:
        self.durable, self.changes = dict(self.entries), []


class Disk:
    """What all ranks write to.  ``budget`` is what may be written before it dies; None: it never does."""

    def __init__(self) -> None:
        self.root = Folder()
        self.budget: int | None = None
        self.spent = 0
        self.locked: set[Path] = set()

    def spend(self, wanted: int) -> int:
        """Return how much of ``wanted`` may still be done."""
        allowed = wanted if self.budget is None else min(wanted, max(0, self.budget - self.spent))
        self.spent += wanted
        return allowed

    def kill(self) -> None:
        """The processes die, the kernel does not: everything is there."""
        self._revive()

    def lose_power(self, random: Random) -> None:
        """What was not synced is lost, or not, or in part."""
        _crash(self.root, random)
        self._revive()

    def _revive(self) -> None:
        self.budget, self.spent = None, 0
        self.locked.clear()

    def copy_to(self, path: Path) -> None:
        """Write everything into the folder ``path`` of the real file system."""
        _materialize(self.root, path)


class FragileFiles(FileSystem):
    """The face of a ``Disk`` to one rank.  With a ``budget`` of its own, only this rank dies."""

    def __init__(self, disk: Disk, *, budget: int | None = None) -> None:
        self.disk = disk
        self._budget = budget

    def spend(self, wanted: int) -> int:
        allowed = self.disk.spend(wanted)
        if self._budget is not None:
            allowed = min(allowed, max(0, self._budget))
            self._budget -= wanted
        return allowed

    def _operate(self) -> None:
        if self.spend(OPERATION_COST) < OPERATION_COST:
            raise Died

    def _folder(self, path: Path) -> Folder:
        node: Node = self.disk.root
        for name in path.parts[1:]:
            if not isinstance(node, Folder) or name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            node = node.entries[name]
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        return node

    def _file(self, path: Path) -> File:
        node = self._folder(path.parent).entries.get(path.name)
        if not isinstance(node, File):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return node

    def make_folder(self, path: Path) -> None:
        for made in reversed([path, *path.parents][:-1]):
            parent = self._folder(made.parent)
            if made.name not in parent.entries:
                self._operate()
                parent.change(None, made.name, Folder())
                self.sync_folder(made.parent)

    def folders(self, path: Path) -> list[str]:
        return sorted(name for name, node in self._folder(path).entries.items() if isinstance(node, Folder))

    def has_folder(self, path: Path) -> bool:
        return path.name in self._folder(path.parent).entries

    def is_link(self, path: Path) -> bool:  # this disk has none
        return False

    def has_file(self, path: Path) -> bool:
        return path.name in self._folder(path.parent).entries

    def size(self, path: Path) -> int:
        return len(self._file(path).content)

    def read(self, path: Path, *, limit: int) -> bytes:
        content = bytes(self._file(path).content)
        assert len(content) <= limit
        return content

    def create(self, path: Path) -> NewFile:
        self._operate()
        folder = self._folder(path.parent)
        assert path.name not in folder.entries
        file = File()
        folder.change(None, path.name, file)
        return _Writing(self, file)

    def sync_folder(self, path: Path) -> None:
        self._operate()
        self._folder(path).sync()

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent
        self._operate()
        folder = self._folder(old.parent)
        folder.change(old.name, new.name, folder.entries[old.name])

    def remove_file(self, path: Path) -> None:
        self._operate()
        self._folder(path.parent).change(path.name, None, self._file(path))

    def remove_folder(self, path: Path) -> None:
        folder = self._folder(path)
        for name in list(folder.entries):
            self.remove_file(path / name)
        self._operate()
        self._folder(path.parent).change(path.name, None, folder)

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        if path in self.disk.locked:
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable", str(path))
        self.disk.locked.add(path)
        try:
            yield
        finally:
            self.disk.locked.discard(path)


class _Writing(NewFile):
    def __init__(self, files: FragileFiles, file: File) -> None:
        self._files = files
        self._file = file

    def write(self, content: bytes | memoryview) -> None:
        allowed = self._files.spend(len(content))
        self._file.content += content[:allowed]
        if allowed < len(content):
            raise Died

    def sync(self) -> None:
        if self._files.spend(OPERATION_COST) < OPERATION_COST:
            raise Died
        self._file.synced = len(self._file.content)

    def close(self) -> None:
        pass


def _apply(entries: dict[str, Node], old: str | None, new: str | None, node: Node) -> None:
    if old is not None and entries.get(old) is node:
        del entries[old]
    if new is not None:
        entries[new] = node


def _crash(folder: Folder, random: Random) -> None:
    """Keep what is durable, and of later changes all, the first ones, or any: file systems differ."""
    entries = dict(folder.durable)
    first = random.randint(0, len(folder.changes))
    kept = random.choice([folder.changes, folder.changes[:first], [c for c in folder.changes if random.random() < 0.5]])
    for old, new, node in kept:
        _apply(entries, old, new, node)
    folder.entries, folder.durable, folder.changes = entries, dict(entries), []
    for node in entries.values():
        if isinstance(node, Folder):
            _crash(node, random)
        else:
            _tear(node, random)


def _tear(file: File, random: Random) -> None:
    """Of what was not synced, keep a beginning; what follows is gone, or zeros."""
    kept = random.randint(file.synced, len(file.content))
    lost = len(file.content) - kept
    file.content = file.content[:kept] + bytes(random.choice([0, lost]))
    file.synced = len(file.content)


def _materialize(folder: Folder, path: Path) -> None:
    path.mkdir()
    for name, node in folder.entries.items():
        if isinstance(node, Folder):
            _materialize(node, path / name)
        else:
            (path / name).write_bytes(node.content)
