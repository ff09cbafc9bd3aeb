"""Where an input enters the graph of a module, and where its gradient comes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array
from asyncpar.torch.arrays import array_of
from asyncpar.torch.stage.tensors import tensor_of


class _Enter(torch.autograd.Function):
    """The identity, which does not keep the memory of its input, as a leaf would.

    What arrives in the backward pass goes to ``sink``.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, sink: list[torch.Tensor]) -> torch.Tensor:  # noqa: ARG004
        ctx.sink = sink
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.sink.append(gradient)
        return None, None, None


class Entry:
    """The ``arguments`` and ``keywords`` of a module that come from ``x``.

    ``node`` and ``edge`` are where the gradient of ``x`` arrives, None where it has none.
    """

    def __init__(self, name: str, x: Any) -> None:
        self._name = name
        self._sink: list[torch.Tensor] = []
        self.node: Any = None
        self.edge: Any = None
        self.arguments: tuple[torch.Tensor, ...] = ()
        self.keywords: dict[str, torch.Tensor] = {}
        self._dtype: torch.dtype | None = None
        self._shape: tuple[int, ...] = ()
        if isinstance(x, tuple):
            self.arguments = tuple(tensor_of(one, f"input {place} of {name}") for place, one in enumerate(x))
        elif isinstance(x, Mapping):
            self.keywords = {key: tensor_of(one, f"input {key!r} of {name}") for key, one in x.items()}
        else:
            self.arguments = (self._enter(tensor_of(x, f"input of {name}")),)
        self._versions = [(one, one._version) for one in (*self.arguments, *self.keywords.values())]

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        anchor = torch.zeros((), requires_grad=True)
        entered: torch.Tensor = _Enter.apply(anchor, x, self._sink)
        self.edge = get_gradient_edge(entered)
        self.node = self.edge.node
        self._dtype, self._shape = x.dtype, tuple(x.shape)
        return entered

    def check_unchanged(self) -> None:
        """Raise ``UsageError`` if the module has changed its input, which is the caller's; hold it no more."""
        is_changed = any(one._version != version for one, version in self._versions)
        self._versions.clear()
        self.arguments, self.keywords = (), {}
        if is_changed:
            raise UsageError(f"{self._name}: expected a module that leaves its input as it is, got one that changes it")

    def take_gradient(self) -> Array | None:
        """Return the gradient that has arrived; zeros if none has, None if the input has none."""
        return array_of(self._sink.pop()) if self._sink else self.zeros()

    def zeros(self) -> Array | None:
        """Return the gradient of an input that the output does not depend on; None if the input has none."""
        if self._dtype is None:
            return None
        zeros: np.ndarray[Any, Any] = array_of(torch.zeros(self._shape, dtype=self._dtype))
        return zeros
