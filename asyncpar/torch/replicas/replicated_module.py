"""The parameters and buffers of a module that ranks hold alike: all except those that a program excludes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from asyncpar.errors import UsageError
from asyncpar.torch.replicas.buckets import Replicated

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of modules in which torch keeps the names that DistributedDataParallel excludes."""

_STEPS = "_in_backward_optimizers"
"""The attribute of parameters in which torch keeps optimizers that step during backward."""


class ReplicatedModule:
    """``module`` as ranks see it.  ``ignored`` are the names of parameters and buffers that each rank has for itself.

    A tensor with several names is left out if all of them are ignored.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
        self.module = module
        self.ignored = frozenset(str(name).removeprefix(".") for name in getattr(module, _IGNORED, ()))
        self._known = {id(parameter): parameter for parameter in self.parameters()}

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that ranks hold alike, each once."""
        if not self.ignored:
            return [*self.module.parameters()]
        return [*self._names(self.module.named_parameters)]

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers that ranks hold alike, each once."""
        if not self.ignored:
            return [*self.module.buffers()]
        return [*self._names(self.module.named_buffers)]

    def trainable(self) -> list[torch.nn.Parameter]:
        """Return the parameters that require gradients."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def check_known(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Raise ``UsageError`` unless the module had all of ``parameters`` when it was wrapped."""
        strangers = {id(each) for each in parameters} - self._known.keys()
        if strangers:
            names = self._names(self.module.named_parameters)
            name = next(name for parameter, name in names.items() if id(parameter) in strangers)
            raise UsageError(
                f"parameters: expected those that were wrapped, got another one, {name}; change parameters before "
                "DistributedDataParallel(module), or wrap it again"
            )

    def check(self) -> None:
        """Raise ``UsageError`` for a module whose values ranks cannot hold alike, or that cannot be computed here."""
        for name, part in self.module.named_modules():
            if isinstance(part, torch.nn.SyncBatchNorm):
                raise UsageError(
                    f"module {name}: expected no SyncBatchNorm, which torch computes on GPUs only; use BatchNorm, "
                    "whose buffers are those of rank 0"
                )
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer) and name not in self.ignored:
                raise UsageError(
                    f"parameter {name}: expected one that has a shape, got that of a lazy module; "
                    "run module(example) once on each rank before DistributedDataParallel(module)"
                )
            if hasattr(tensor, _STEPS) and name not in self.ignored:
                raise UsageError(
                    f"parameter {name}: expected none with an optimizer that steps in backward, before gradients are "
                    "reduced; leave out _apply_optimizer_in_backward, and call "
                    "model._register_fused_optim(torch.optim.SGD, lr) to step as soon as they are"
                )

    def members(self) -> list[Replicated]:
        """Describe the parameters that require gradients, each once.  Raises ``UsageError`` if there are none."""
        self.check()
        names = {
            parameter: name
            for parameter, name in self._names(self.module.named_parameters).items()
            if parameter.requires_grad
        }
        if not names:
            raise UsageError("module: expected parameters that require gradients, got none; it needs no wrapper")
        places: dict[torch.nn.Parameter, tuple[torch.nn.Module, str]] = {}
        for owner in self.module.modules():
            for attribute, parameter in owner._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, (owner, attribute))
        return [
            Replicated.of(index, name, parameter, *places[parameter], is_sparse=_is_sparse(places[parameter][0]))
            for index, (parameter, name) in enumerate(names.items())
        ]

    def lines(self, *, has_buffers: bool) -> Iterator[str]:
        """Yield the lines that must be equal on all ranks, including buffers if ``has_buffers``."""
        found: list[tuple[str, Callable[..., Any]]] = [("parameter", self.module.named_parameters)]
        if has_buffers:
            found.append(("buffer", self.module.named_buffers))
        for kind, named in found:
            tensors: dict[torch.Tensor, str] = self._names(named)
            for tensor, name in tensors.items():
                grad = "" if kind == "buffer" or tensor.requires_grad else ", frozen"
                yield f"{kind} {name} {tensor.dtype}{list(tensor.shape)}{grad}"
        for name, part in self.module.named_modules():
            if _is_sparse(part):
                yield f"module {name} with sparse gradients"

    def _names(self, named: Callable[..., Iterable[tuple[str, Any]]]) -> dict[Any, str]:
        """Return the first name of each tensor that is not excluded."""
        found: dict[Any, str] = {}
        for name, tensor in named(remove_duplicate=False):
            if name not in self.ignored:
                found.setdefault(tensor, name)
        return found


def _is_sparse(owner: torch.nn.Module) -> bool:
    """Return whether gradients of the module's parameters are sparse tensors."""
    return isinstance(owner, _EMBEDDINGS) and owner.sparse
