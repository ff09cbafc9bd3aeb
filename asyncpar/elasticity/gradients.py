"""Gradients by the parameters of an optimizer.  Pure."""

from __future__ import annotations

from typing import Any

from asyncpar.errors import UsageError
from asyncpar.nn.optimizers import Optimizer


def by_parameter(optimizer: Optimizer, gradients: Any) -> list[Any]:
    """Return ``gradients``, by name or in order, in the order of the parameters.  Raises ``UsageError``."""
    names = [parameter.name for parameter in optimizer.parameters]
    if isinstance(gradients, dict):
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
