"""The beginning of a safetensors file.  Pure.

Its layout: eight bytes with the length of the header, little endian; the header, which is JSON; the values, one tensor
after the other, without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from asyncpar.checkpoint.dtypes import code_of
from asyncpar.checkpoint.manifest import PieceRecord

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
