"""The parameters and buffers of a module, and whether they are still those that were there in the beginning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Parameter
from asyncpar.torch.stage.parameters import BoundParameter, bind_parameter


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
        """Those that this stage reports as final, and not one that shares them."""
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
        """Those that are trained, in the order of the module."""
        return tuple(self._bound)

    def trainable_parameter(self, tensor: torch.Tensor) -> BoundParameter:
        """Return the parameter that ``tensor`` belongs to."""
        return next(one for one in self._bound if one.tensor is tensor)

    def check(self) -> None:
        """Raise ``UsageError`` unless the module still has the parameters that it had, with their values."""
        for held, key, tensor, requires_grad in self._places:
            if held.get(key) is not tensor:
                raise UsageError(
                    f"{self._name}: expected the module to keep its parameters, but {key!r} is another tensor now; "
                    "make a new stage of it"
                )
            if tensor.requires_grad is not requires_grad:
                raise UsageError(
                    f"{self._name}: expected requires_grad of {key!r} to stay {requires_grad}, as it was when the "
                    f"stage was made, got {tensor.requires_grad}; make a new stage of it"
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
        """Return copies of the buffers for a pass that is to leave them alone."""
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
