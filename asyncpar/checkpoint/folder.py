"""The folder that checkpoints are saved into: what is in it, and what may go."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncpar.checkpoint.files import FileSystem, LocalFiles
from asyncpar.checkpoint.manifest import MARKER, Marker, decode_marker
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import CheckpointError

_LOG = logging.getLogger(__name__)

MOST_STEPS: Final = 10**15
_MARKER_LIMIT: Final = 1 << 28
_SAVED = re.compile(r"step_([0-9]{9,16})")
_UNFINISHED = re.compile(r"step_[0-9]{9,16}\.saving-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A complete checkpoint in ``path``."""

    path: Path
    marker: Marker

    @property
    def step(self) -> int:
        return self.marker.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The content of a folder: complete checkpoints by rising step, folders without marker, those with a bad marker."""

    complete: tuple[Found, ...]
    unfinished: tuple[Path, ...]
    unreadable: tuple[tuple[Path, str], ...]

    @property
    def later_unreadable(self) -> tuple[Path, str] | None:
        """The last of those whose marker is bad, if it is later than every complete one."""
        steps = [(_step_of(path), path, reason) for path, reason in self.unreadable]
        last = max(steps, default=None)
        if last is None or (self.complete and last[0] < self.complete[-1].step):
            return None
        return last[1:]


def folder_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step_{step:09d}"


def is_step_folder(path: Path) -> bool:
    """Is this the name of one checkpoint, rather than of a folder of checkpoints?"""
    return _SAVED.fullmatch(path.name) is not None


def _step_of(path: Path) -> int:
    match = _SAVED.fullmatch(path.name)
    assert match, "only such folders are looked into"
    return int(match[1])


def survey(folder: Path, files: FileSystem) -> Survey:
    """Return what is in ``folder``.  Raises ``CheckpointError`` if it cannot be read."""
    complete, unfinished, unreadable = [], [], []
    with translated(f"cannot look into {folder}"):
        names = files.folders(folder)
        for name in names:
            path, match = folder / name, _SAVED.fullmatch(name)
            if _UNFINISHED.fullmatch(name) or (match and not files.has_file(path / MARKER)):
                unfinished.append(path)
            elif match:
                try:
                    complete.append(read_marker(path, files))
                except CheckpointError as error:
                    unreadable.append((path, str(error)))
    complete.sort(key=lambda found: found.step)
    return Survey(complete=tuple(complete), unfinished=tuple(unfinished), unreadable=tuple(unreadable))


def read_marker(path: Path, files: FileSystem) -> Found:
    """Return the checkpoint in the folder ``path``.  Raises ``CheckpointError`` if it is none that is complete."""
    with translated(f"cannot read {path}"):
        if not files.has_file(path / MARKER):
            raise CheckpointError(f"{path}: there is no complete checkpoint here, for there is no file {MARKER}")
        content = files.read(path / MARKER, limit=_MARKER_LIMIT)
    marker = decode_marker(content, path=path / MARKER)
    match = _SAVED.fullmatch(path.name)
    if match and int(match[1]) != marker.step:
        raise CheckpointError(f"{path / MARKER}: step: expected {int(match[1])} in this folder, got {marker.step}")
    return Found(path=path, marker=marker)


def latest(folder: Path | str, *, files: FileSystem | None = None) -> Found | None:
    """Return the complete checkpoint of the highest step in ``folder``; None if there is none.

    What is later and not complete is skipped, and the log says so.  Reads markers only.  Raises ``CheckpointError`` if
    there is no such folder, or it cannot be read.

    ``files`` is the file system (None: that of this machine).
    """
    seen = survey(Path(folder), files or LocalFiles())
    log_skipped(seen)
    return seen.complete[-1] if seen.complete else None


def log_skipped(seen: Survey) -> None:
    """Say in the log which folders are not considered, and why."""
    for path in seen.unfinished:
        _LOG.warning("%s is skipped: saving it was not finished", path)
    for path, reason in seen.unreadable:
        _LOG.warning("%s is skipped: %s", path, reason)


def tidy(folder: Path, files: FileSystem) -> None:
    """Remove what saves that have failed have left in ``folder``, and see to it that the last complete one is on disk.

    That one may be from a process that died between making it complete and the last sync.
    """
    seen = survey(folder, files)
    if seen.complete:
        files.sync_folder(seen.complete[-1].path)
    for path in seen.unfinished:
        _LOG.warning("%s is removed: saving it was not finished", path)
        files.remove_folder(path)


def remove_old(folder: Path, files: FileSystem, *, keep: int, saved: int) -> tuple[Path, ...]:
    """Remove all complete checkpoints but the ``keep`` last ones and that of step ``saved``; return which.

    Each loses its marker first, so that none is ever taken for complete that is not.  Of a checkpoint that is a link,
    the link is removed, and what it points to stays as it is.
    """
    old = [found for found in survey(folder, files).complete[:-keep] if found.step != saved]
    for found in old:
        if not files.is_link(found.path):
            files.remove_file(found.path / MARKER)
            files.sync_folder(found.path)
        files.remove_folder(found.path)
    return tuple(found.path for found in old)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise ``OSError`` as ``CheckpointError`` that says what could not be done."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename is not None and str(error.filename) not in doing else ""
        reason = os_reason(error)
        raise CheckpointError(f"{doing}: {reason}{where}") from error
