"""The library safetensors, an extra, which is imported only when a checkpoint is saved or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncpar.checkpoint.dtypes import code_of
from asyncpar.checkpoint.manifest import PieceRecord
from asyncpar.errors import CheckpointError, UsageError


def load_safetensors() -> Any:
    """Return the module.  Raises ``UsageError`` that says what to install without it."""
    try:
        return import_module("safetensors")
    except ImportError as error:
        raise UsageError(
            f"checkpoints need safetensors, which cannot be imported ({error}); "
            'install it with: pip install "asyncpar[checkpoint]"'
        ) from error


def check_shard(path: Path, pieces: Sequence[PieceRecord]) -> None:
    """Raise ``CheckpointError`` unless safetensors finds exactly the tensors of ``pieces`` in the file ``path``."""
    library = load_safetensors()
    try:
        with library.safe_open(str(path), framework="numpy") as shard:
            slices = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118
            found = {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()}
    except library.SafetensorError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
    expected = {piece.key: (code_of(piece.dtype), piece.shape) for piece in pieces}
    if found != expected:
        different = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))[0]
        raise CheckpointError(
            f"{path}: damaged or edited: {different}: expected {expected.get(different)}, got {found.get(different)}"
        )
