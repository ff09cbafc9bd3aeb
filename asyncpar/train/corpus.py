"""Text to train on, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError

Corpus = NDArray[np.uint8]


def read_corpus(paths: Sequence[Path], *, least: int, most: int | None = None) -> Corpus:
    """Return the bytes of all files, in the order given; of a directory, those of all files below it, by name.

    Reads no further than ``most`` bytes.  Raises ``UsageError`` that names the path when one does not exist, cannot
    be read or is a device or pipe, which may never end, and when there are fewer than ``least`` bytes in all.
    """
    parts: list[bytes] = []
    size = 0
    for path in _files(paths):
        try:
            part = path.read_bytes()
        except OSError as error:
            raise UsageError(f"text: {path} cannot be read: {error.strerror or error}") from error
        parts.append(part)
        size += len(part)
        if most is not None and size >= most:
            break
    corpus = np.frombuffer(b"".join(parts)[:most], np.uint8)
    if corpus.size < least:
        names = ", ".join(map(str, paths)) or "no files"
        raise UsageError(f"text: expected at least {least} bytes, got {corpus.size} from {names}")
    return corpus


def standard_library_text() -> list[Path]:
    """Return the source files of the running Python's standard library, in order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.glob("*.py")) + sorted(root.glob("*/*.py"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    return [file for file in files if not skipped & set(file.relative_to(root).parts)]


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if not path.exists():
            raise UsageError(f"text: {path} does not exist")
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            yield path
        else:
            raise UsageError(f"text: {path} is neither a file nor a folder")
