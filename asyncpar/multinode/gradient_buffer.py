"""Gradients of micro-steps: taken from parameters, added up by name, and returned as means.  Pure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.placement import is_frozen
from asyncpar.core.sums import is_narrow, narrowed, sum_dtype
from asyncpar.errors import UsageError
from asyncpar.nn import Parameter
from asyncpar.nn.half import stored_dtype

Array: TypeAlias = NDArray[np.floating[Any]]


class GradientSyncBuffer:
    """Sums of gradients, each with the number of gradients in it, until they are averaged.

    Gradients of two bytes are added up in float32; their means have their own dtype.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._counts: dict[str, int] = {}
        self._is_averaged = False

    def __contains__(self, name: object) -> bool:
        return name in self._sums

    def __len__(self) -> int:
        return len(self._sums)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __getitem__(self, name: str) -> Array:
        """Return the array itself: the sum, or the mean after ``average_gradients``."""
        if name not in self._sums:
            raise UsageError(f"name: there is no gradient of {name!r} in the buffer")
        return self._sums[name]

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of gradients added, by name."""
        return MappingProxyType(self._counts)

    @property
    def gradients(self) -> Mapping[str, Array]:
        """The sums, or the means after ``average_gradients``, by name."""
        return MappingProxyType(self._sums)

    @property
    def accumulation_steps(self) -> int:
        """The largest number of gradients added to one name."""
        return max(self._counts.values(), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return sum(gradient.nbytes for gradient in self._sums.values())

    def add_gradient(self, name: str, gradient: Array, *, owns: bool = False) -> None:
        """Add ``gradient``: the part of one micro-step, not a sum over micro-steps so far.

        With ``owns`` the array belongs to the buffer from now on, and may become the sum; otherwise it is copied.
        Raises ``UsageError`` for another shape or dtype than before, and between averaging and clearing.
        """
        self._check_open("add_gradient")
        if not np.issubdtype(gradient.dtype, np.floating):
            raise UsageError(f"gradient of {name}: expected a floating dtype, got {gradient.dtype}")
        known, dtype = self._sums.get(name), self._dtypes.setdefault(name, gradient.dtype)
        if known is None:
            is_ours = owns and gradient.flags.c_contiguous and gradient.flags.writeable
            self._sums[name] = gradient.astype(sum_dtype(dtype), order="C", copy=not is_ours)
        elif (known.shape, dtype) != (gradient.shape, gradient.dtype):
            raise UsageError(
                f"gradient of {name}: expected {dtype}{list(known.shape)} as before, "
                f"got {gradient.dtype}{list(gradient.shape)}"
            )
        else:
            known += gradient
        self._counts[name] = self._counts.get(name, 0) + 1

    def add_nothing(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Ensure that there is a sum of ``name``, without counting a gradient."""
        self._check_open("add_nothing")
        if name not in self._sums:
            self._sums[name], self._dtypes[name] = np.zeros(shape, sum_dtype(dtype)), dtype
            self._counts[name] = 0

    def pop(self, name: str) -> Array:
        """Return the array of ``name``, in the dtype of its gradients, and forget it."""
        gradient = narrowed(self[name], self._dtypes[name])
        del self._sums[name], self._counts[name], self._dtypes[name]
        return gradient

    def average_gradients(self, micro_steps: int | None = None) -> Mapping[str, Array]:
        """Turn each sum into the mean over ``micro_steps``, by default over its number of gradients; return the means.

        A parameter with a gradient in fewer than ``micro_steps`` had zero in the others.  Divides once, however often
        it is called until ``clear``.  Raises ``UsageError`` if a name counts more than ``micro_steps``.
        """
        if not self._is_averaged:
            self._divide(micro_steps)
            self._is_averaged = True
        return MappingProxyType(self._sums)

    def multiply(self, factor: float) -> None:
        """Multiply all sums, or means, by ``factor``."""
        for gradient in self._sums.values():
            gradient *= factor

    def clear(self) -> None:
        """Forget all sums, and free their memory."""
        self._sums, self._counts, self._dtypes, self._is_averaged = {}, {}, {}, False

    def _divide(self, micro_steps: int | None) -> None:
        if micro_steps is not None and micro_steps < 1:
            raise UsageError(f"micro_steps: expected 1 or more, got {micro_steps}")
        for name, count in self._counts.items():
            if micro_steps is not None and count > micro_steps:
                raise UsageError(f"micro_steps: expected at least {count}, the gradients of {name}, got {micro_steps}")
        for name, gradient in self._sums.items():
            gradient /= max(1, self._counts[name]) if micro_steps is None else micro_steps
            self._sums[name] = narrowed(gradient, self._dtypes[name])

    def _check_open(self, what: str) -> None:
        if self._is_averaged:
            raise UsageError(f"{what}: the gradients have been averaged; clear the buffer first")


class BufferedGradient:
    """The sum in a buffer, as a gradient to synchronize; read-only zeros if there is none."""

    def __init__(self, parameter: Parameter, buffer: GradientSyncBuffer) -> None:
        self.name = parameter.name
        self._parameter = parameter
        self._buffer = buffer
        self._zeros = np.broadcast_to(np.zeros((), sum_dtype(parameter.dtype)), parameter.shape)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        return not is_frozen(self._parameter)

    @property
    def grad(self) -> NDArray[np.floating[Any]]:
        if self.name in self._buffer:
            return self._buffer[self.name]
        return self._zeros


