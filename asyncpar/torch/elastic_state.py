"""A torch model and its optimizers as the state of an elastic job: arrays over their memory, and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.nn.modules.batchnorm import _NormBase

from asyncpar.collectives.arrays import Array
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import array_of, tensor_of

_KNOWN: Final = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Optimizers of ``torch.optim`` whose states before the first step are known: zeros, except for these."""

_FIRST_VALUES: Final[Mapping[tuple[str, str], Callable[[Mapping[str, Any]], float]]] = {
    ("NAdam", "mu_product"): lambda _: 1.0,
    ("ASGD", "mu"): lambda _: 1.0,
    ("ASGD", "eta"): lambda group: float(group["lr"]),
    ("Rprop", "step_size"): lambda group: float(group["lr"]),
}


Named: TypeAlias = "dict[str, torch.Tensor]"


class ModelState:
    """The parameters and buffers of ``model``, by name.

    Running statistics of normalizations over a batch (``running_mean`` and such) are averaged over all portions like
    gradients, since each rank sees other portions.  Raises ``UsageError`` for anything that cannot be the state of a
    job.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        for module in model.modules():
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                raise UsageError("model: DistributedDataParallel reduces gradients itself; pass the module in it")
        self._model = model
        parameters = dict(model.named_parameters())
        self._trained = {name: one for name, one in parameters.items() if one.requires_grad}
        if not self._trained:
            raise UsageError("model: expected parameters with requires_grad, got none")
        self._buffers = dict(model.named_buffers())
        self._running = {name: self._buffers[name] for name in _running_names(model) if name in self._buffers}
        self._tensors = {**parameters, **self._buffers}
        arrays = {name: array_of(one.detach(), name) for name, one in self._tensors.items()}
        self.trained = {name: arrays[name] for name in self._trained}
        """The parameters that have gradients."""
        self.others = {name: array for name, array in arrays.items() if name not in self._trained}
        """Frozen parameters, and buffers."""
        self._addresses = {name: one.data_ptr() for name, one in self._tensors.items()}
        self._committed: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}

    @property
    def has_running_statistics(self) -> bool:
        """Whether the model normalizes by statistics of the batches that it has seen."""
        return bool(self._running)

    @property
    def names(self) -> dict[int, str]:
        """The names of trained parameters by identity."""
        return {id(one): name for name, one in self._trained.items()}

    def check_same(self) -> None:
        """Raise ``UsageError`` naming a tensor that has been replaced since the job began."""
        present: Named = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        for name in {**self._tensors, **present}:
            address = present[name].data_ptr() if name in present else None
            if present.get(name) is not self._tensors.get(name) or address != self._addresses[name]:
                raise UsageError(
                    f"model: {name} is not the tensor that it was when the job began; build the whole model before, "
                    "and change its tensors in place (copy_)"
                )

    def begin_step(self) -> None:
        """Record the committed running statistics, from which each portion continues."""
        self._committed = {name: one.clone() for name, one in self._running.items()}

    def begin_portion(self) -> None:
        """Drop gradients, and record the contents of other buffers."""
        self.drop_gradients()
        self._versions = {name: one._version for name, one in self._buffers.items() if name not in self._running}

    def portion(self) -> list[Array]:
        """Return the gradients of a portion, zeros if there is none, and its running statistics.

        Raises ``UsageError`` naming another buffer that it has changed.
        """
        for name, version in self._versions.items():
            if self._buffers[name]._version != version:
                raise UsageError(
                    f"model: the forward pass has changed the buffer {name} by what it has seen, and each rank sees "
                    "other portions; change it after step.update(), alike on all ranks"
                )
        gradients = [_gradient(one, name) for name, one in self._trained.items()]
        return [*gradients, *(array_of(_as_floats(one), name) for name, one in self._running.items())]

    def end_portion(self) -> None:
        """Restore the state at the beginning of this portion for the next one."""
        self.drop_gradients()
        for name, one in self._running.items():
            one.copy_(self._committed[name])

    def take(self, means: Sequence[Array]) -> None:
        """Give parameters their mean gradients, and running statistics their means."""
        own, statistics = means[: len(self._trained)], means[len(self._trained) :]
        for parameter, gradient in zip(self._trained.values(), own, strict=True):
            parameter.grad = tensor_of(gradient).view_as(parameter)
        for one, mean in zip(self._running.values(), statistics, strict=True):
            one.copy_(tensor_of(mean).view_as(one))

    def drop_gradients(self) -> None:
        """Remove the gradients of all parameters."""
        for parameter in self._trained.values():
            parameter.grad = None


def _running_names(model: torch.nn.Module) -> list[str]:
    return [
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats
        for name in ("running_mean", "running_var", "num_batches_tracked")
    ]


def _gradient(parameter: torch.nn.Parameter, name: str) -> Array:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"gradient of {name}: expected a dense tensor, got {gradient.layout}; build it with sparse=False"
        )
    return array_of(gradient.detach().contiguous(), f"gradient of {name}")


def _as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers that can be averaged: counts, which are equal after all portions, exactly."""
    return tensor.detach().clone() if tensor.is_floating_point() else tensor.detach().to(torch.float64)


