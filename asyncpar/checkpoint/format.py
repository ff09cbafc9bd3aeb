"""The safetensors format: its library (an extra, imported only when needed), and the header of a file.

A file is eight bytes with the length of the header, little endian; the header, which is JSON; the values, one tensor
after the other, without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncpar.checkpoint.manifest import PieceRecord
from asyncpar.checkpoint.piece import code_of
from asyncpar.errors import CheckpointError, UsageError


def load_safetensors() -> Any:
    """Return the module.  Raises ``UsageError`` with what to install if it is missing."""
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


_ALIGNMENT = 64


def encode_header(pieces: Sequence[PieceRecord]) -> bytes:
    """Return everything before the values of ``pieces``, which follow in this order."""
    entries: dict[str, Any] = {"__metadata__": {"written_by": "asyncpar"}}
    offset = 0
    for piece in pieces:
        end = offset + piece.nbytes
        entries[piece.key] = {
            "dtype": code_of(piece.dtype),
            "shape": list(piece.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
