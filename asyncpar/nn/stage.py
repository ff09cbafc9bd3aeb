"""The interface of trainable layers and models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from asyncpar.core.array_pool import ArrayPool
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, OnGradient, Parameter

Saved = TypeVar("Saved")

WeightWork: TypeAlias = Callable[[OnGradient | None], None]
"""Adds to the gradients of some parameters and then reports them as final."""

Deferred: TypeAlias = list[WeightWork]
"""Deferred work on weight gradients, in order."""


class Stage(ABC, Generic[Saved]):
    """A differentiable function with parameters.

    ``backward`` needs only the ``saved`` value that ``forward`` returned, so several micro-batches may be in flight.  A
    stage keeps no other state, only memory for results (``use_memory``), and neither method changes its array
    arguments, with one exception that the layers state where they use it: ``backward`` may overwrite the contents of
    ``saved``, so a saved value serves one backward.
    """

    memory: ArrayPool | None = None
    """Source of memory for large outputs and gradients; None: numpy."""

    @abstractmethod
    def forward(self, x: Any) -> tuple[Array, Saved]:
        """Return the output and the saved value for ``backward``.

        Raises ``UsageError`` if the shape of ``x`` does not fit.
        """

    def forward_again(self, x: Any) -> tuple[Array, Saved]:
        """Repeat ``forward`` for ``x``, with generators restored by the caller.

        It leaves no lasting change: a stage whose ``forward`` changes anything but its generators, such as running
        averages, overrides this, and one that consists of stages passes the call on.
        """
        return self.forward(x)

    @abstractmethod
    def backward(
        self, saved: Saved, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array | None:
        """Add the parameters' gradients to their ``grad`` and return the gradient of the input.

        The result is None if the input has no gradient (token numbers).  ``on_gradient`` is called once for each
        parameter when this call will add nothing more to its gradient; pass it in the last micro-batch only.  Given
        ``deferred``, a layer appends its work on weight gradients there (``add_weight_gradients``) instead of doing it,
        and ``on_gradient`` is not called.
        """

    def backward_input(self, saved: Saved, dy: Array) -> tuple[Array | None, Deferred]:
        """Return the gradient of the input, and the remaining work for the parameters' gradients.

        Both halves together equal ``backward``, to the last bit (Qi et al. 2023, Zero Bubble Pipeline Parallelism).
        """
        deferred: Deferred = []
        return self.backward(saved, dy, None, deferred), deferred

    def backward_weight(self, deferred: Deferred, on_gradient: OnGradient | None = None) -> None:
        """Do the work deferred by ``backward_input``; ``deferred`` is empty afterwards.

        ``on_gradient`` is called once for each parameter, as in ``backward``.
        """
        while deferred:
            deferred.pop(0)(on_gradient)

    @abstractmethod
    def parameters(self) -> tuple[Parameter, ...]:
        """Return all parameters in registration order, which is the order of the forward pass."""

    def generators(self) -> tuple[np.random.Generator, ...]:
        """Return the random generators that ``forward`` uses, in a fixed order."""
        return ()

    def use_memory(self, memory: ArrayPool) -> None:
        """Take the memory of large results from ``memory`` from now on, so that one step's memory serves the next.

        A stage that consists of others passes it on to them.
        """
        self.memory = memory

    def allocate(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an uninitialized array, in the memory of this stage."""
        array: Array = (np if self.memory is None else self.memory).empty(shape, dtype)
        return array

    def zero_grad(self) -> None:
        """Forget all accumulated gradients."""
        for parameter in self.parameters():
            parameter.zero_grad()


def add_weight_gradients(work: WeightWork, on_gradient: OnGradient | None, deferred: Deferred | None) -> None:
    """Do ``work`` now, or append it to ``deferred`` if given."""
    if deferred is None:
        work(on_gradient)
    else:
        deferred.append(work)


def report(parameters: Iterable[Parameter], on_gradient: OnGradient | None) -> None:
    """Report to ``on_gradient``, if given, that the gradients of ``parameters`` are final."""
    if on_gradient is not None:
        for parameter in parameters:
            on_gradient(parameter.name)


def check_features(name: str, x: Array, features: int) -> None:
    """Raise ``UsageError`` unless the last dimension of ``x`` is ``features``."""
    if x.ndim < 1 or x.shape[-1] != features:
        raise UsageError(f"{name}: expected an input of shape (..., {features}), got {x.shape}")


def check_gradient(name: str, dy: Array, shape: tuple[int, ...]) -> None:
    """Raise ``UsageError`` unless ``dy`` has the shape of the output that it is the gradient of."""
    if dy.shape != shape:
        raise UsageError(f"{name}: expected an output gradient of shape {shape}, got {dy.shape}")


def check_positive(name: str, **sizes: int) -> None:
    """Raise ``UsageError`` naming the first of ``sizes`` that is not a positive integer."""
    for what, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name}: {what} must be a positive integer, got {size!r}")
