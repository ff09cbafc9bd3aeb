"""Softmax cross-entropy."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array

Targets: TypeAlias = NDArray[np.integer[Any]]


def softmax_cross_entropy(
    logits: Array, targets: Targets, *, scale: float, ignore_index: int | None = None
) -> tuple[float, Array]:
    """Return the sum of ``-log softmax(logits)[target]`` over all positions, and ``scale`` times its gradient.

    ``logits`` has shape (..., classes) and ``targets`` the leading dimensions.  The sum is taken in float64 and is not
    scaled: with ``scale`` one over the number of positions in the *whole* batch, however it is split, gradients of
    parts add up to that of the mean.  Positions whose target is ``ignore_index`` (padding) do not count.
    """
    classes = logits.shape[-1]
    check_targets(targets, logits, classes=classes, ignore_index=ignore_index)
    flat, wanted = logits.reshape(-1, classes), targets.reshape(-1)
    shifted: Array = flat - flat.max(axis=-1, keepdims=True)
    rows = np.flatnonzero(is_counted(wanted, ignore_index))
    columns = wanted[rows]
    picked = shifted[rows, columns].astype(np.float64)
    gradient = np.exp(shifted, out=shifted)
    total = gradient.sum(axis=-1, keepdims=True)
    loss = float(np.log(total[rows, 0], dtype=np.float64).sum() - picked.sum())
    gradient *= scale / total
    gradient[rows, columns] -= np.asarray(scale, gradient.dtype)
    if rows.size < wanted.size:
        gradient[~is_counted(wanted, ignore_index)] = 0.0
    return loss, gradient.reshape(logits.shape)


def is_counted(targets: Targets, ignore_index: int | None) -> NDArray[np.bool_]:
    """Return a mask of the positions that count: those whose target is not ``ignore_index``."""
    return np.ones(targets.shape, np.bool_) if ignore_index is None else targets != ignore_index


def check_targets(targets: Targets, logits: Array, *, classes: int, ignore_index: int | None) -> None:
    """Raise ``UsageError`` unless there is one target for each row of ``logits``, a class or ``ignore_index``."""
    if targets.shape != logits.shape[:-1]:
        raise UsageError(f"targets: expected shape {logits.shape[:-1]} to go with {logits.shape}, got {targets.shape}")
    if not np.issubdtype(targets.dtype, np.integer):
        raise UsageError(f"targets: expected an integer dtype, got {targets.dtype}")
    counted = targets[is_counted(targets, ignore_index)]
    if counted.size and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        ignored = "" if ignore_index is None else f", or {ignore_index}"
        raise UsageError(f"targets: expected 0..{classes - 1}{ignored}, got {counted.min()}..{counted.max()}")
