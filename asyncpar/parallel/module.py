"""The interface of models for data parallelism, which ``nn.Stage`` implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError

T = TypeVar("T")

Array: TypeAlias = NDArray[np.floating[Any]]

OnGradient: TypeAlias = Callable[[str], None]
"""Called with a parameter's name as soon as its gradient is final, from the thread that runs the backward pass."""


class Trainable(Protocol):
    """A parameter: a value that an optimizer changes in place, and the gradient that backward passes add to.

    Both have one shape and floating dtype, and are on the host or on one CUDA device.
    """

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> Array: ...

    @property
    def grad(self) -> Array: ...


class Model(Protocol):
    """The minimal interface of a model for data parallelism; ``Module`` has more.

    ``forward`` returns the output and the state of this pass for ``backward``; ``backward(saved, dy)`` adds to the
    gradients of the parameters and returns that of the input, or None.  If it also takes ``on_gradient``, it reports
    final gradients by it (see ``Module``), so that they are sent while it computes others.
    """

    def forward(self, x: Any, /) -> tuple[Array, Any]: ...

    @property
    def backward(self) -> Callable[..., Array | None]: ...

    def parameters(self) -> Sequence[Trainable]: ...


class Module(Protocol):
    """A differentiable function with parameters, as described by ``nn.Stage``.

    ``backward`` calls ``on_gradient`` once for each parameter that it has reached, when this call will add nothing more
    to its gradient; a parameter that it does not report counts as unused.
    """

    def forward(self, x: Any) -> tuple[Array, Any]: ...

    def backward(self, saved: Any, dy: Array, on_gradient: OnGradient | None = None) -> Array | None: ...

    def parameters(self) -> Sequence[Trainable]: ...

    def zero_grad(self) -> None: ...


@runtime_checkable
class HasTraining(Protocol):
    """A module that behaves differently in training and evaluation, such as one with dropout."""

    def set_training(self, training: bool) -> None: ...


class Buffer(Protocol):
    """An array of any dtype that a module changes without a gradient, such as a running average."""

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> NDArray[Any]: ...


@runtime_checkable
class HasBuffers(Protocol):
    """A module with buffers, which replicas initialize with the values of rank 0."""

    def buffers(self) -> Sequence[Buffer]: ...


@runtime_checkable
class HasStream(Protocol):
    """A module on a device that computes in its own stream, where its parameters must be changed, too."""

    def current(self) -> AbstractContextManager[object]:
        """Return a context that makes its stream current in the calling thread."""
        ...


def in_stream_of(module: object, work: Callable[[], T]) -> T:
    """Run ``work`` in the stream of ``module``."""
    with module.current() if isinstance(module, HasStream) else nullcontext():
        return work()


def buffers_of(module: object) -> tuple[Buffer, ...]:
    """Return the buffers of ``module``; () if it has none."""
    return tuple(module.buffers()) if isinstance(module, HasBuffers) else ()


def set_training(module: object, training: bool) -> None:
    """Set the training mode of ``module``, if it has one."""
    if isinstance(module, HasTraining):
        module.set_training(training)


def check_device(device: object) -> str:
    """Return ``device``, which names a place to compute.  Raises ``UsageError`` if it is not a name."""
    if not isinstance(device, str) or not device.strip():
        raise UsageError(f'device: expected a name such as "cpu:0", got {device!r}')
    return device


def check_is_training(is_training: bool) -> None:
    """Raise ``UsageError`` unless the model is being trained."""
    if not is_training:
        raise UsageError("backward: the model is set to evaluation; call set_training(True) first")
