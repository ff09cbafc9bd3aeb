"""What parameters are called in messages and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from asyncpar.errors import UsageError

_WRAPPED = "module."
"""What all names begin with in a model that DistributedDataParallel has wrapped."""


class ParameterNames:
    """The names that are ``given``, or else numbers in the order in which parameters are first asked for."""

    def __init__(self, given: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        pairs = [(str(name), tensor) for name, tensor in given or ()]
        if all(name.startswith(_WRAPPED) for name, _ in pairs):
            pairs = [(name.removeprefix(_WRAPPED), tensor) for name, tensor in pairs]
        self._are_given = given is not None
        self._known = {id(tensor): (name, tensor) for name, tensor in pairs}  # a tensor that lives keeps its id

    def of(self, parameter: torch.Tensor) -> str:
        """Return the name of ``parameter``.  Raises ``UsageError`` for one that is not among those given."""
        found = self._known.get(id(parameter))
        if found is not None:
            return found[0]
        if self._are_given:
            raise UsageError(
                "parameters: expected all of the model's, as model.named_parameters() gives them, but there is none "
                f"for a tensor of shape {list(parameter.shape)}"
            )
        name = str(len(self._known))
        self._known[id(parameter)] = name, parameter
        return name

    def check(self, names: Iterable[str]) -> None:
        """Raise ``UsageError`` for a name that no parameter has, if they were given."""
        known = {name for name, _ in self._known.values()}
        unknown = sorted(set(names) - known)
        if self._are_given and unknown:
            raise UsageError(f"state: expected names of parameters, such as {min(known)!r}, got {unknown[0]!r}")
