"""Gradients by the parameters of an optimizer.  Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncpar.core.config.placement import is_frozen
from asyncpar.errors import UsageError
from asyncpar.nn.half import stored_dtype
from asyncpar.nn.optimizers import Optimizer


def by_parameter(optimizer: Optimizer, gradients: Any) -> list[Any]:
    """Return ``gradients``, given by name or in order, in the order of the parameters.

    By name, those of frozen parameters may be left out: they are zeros.  Raises ``UsageError``.
    """
    names = [parameter.name for parameter in optimizer.parameters]
    if isinstance(gradients, dict):
        frozen = {one.name: one for one in optimizer.parameters if is_frozen(one) and one.name not in gradients}
        if frozen:
            gradients = {**gradients, **{name: np.zeros(one.shape, stored_dtype(one)) for name, one in frozen.items()}}
        missing = [name for name in names if name not in gradients]
        if missing:
            raise UsageError(
                f"gradients: expected one for each parameter of the optimizer; missing {', '.join(missing)}"
            )
        return [gradients[name] for name in names]
    if len(gradients) != len(names):
        raise UsageError(
            f"gradients: expected {len(names)}, one for each parameter of the optimizer, got {len(gradients)}"
        )
    return list(gradients)
