"""The parameters and buffers of a stage's module, and the check that the module still has them.

torch's values are authoritative: changes by an optimizer of torch, or by ``load_state_dict`` or ``zero_grad`` of
the module, are visible here, and those by asyncpar's optimizers, ``ZeroEngine`` and ``GradientSynchronizer`` in torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncpar.core.sums import is_narrow
from asyncpar.errors import UsageError
from asyncpar.nn.half import HalfParameter
from asyncpar.nn.parameter import Array, Parameter, add_rounded
from asyncpar.torch.arrays import array_of, tensor_of

_SINGLE = (torch.float32, torch.float64)
_HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class BoundParameter(Parameter):
    """A parameter whose arrays are the memory of ``tensor`` and of its ``grad``.

    While the value is released, the tensor holds NaN in one cell of memory.
    """

    # -- the value -----------------------------------------------------------------------------------------------------

    def bind(self, tensor: torch.Tensor) -> None:
        """Use the memory of ``tensor``, which is made contiguous if it is not."""
        self.tensor = tensor
        self._seen: torch.Tensor | None = None
        self._grad = None
        self._adopt_value()

    def _adopt_value(self) -> None:
        if not self.tensor.is_contiguous():
            self.tensor.data = self.tensor.data.contiguous()
        value: Array = array_of(self.tensor, f"parameter {self.name}")
        super().restore_value(value)  # refuses another shape or dtype
        self._value = value
        self._address = self.tensor.data_ptr()

    def follow(self) -> None:
        """Use the tensor's current memory, which a program may have replaced."""
        if self._value is not None and self.tensor.data_ptr() != self._address:
            self._adopt_value()

    def release_value(self) -> None:
        super().release_value()
        self.tensor.data = torch.full((), math.nan, dtype=self.tensor.dtype).expand(self.shape)

    def restore_value(self, value: Array) -> None:
        super().restore_value(value)
        assert self._value is not None, "it was restored"
        self.tensor.data = tensor_of(self._value)
        self._adopt_value()

    # -- the gradient --------------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Array:
        """The gradient; reading it creates one of zeros if the tensor has none."""
        gradient = self.tensor.grad
        if gradient is None:
            gradient = self.tensor.grad = torch.zeros(self.shape, dtype=self.tensor.dtype)
        if gradient is not self._seen or self._grad is None:
            self._adopt_gradient(gradient)
        found: Array | None = self._grad
        assert found is not None, "it was adopted"
        return found

    @grad.setter
    def grad(self, gradient: Array) -> None:
        of_base: Any = super(BoundParameter, type(self)).grad
        of_base.__set__(self, gradient)
        assert self._grad is not None, "it was set"
        self._adopt_gradient(tensor_of(self._grad))

    def accumulate(self, gradient: Array | float, at: Any = ...) -> None:
        """Add to the tensor's gradient, the only one, like torch: one of two bytes is rounded each time."""
        if not self.requires_grad:
            return
        total = self.grad
        if is_narrow(total.dtype):
            add_rounded(total, gradient, at)
        else:
            total[at] += gradient

    @property
    def has_grad(self) -> bool:
        """Whether the tensor has a gradient."""
        return self.tensor.grad is not None

    def zero_grad(self) -> None:
        if self.tensor.grad is not None:
            self.grad.fill(0.0)

    def release_grad(self) -> None:
        self.tensor.grad = None
        self._seen = None
        self._grad = None

    def _adopt_gradient(self, gradient: torch.Tensor) -> None:
        if gradient is not self.tensor.grad or not gradient.is_contiguous():
            self.tensor.grad = gradient.contiguous()
        self._seen = self.tensor.grad
        self._grad = array_of(self.tensor.grad, f"gradient of {self.name}")


class ModuleParameter(BoundParameter):
    """A parameter of float32 or float64."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        super().__init__(name, array_of(tensor, f"parameter {name}"))
        self.bind(tensor)

    @property
    def value(self) -> Array:
        """The memory of the tensor.  Raises ``UsageError`` while it is released."""
        self.follow()
        return super().value

    @value.setter
    def value(self, value: Array) -> None:
        self.restore_value(value)


class HalfModuleParameter(BoundParameter, HalfParameter):
    """A parameter of bfloat16 or float16: ``stored`` is the memory of the tensor, ``value`` a copy in float32."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        stored = array_of(tensor, f"parameter {name}")
        HalfParameter.__init__(self, name, stored.astype(np.float32), storage=_HALF[tensor.dtype])
        self.bind(tensor)

    @property
    def stored(self) -> Array:
        """The memory of the tensor.  Raises ``UsageError`` while it is released."""
        self.follow()
        if self._value is None:
            raise UsageError(f"parameter {self.name}: its value is released; gather it before it is used")
        return self._value


