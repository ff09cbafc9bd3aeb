"""Softmax cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array


def softmax_cross_entropy(logits: Array, targets: NDArray[np.integer[Any]], *, scale: float) -> tuple[float, Array]:
    """Return the sum of ``-log softmax(logits)[target]`` over all positions, and ``scale`` times its gradient.

    ``logits`` has shape (..., classes) and ``targets`` the leading dimensions.  The sum is taken in float64 and is not
    scaled: with ``scale`` one over the number of positions in the *whole* batch, however it is split, gradients of
    parts add up to that of the mean.
    """
    if targets.shape != logits.shape[:-1]:
        raise UsageError(f"targets: expected shape {logits.shape[:-1]} to go with {logits.shape}, got {targets.shape}")
    classes = logits.shape[-1]
    if targets.size and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise UsageError(f"targets: expected 0..{classes - 1}, got {targets.min()}..{targets.max()}")
    flat = logits.reshape(-1, classes)
    shifted: Array = flat - flat.max(axis=-1, keepdims=True)
    rows = np.arange(flat.shape[0])
    picked = shifted[rows, targets.reshape(-1)].astype(np.float64)
    gradient = np.exp(shifted, out=shifted)
    total = gradient.sum(axis=-1, keepdims=True)
    loss = float(np.log(total[:, 0], dtype=np.float64).sum() - picked.sum())
    gradient *= scale / total
    gradient[rows, targets.reshape(-1)] -= np.asarray(scale, gradient.dtype)
    return loss, gradient.reshape(logits.shape)
