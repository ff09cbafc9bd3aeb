"""Which rows of a batch go to which replica: pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncpar.errors import UsageError


def chunk_rows(rows: int, parts: int) -> tuple[slice, ...]:
    """Return at most ``parts`` chunks of ``ceil(rows / parts)`` rows, the last of which may be shorter; none is empty.

    So there are fewer chunks than parts where rows run out.
    """
    if rows < 1:
        raise UsageError(f"input: expected at least one row along dimension 0, got {rows}")
    if parts < 1:
        raise UsageError(f"parts: expected at least 1, got {parts}")
    each = -(-rows // parts)
    return tuple(slice(start, min(start + each, rows)) for start in range(0, rows, each))


def count_rows(x: object, name: str) -> int:
    """Return the length along dimension 0.  Raises ``UsageError`` for anything without rows."""
    if not isinstance(x, np.ndarray) or x.ndim < 1 or x.shape[0] < 1:
        got = f"shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise UsageError(f"{name}: expected an array of at least one row along dimension 0, got {got}")
    return int(x.shape[0])


def check_count(name: str, got: int, devices: Sequence[str]) -> None:
    """Raise ``UsageError`` unless there is one array for each device."""
    if got != len(devices):
        raise UsageError(f"{name}: expected {len(devices)} arrays, one for each device, got {got}")
