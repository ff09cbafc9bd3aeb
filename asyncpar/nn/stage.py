"""The interface of everything that can be trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, OnGradient, Parameter

Saved = TypeVar("Saved")


class Stage(ABC, Generic[Saved]):
    """A differentiable function with parameters.

    ``backward`` needs nothing but what ``forward`` returned as ``saved``, so several micro-batches may be in flight.  A
    stage keeps no other state, and neither method changes its array arguments, with one exception that the layers
    state where they use it: ``backward`` may overwrite what is in ``saved``, so a saved value serves one backward.
    """

    @abstractmethod
    def forward(self, x: Any) -> tuple[Array, Saved]:
        """Return the output and what ``backward`` will need.

        Raises ``UsageError`` when the shape of ``x`` does not fit.
        """

    @abstractmethod
    def backward(self, saved: Saved, dy: Array, on_gradient: OnGradient | None = None) -> Array | None:
        """Add the parameters' gradients to their ``grad`` and return the gradient of the input.

        The result is None where the input has no gradient (token numbers).  ``on_gradient`` is called once for each
        parameter when nothing more will be added to its gradient by this call; pass it in the last micro-batch only.
        """

    @abstractmethod
    def parameters(self) -> tuple[Parameter, ...]:
        """Return all parameters in registration order, which is the order of the forward pass."""

    def zero_grad(self) -> None:
        """Forget all accumulated gradients."""
        for parameter in self.parameters():
            parameter.zero_grad()


def report(parameters: Iterable[Parameter], on_gradient: OnGradient | None) -> None:
    """Tell ``on_gradient``, if there is one, that the gradients of ``parameters`` are final."""
    if on_gradient is not None:
        for parameter in parameters:
            on_gradient(parameter.name)


def check_features(name: str, x: Array, features: int) -> None:
    """Raise ``UsageError`` unless the last dimension of ``x`` is ``features``."""
    if x.ndim < 1 or x.shape[-1] != features:
        raise UsageError(f"{name}: expected an input of shape (..., {features}), got {x.shape}")


def check_gradient(name: str, dy: Array, shape: tuple[int, ...]) -> None:
    """Raise ``UsageError`` unless ``dy`` has the shape of the output it is the gradient of."""
    if dy.shape != shape:
        raise UsageError(f"{name}: expected an output gradient of shape {shape}, got {dy.shape}")


def check_positive(name: str, **sizes: int) -> None:
    """Raise ``UsageError`` that names the first of ``sizes`` which is not a positive integer."""
    for what, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name}: {what} must be a positive integer, got {size!r}")
