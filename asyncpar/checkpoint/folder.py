"""The folder of checkpoints: its contents, and what may be removed."""

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
    """Contents of a folder: complete checkpoints by increasing step, folders without a marker or with a bad one."""

    complete: tuple[Found, ...]
    unfinished: tuple[Path, ...]
    unreadable: tuple[tuple[Path, str], ...]

    @property
    def later_unreadable(self) -> tuple[Path, str] | None:
        """The last folder with a bad marker, if it is later than every complete one."""
        steps = [(_step_of(path), path, reason) for path, reason in self.unreadable]
        last = max(steps, default=None)
        if last is None or (self.complete and last[0] < self.complete[-1].step):
            return None
        return last[1:]


def folder_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step_{step:09d}"


def is_step_folder(path: Path) -> bool:
    """Return whether this is the name of one checkpoint, rather than of a folder of checkpoints."""
    return _SAVED.fullmatch(path.name) is not None


def _step_of(path: Path) -> int:
    match = _SAVED.fullmatch(path.name)
    assert match, "only such folders are looked into"
    return int(match[1])


def survey(folder: Path, files: FileSystem) -> Survey:
    """Return the contents of ``folder``.  Raises ``CheckpointError`` if it cannot be read."""
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
    """Return the checkpoint in the folder ``path``.  Raises ``CheckpointError`` unless it is a complete one."""
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

    Later incomplete ones are skipped, which is logged.  Reads markers only.  Raises ``CheckpointError`` if there is no
    such folder, or it cannot be read.

    ``files`` is the file system (None: that of this machine).
    """
    seen = survey(Path(folder), files or LocalFiles())
    log_skipped(seen)
    return seen.complete[-1] if seen.complete else None


def log_skipped(seen: Survey) -> None:
    """Log which folders are ignored, and why."""
    for path in seen.unfinished:
        _LOG.warning("%s is skipped: saving it was not finished", path)
    for path, reason in seen.unreadable:
        _LOG.warning("%s is skipped: %s", path, reason)


def clean_up(folder: Path, files: FileSystem) -> None:
    """Remove the remains of failed saves in ``folder``, and ensure that the last complete checkpoint is on disk.

    The process that saved it may have died between completing it and the last sync.
    """
    seen = survey(folder, files)
    if seen.complete:
        files.sync_folder(seen.complete[-1].path)
    for path in seen.unfinished:
        _LOG.warning("%s is removed: saving it was not finished", path)
        files.remove_folder(path)


def remove_old(folder: Path, files: FileSystem, *, keep: int, saved: int) -> tuple[Path, ...]:
    """Remove all complete checkpoints but the ``keep`` last ones and that of step ``saved``; return those removed.

    The marker is removed first, so that no incomplete one is ever taken for complete.  If a checkpoint is a link, only
    the link is removed, not its target.
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
    """Raise ``OSError`` as ``CheckpointError`` naming the failed action."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename is not None and str(error.filename) not in doing else ""
        reason = os_reason(error)
        raise CheckpointError(f"{doing}: {reason}{where}") from error