class OptimizerState:
    """The states of ``optimizer``, called ``name``, whose parameters have ``names`` by identity.

    States that it would create in its first step are created now, with their values before that step.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"{name}: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.name = name
        self._moved: dict[str, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise UsageError(f"{name}: it moves a tensor of shape {list(parameter.shape)} that the model lacks")
                self._moved[names[id(parameter)]] = parameter
        if not optimizer.state:
            _make_states(name, optimizer)
        self.others = {f"{name}.{place}": array_of(one, f"{name}.{place}") for place, one in self._tensors().items()}
        """The states that are tensors."""
        self._addresses = {place: one.data_ptr() for place, one in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{parameter}.{kind}": value
            for parameter, one in self._moved.items()
            for kind, value in self._state_of(one).items()
            if isinstance(value, torch.Tensor)
        }

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(parameter, {})  # reading must not create one
        return found

    def check_same(self) -> None:
        """Raise ``UsageError`` naming a state tensor that has been replaced since the job began."""
        found = {place: one.data_ptr() for place, one in self._tensors().items()}
        for place in {**self._addresses, **found}:
            if found.get(place) != self._addresses.get(place):
                raise UsageError(
                    f"{self.name}: the state {place} is not the tensor that it was when the job began; load states "
                    "before the job, and add no parameters later"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of its groups, and the states that are not tensors."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        values = {
            name: {kind: value for kind, value in self._state_of(one).items() if not isinstance(value, torch.Tensor)}
            for name, one in self._moved.items()
        }
        return {"groups": groups, "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        if len(state["groups"]) != len(self._groups):
            raise UsageError(
                f"{self.name}: expected {len(self._groups)} groups, the others have {len(state['groups'])}"
            )
        for group, settings in zip(self._groups, state["groups"], strict=True):
            group.update(settings)
        for name, values in state["values"].items():
            self._state_of(self._moved[name]).update(values)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


def _make_states(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer`` create the states of its first step with their initial values; parameters are unchanged."""
    kind = type(optimizer).__name__
    if kind not in _KNOWN or not type(optimizer).__module__.startswith("torch.optim."):
        raise UsageError(
            f"{name}: expected one of torch.optim ({', '.join(_KNOWN)}), or one that has made a step, so that its "
            f"states are there; got {kind}"
        )
    if kind == "SGD" and any(group["momentum"] and group["dampening"] for group in optimizer.param_groups):
        raise UsageError(f"{name}: with dampening the first step of SGD differs from the rest; take one step before")
    moved = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    before = [(parameter.grad, parameter.detach().clone()) for parameter, _ in moved]
    for parameter, _ in moved:
        parameter.grad = torch.zeros_like(parameter)
    type(optimizer).step(optimizer)  # not the value that a scheduler has put in its place, which counts
    with torch.no_grad():
        for (parameter, group), (gradient, value) in zip(moved, before, strict=True):
            parameter.copy_(value)
            parameter.grad = gradient
            for place, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor):
                    first = _FIRST_VALUES.get((kind, place))
                    state.fill_(0.0 if first is None else first(group))


class Arithmetic:
    """The settings on which bits depend besides the state: the version of torch and the number of its threads."""

    def state_dict(self) -> dict[str, Any]:
        """Return both settings."""
        return {"version": str(torch.__version__), "threads": torch.get_num_threads()}

    def load_state_dict(self, others: Mapping[str, Any]) -> None:
        """Raise ``UsageError`` unless they equal those of the training ranks."""
        mine = self.state_dict()
        if mine != dict(others):
            raise UsageError(
                f"torch: version {mine['version']} and {mine['threads']} threads here, version {others['version']} and "
                f"{others['threads']} threads on the ranks that train; sums would have other bits: install the same, "
                "and call torch.set_num_threads"
            )


def checked_optimizers(optimizers: object) -> list[torch.optim.Optimizer]:
    """Return one or several optimizers as a list.  Raises ``UsageError`` if there are none."""
    found = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    if not found:
        raise UsageError("optimizer: expected at least one, got none")
    return found