class GradientIntake:
    """The gradients of ``parameters`` in ``buffer``, and their number of micro-steps.

    A micro-step is added whole by ``add``, or parameter by parameter between ``open`` and ``complete``.  Sums are in
    the compute dtype, even for parameters that are stored in half precision.  Frozen ones have none.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.buffer = GradientSyncBuffer()
        self.micro_steps = 0
        self._by_name = {parameter.name: parameter for parameter in parameters}
        self.gradients = tuple(BufferedGradient(parameter, self.buffer) for parameter in parameters)
        """The sums of all parameters."""
        self._expected: set[str] = set()
        self._lock = threading.Lock()

    def add(self, gradients: Mapping[str, Array] | None) -> None:
        """Add a micro-step: ``gradients`` by name, or those of the parameters, which have none afterwards.

        Raises ``UsageError``, with nothing added, for gradients that do not fit.
        """
        if gradients is None:
            for name in self._by_name:
                self._take(name)
        else:
            for name, gradient in gradients.items():
                self._check(name, gradient)
            for name, gradient in gradients.items():
                if not is_frozen(self._by_name[name]):
                    self.buffer.add_gradient(name, gradient)
        self.micro_steps += 1

    def open(self) -> None:
        """Begin a micro-step whose gradients arrive one by one, by ``take``."""
        with self._lock:
            self._expected = set(self._by_name)
        self.micro_steps += 1

    def take(self, name: str, report: Callable[[str], None]) -> None:
        """Take the gradient of ``name``, once per micro-step, and ``report`` it as final.  From any thread.

        Has no effect if the micro-step is over or abandoned: a worker thread need not know.
        """
        with self._lock:
            if name not in self._by_name:
                raise UsageError(f"name: expected a registered parameter, got {name!r}")
            if not self._expected:
                return
            if name not in self._expected:
                raise UsageError(f"name: the gradient of {name!r} was reported twice in one micro-step")
            self._expected.remove(name)
            self._take(name)
        report(name)

    def complete(self) -> None:
        """End the micro-step: gradients that were not reported are taken now."""
        with self._lock:
            rest, self._expected = self._expected, set()
            for name in self._by_name:
                if name in rest:
                    self._take(name)

    def fill(self) -> None:
        """Allocate the means of parameters without gradients here."""
        for name, parameter in self._by_name.items():
            if is_frozen(parameter):
                continue
            self.buffer.add_nothing(name, parameter.shape, parameter.dtype)

    @property
    def gives_means(self) -> bool:
        """Whether ``give_back`` divides by the number of micro-steps: parameters of two bytes may not hold the sums."""
        return any(is_narrow(stored_dtype(parameter)) for parameter in self.parameters)

    def give_back(self, name: str | None = None) -> None:
        """Make the sum of gradients of the parameter ``name``, by default of all, its gradient.

        Or the mean over micro-steps: see ``gives_means``.
        """
        self._hand_back(
            list(self.buffer) if name is None else [name], divisor=self.micro_steps if self.gives_means else 1
        )

    def hand_over(self, micro_steps: int, *, weight: int) -> None:
        """Give parameters ``weight`` times their means over ``micro_steps``, and forget the sums."""
        self.buffer.average_gradients(micro_steps)
        if weight != 1:
            self.buffer.multiply(weight)
        self._hand_back(list(self.buffer), divisor=1)
        self.clear()

    def drop(self) -> None:
        """Forget the sums and the gradients of parameters."""
        with self._lock:
            self._expected = set()
            self.clear()
            for parameter in self._by_name.values():
                parameter.release_grad()

    def clear(self) -> None:
        """Forget the sums."""
        self.buffer.clear()
        self.micro_steps = 0

    def _hand_back(self, names: Iterable[str], *, divisor: int) -> None:
        with self._lock:
            for name in names:
                if name in self.buffer:
                    if divisor > 1:
                        total = self.buffer[name]
                        total /= np.asarray(divisor, total.dtype)
                    self._by_name[name].grad = self.buffer.pop(name)

    def _take(self, name: str) -> None:
        """Remove the array itself from the parameter, which makes another one when needed."""
        parameter = self._by_name[name]
        if parameter.has_grad and not is_frozen(parameter):
            gradient = parameter.grad.astype(parameter.dtype, copy=False)
            parameter.release_grad()
            self.buffer.add_gradient(name, gradient, owns=True)

    def _check(self, name: str, gradient: Array) -> None:
        parameter = self._by_name.get(name)
        if parameter is None:
            raise UsageError(f"gradients: expected names of registered parameters, got {name!r}")
        if (gradient.shape, gradient.dtype) != (parameter.shape, parameter.dtype):
            raise UsageError(
                f"gradient of {name}: expected {parameter.dtype}{list(parameter.shape)}, "
                f"got {gradient.dtype}{list(gradient.shape)}"
            )
