"""Checks of user-written models: an interface that data parallelism cannot call is refused, showing the right form."""

from __future__ import annotations

import enum
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from asyncpar.core.config.placement import is_frozen
from asyncpar.device.arrays import is_device_array
from asyncpar.errors import UsageError
from asyncpar.parallel.gradients import zero
from asyncpar.parallel.module import Array, OnGradient, Trainable

_log = logging.getLogger(__name__)

_WANTED: Final = """
a model for data parallelism has these methods (plain functions; they run in a thread):
    def forward(self, x) -> tuple[y, saved]: ...              # saved: what backward needs of this pass
    def backward(self, saved, dy, on_gradient=None): ...      # adds to grad of its parameters; returns dx, or None
        # calls on_gradient(parameter.name) as soon as that gradient is final: then it travels at once
    def parameters(self): ...                                 # a list of asyncpar.nn.Parameter("w", array)
    def zero_grad(self): ...                                  # optional"""


class _Report(enum.Enum):
    """The ways in which ``backward`` accepts ``on_gradient``."""

    POSITIONAL = enum.auto()
    KEYWORD = enum.auto()
    NONE = enum.auto()


_Form: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""Positional and keyword arguments of a call."""

_BACKWARD: Final[dict[_Report, _Form]] = {
    _Report.POSITIONAL: (("saved", "dy", "on_gradient"), ()),
    _Report.KEYWORD: (("saved", "dy"), ("on_gradient",)),
    _Report.NONE: (("saved", "dy"), ()),
}
_CALLS: Final[dict[str, tuple[_Form, ...]]] = {
    "forward": ((("x",), ()),),
    "backward": tuple(_BACKWARD.values()),
    "parameters": (((), ()),),
    "zero_grad": (((), ()),),
}


class CheckedModel:
    """``model``, with its methods checked on construction, and their results in each call.

    A ``backward`` without ``on_gradient`` reports all gradients when it returns, so that none is sent while others are
    computed: ``overlaps`` is false.  The gradients of a model without ``zero_grad`` are zeroed here.  Raises
    ``UsageError`` showing the form of the methods for anything but a model.
    """

    def __init__(self, model: object) -> None:
        _check_kind(model)
        self.model: Any = model
        _check_calls(model)
        self._report = _report_of(model)
        self.parameters()

    @property
    def overlaps(self) -> bool:
        """Whether the model reports final gradients while it computes others."""
        return self._report is not _Report.NONE

    def warn_if_late(self) -> None:
        """Warn if gradients can only be sent after the backward pass."""
        if not self.overlaps:
            _log.warning(
                "%s.backward takes no on_gradient: gradients travel after the backward pass, not during it. Take "
                "on_gradient=None as its last parameter, and call on_gradient(name) for each gradient that is final",
                type(self.model).__name__,
            )

    def forward(self, x: Any) -> tuple[Array, Any]:
        """Return the output and the state for ``backward``."""
        made = self.model.forward(x)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise _refused(self.model, f"forward: expected it to return a pair (y, saved), got {_describe(made)}")
        return made

    def backward(self, saved: Any, dy: Array, on_gradient: OnGradient | None = None) -> Array | None:
        """Add to the gradients, and report each as the model does, or all of them at the end."""
        match self._report:
            case _Report.POSITIONAL:
                dx = self.model.backward(saved, dy, on_gradient)
            case _Report.KEYWORD:
                dx = self.model.backward(saved, dy, on_gradient=on_gradient)
            case _Report.NONE:
                dx = self.model.backward(saved, dy)
                for parameter in reversed(self.parameters()):
                    if on_gradient is not None:
                        on_gradient(parameter.name)
        return dx  # type: ignore[no-any-return]

    def parameters(self) -> Sequence[Trainable]:
        """Return the parameters, checked."""
        made = self.model.parameters()
        if isinstance(made, dict | str) or not isinstance(made, Iterable):
            raise _refused(self.model, f"parameters: expected it to return a list of parameters, got {_describe(made)}")
        parameters = tuple(made)
        for index, parameter in enumerate(parameters):
            _check_parameter(self.model, parameter, f"parameters()[{index}]")
        return parameters

    def zero_grad(self) -> None:
        """Forget all gradients."""
        if hasattr(self.model, "zero_grad"):
            self.model.zero_grad()
            return
        for parameter in self.parameters():
            if not is_frozen(parameter):
                zero(parameter.grad)


def _check_kind(model: object) -> None:
    if inspect.isclass(model):
        raise UsageError(f"model: expected a model, got the class {model.__name__}; make one: {model.__name__}(...)")
    if any(base.__module__.startswith("torch.nn") for base in type(model).__mro__):
        raise UsageError(
            f"model: expected a model of numpy, got the torch module {type(model).__name__}; use "
            "asyncpar.torch.DistributedDataParallel, or make a stage of it: asyncpar.torch.ModuleStage(module)"
        )


def _check_calls(model: object) -> None:
    """Raise ``UsageError`` for methods that are missing, or do not accept the arguments of the calls."""
    for name, forms in _CALLS.items():
        method = getattr(model, name, None)
        if method is None and name == "zero_grad":
            continue
        if not callable(method):
            found = "none" if method is None else _describe(method)
            raise _refused(model, f"{name}: expected a method, got {found}")
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise _refused(model, f"{name}: expected a plain function, got a coroutine function")
        if not any(_takes(method, *form) for form in forms):
            given, found = ", ".join(forms[0][0]), ", ".join(map(_shown, inspect.signature(method).parameters.values()))
            raise _refused(model, f"{name}: expected it to take ({given}), got {name}({found})")


def _takes(method: Callable[..., object], positional: Sequence[str], named: Sequence[str] = ()) -> bool:
    try:
        inspect.signature(method).bind(*positional, **dict.fromkeys(named))
    except TypeError:
        return False
    except ValueError:  # it is not a Python function and has no signature
        return True
    return True


def _shown(parameter: inspect.Parameter) -> str:
    return str(parameter.replace(annotation=inspect.Parameter.empty))


def _report_of(model: Any) -> _Report:
    return next(report for report, form in _BACKWARD.items() if _takes(model.backward, *form))


def _check_parameter(model: object, parameter: Any, where: str) -> None:
    """Raise ``UsageError`` for anything without a name, value and gradient."""
    hint = 'make it by asyncpar.nn.Parameter("w", array)'
    if not isinstance(getattr(parameter, "name", None), str):
        raise _refused(
            model, f"{where}: expected a parameter with name, value and grad, got {_describe(parameter)}; {hint}"
        )
    for part in ("value", "grad"):
        array = getattr(parameter, part, None)
        if not isinstance(array, np.ndarray) and not is_device_array(array):
            raise _refused(
                model, f"{where} {parameter.name!r}: expected an array as its {part}, got {_describe(array)}; {hint}"
            )


def _refused(model: object, why: str) -> UsageError:
    return UsageError(f"{type(model).__name__}.{why}{_WANTED}")


def _describe(found: object) -> str:
    return f"{found!r:.60}" if found is None or isinstance(found, str | int | float) else type(found).__name__