def bind_parameter(name: str, tensor: torch.Tensor) -> BoundParameter:
    """Return the parameter called ``name`` over the memory of ``tensor``.

    Raises ``UsageError`` unless it is a plain tensor of floating-point numbers in the memory of the CPU.
    """
    if type(tensor.data) is not torch.Tensor:
        raise UsageError(f"parameter {name}: expected a plain tensor, got a {type(tensor.data).__name__}")
    if tensor.dtype in _SINGLE:
        return ModuleParameter(name, tensor)
    if tensor.dtype in _HALF:
        return HalfModuleParameter(name, tensor)
    expected = ", ".join(str(dtype) for dtype in (*_SINGLE, *_HALF))
    raise UsageError(f"parameter {name}: expected one of {expected}, got {tensor.dtype}")


class ModuleState:
    """Parameters of the stage ``name`` over those of ``module``; ones in ``shared`` are taken from there."""

    def __init__(self, name: str, module: torch.nn.Module, shared: Sequence[BoundParameter], *, has_seed: bool) -> None:
        self._name = name
        self._module = module
        self._prefix = f"{name}." if name else ""
        known = {id(one.tensor): one for one in shared}
        self._all = dict(module.named_parameters())
        for place, tensor in (*self._all.items(), *module.named_buffers()):
            _check_place(f"{self._prefix}{place}", tensor)
        if not has_seed:
            _check_draws_nothing(name, module)
        self._bound: list[BoundParameter] = []
        self.reported: list[BoundParameter] = []
        """The parameters that this stage, rather than a stage that shares them, reports as final."""
        for place, tensor in self._all.items():
            if not tensor.requires_grad:
                continue
            found = known.get(id(tensor))
            if found is None:
                found = bind_parameter(f"{self._prefix}{place}", tensor)
                self.reported.append(found)
            self._bound.append(found)
        self.trainable: Mapping[int, torch.Tensor] = {id(one.tensor): one.tensor for one in self._bound}
        self._places = [
            (held, key, tensor, tensor.requires_grad)
            for part in module.modules()
            for held in (part._parameters,)
            for key, tensor in held.items()
            if tensor is not None
        ]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The trained parameters, in the order of the module."""
        return tuple(self._bound)

    def trainable_parameter(self, tensor: torch.Tensor) -> BoundParameter:
        """Return the parameter of ``tensor``."""
        return next(one for one in self._bound if one.tensor is tensor)

    def check(self) -> None:
        """Raise ``UsageError`` unless the module still has its original parameters, with their values."""
        for held, key, tensor, requires_grad in self._places:
            if held.get(key) is not tensor:
                raise UsageError(
                    f"{self._name}: expected the module to keep its parameters, but {key!r} is another tensor now; "
                    "make a new stage of it"
                )
            if tensor.requires_grad is not requires_grad:
                raise UsageError(
                    f"{self._name}: expected requires_grad of {key!r} to stay {requires_grad}, as it was when the "
                    f"stage was made, got {tensor.requires_grad}; set requires_grad of the stage's parameter, or make "
                    "a new stage of it"
                )
        for parameter in self._bound:
            if parameter.is_released:
                raise UsageError(f"parameter {parameter.name}: its value is released; gather it before it is used")
            parameter.follow()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all parameters and buffers."""
        yield from self._all.values()
        yield from self._module.buffers()

    def spare_buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of the buffers, for a pass that must not change them."""
        return {place: buffer.clone() for place, buffer in self._module.named_buffers()}

    def call(self, buffers: Mapping[str, torch.Tensor], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Run the module, with ``buffers`` instead of its own."""
        if not buffers:
            return self._module(*arguments, **keywords)
        return torch.func.functional_call(self._module, dict(buffers), tuple(arguments), dict(keywords))


def _check_place(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UsageError(f"{name}: expected a tensor in the CPU's memory, got one on {tensor.device}")


def _check_draws_nothing(name: str, module: torch.nn.Module) -> None:
    for place, part in module.named_modules():
        rate = getattr(part, "p", None) if isinstance(part, torch.nn.modules.dropout._DropoutNd) else None
        rate = part.dropout if isinstance(part, torch.nn.MultiheadAttention) else rate
        if rate:
            raise UsageError(
                f"seed: expected a number for {name}, because its {place or 'module'} draws random numbers, got None"
            )
