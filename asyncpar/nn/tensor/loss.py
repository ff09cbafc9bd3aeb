"""Softmax cross-entropy over logits that are split over ranks (Shoeybi et al. 2019)."""

from __future__ import annotations

import numpy as np

from asyncpar.errors import UsageError
from asyncpar.nn.loss import Targets, check_targets, is_counted
from asyncpar.nn.parameter import Array
from asyncpar.nn.tensor.group import TensorGroup


def vocab_parallel_cross_entropy(
    logits: Array,
    targets: Targets,
    *,
    vocabulary: int,
    group: TensorGroup,
    scale: float,
    ignore_index: int | None = None,
) -> tuple[float, Array]:
    """Return the result of ``softmax_cross_entropy`` for logits cut by ``split_bounds`` along the last dimension.

    ``logits`` are this rank's, and so is the gradient; ``targets`` are the same on every rank, and so is the loss, to
    the last bit.  Ranks exchange three values for each position (the largest logit, the sum, the target's), never the
    logits.

    Positions whose target is ``ignore_index`` do not count.
    """
    start, stop = group.bounds(vocabulary)
    if logits.ndim < 1 or logits.shape[-1] != stop - start:
        raise UsageError(
            f"logits: expected {stop - start} of {vocabulary} classes on rank {group.rank} of {group.size}, "
            f"got shape {logits.shape}"
        )
    check_targets(targets, logits, classes=vocabulary, ignore_index=ignore_index)
    flat, wanted = logits.reshape(-1, stop - start), targets.reshape(-1)
    counted = is_counted(wanted, ignore_index)
    rows = np.flatnonzero(counted & (wanted >= start) & (wanted < stop))
    columns = wanted[rows] - start
    shifted: Array = flat - group.all_reduce_max(flat.max(axis=-1))[:, np.newaxis]
    sums = np.zeros((2, wanted.size))
    sums[1, rows] = shifted[rows, columns]
    gradient = np.exp(shifted, out=shifted)
    sums[0] = gradient.sum(axis=-1)
    totals, picked = group.all_reduce(sums)
    loss = float(np.log(totals[counted]).sum() - picked[counted].sum())
    gradient *= (scale / totals).astype(gradient.dtype)[:, np.newaxis]
    gradient[rows, columns] -= np.asarray(scale, gradient.dtype)
    gradient[~counted] = 0.0
    return loss, gradient.reshape(logits.shape)
