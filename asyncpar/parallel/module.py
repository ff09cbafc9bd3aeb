"""The interface of models for data parallelism, which ``nn.Stage`` implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError

Array: TypeAlias = NDArray[np.floating[Any]]

OnGradient: TypeAlias = Callable[[str], None]
"""Called with a parameter's name as soon as its gradient is final, from the thread that runs the backward pass."""


class Trainable(Protocol):
    """A parameter: a value that an optimizer changes in place, and the gradient that backward passes add to.

    Both have one shape and floating dtype.
    """

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> Array: ...

    @property
    def grad(self) -> Array: ...


class Module(Protocol):
    """A differentiable function with parameters, as ``nn.Stage`` describes it.

    ``backward`` calls ``on_gradient`` once for each parameter that it has reached, when this call will add nothing more
    to its gradient; a parameter that it does not name counts as unused.
    """

    def forward(self, x: Any) -> tuple[Array, Any]: ...

    def backward(self, saved: Any, dy: Array, on_gradient: OnGradient | None = None) -> Array | None: ...

    def parameters(self) -> Sequence[Trainable]: ...

    def zero_grad(self) -> None: ...


@runtime_checkable
class HasTraining(Protocol):
    """A module that behaves otherwise in training than in evaluation, such as one with dropout."""

    def set_training(self, training: bool) -> None: ...


def set_training(module: Module, training: bool) -> None:
    """Tell ``module`` whether it is trained, if it wants to know."""
    if isinstance(module, HasTraining):
        module.set_training(training)


def check_device(device: object) -> str:
    """Return ``device``, which names a place to compute at.  Raises ``UsageError`` if it is no name."""
    if not isinstance(device, str) or not device.strip():
        raise UsageError(f'device: expected a name such as "cpu:0", got {device!r}')
    return device


def check_is_training(is_training: bool) -> None:
    """Raise ``UsageError`` unless the model is being trained."""
    if not is_training:
        raise UsageError("backward: the model is set to evaluation; call set_training(True) first")
