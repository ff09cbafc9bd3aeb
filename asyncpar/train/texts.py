"""Texts for training, and held-out texts for evaluation, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.train.language_model import Batches, Corpus, LanguageModel


def read_corpus(paths: Sequence[Path], *, least: int, most: int | None = None) -> Corpus:
    """Return the bytes of all files, in the given order; for a directory, those of all files below it, by name.

    Reads at most ``most`` bytes.  Raises ``UsageError`` naming the path if one does not exist, cannot be read or is a
    device or pipe, which may never end, and if there are fewer than ``least`` bytes in all.
    """
    parts: list[bytes] = []
    size = 0
    for path in _files(paths):
        try:
            part = path.read_bytes()
        except OSError as error:
            raise UsageError(f"text: {path} cannot be read: {os_reason(error)}") from error
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


EVALUATION_BATCHES = 32
EVALUATION_ROWS = 64
"""Enough to distinguish two models that differ by 0.1 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The training text and, if some is held out, the evaluation text."""

    training: Batches
    held_out: Batches | None


def make_texts(corpus: Corpus, *, rows: int, length: int, seed: int, held_out: float) -> Texts:
    """Hold out the last part ``held_out`` (0..0.5) of the bytes for evaluation, on windows that depend on ``seed``
    alone.

    Raises ``UsageError`` if a part is shorter than a window.
    """
    if not 0.0 <= held_out <= 0.5:
        raise UsageError(f"held-out: expected a part in 0..0.5, got {held_out}")
    start = corpus.size - int(corpus.size * held_out)
    training = Batches(corpus[:start], rows=rows, length=length, seed=seed)
    if not held_out:
        return Texts(training=training, held_out=None)
    return Texts(
        training=training,
        held_out=Batches(corpus[start:], rows=EVALUATION_ROWS, length=length, seed=seed + 1),
    )


def evaluate(model: LanguageModel, batches: Batches, *, count: int = EVALUATION_BATCHES) -> float:
    """Return the mean loss over the first ``count`` batches."""
    losses = [model.evaluate(batches.windows(index)) for index in range(count)]
    return sum(losses) / len(losses)
