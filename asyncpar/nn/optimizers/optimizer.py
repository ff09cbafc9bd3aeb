"""An optimizer over whole parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from asyncpar.core.config.placement import is_frozen
from asyncpar.core.config.slicing import ceil_chunk
from asyncpar.core.not_arrays import describe_no_parameter
from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.nn.half import stored_value
from asyncpar.nn.optimizers.flat_range import FlatRange
from asyncpar.nn.optimizers.norm import all_finite, clip_factor, combined, squared_norm
from asyncpar.nn.optimizers.rule import Rule
from asyncpar.nn.parameter import Array, Parameter, check_on_host


class Optimizer:
    """Moves ``parameters`` by ``rule`` and holds their states.

    Parameters that are frozen when it steps (``Parameter.requires_grad``) are unchanged, and so are their states.

    Between the gradients and the step, ``scale`` may be called any number of times (to undo a loss scale, to clip):
    nothing is multiplied before the step, so half precision loses nothing by it.
    """

    def __init__(self, parameters: Sequence[Parameter], rule: Rule) -> None:
        if not isinstance(rule, Rule):
            raise UsageError(f"rule: expected a Rule, got {type(rule).__name__}; write Optimizer(parameters, AdamW())")
        self.parameters = distinct(parameters)
        self.rule = rule
        self.step_count = 0
        self.factor = 1.0
        """The factor of gradients in the next step."""
        self.kept: dict[str, list[Array]] = {}
        """By parameter, memory for its values and states before an ``EarlyStep``; empty without one."""
        self._ranges = {parameter.name: FlatRange(parameter, 0, parameter.size, rule) for parameter in self.parameters}

    @property
    def nbytes(self) -> int:
        """Bytes of states and master values, and of the copies for early steps."""
        kept = sum(array.nbytes for arrays in self.kept.values() for array in arrays)
        return kept + sum(flat.nbytes for flat in self._ranges.values())

    @property
    def ranges(self) -> tuple[FlatRange, ...]:
        """The parameters with their states, in order."""
        return tuple(self._ranges.values())

    def state(self, name: str) -> Mapping[str, Array]:
        """Return the state of the parameter ``name``: arrays of its shape, by the names that its rule gives them.

        They include ``master`` if the parameter is stored in half precision.  Write to them to restore them.
        """
        flat = self._ranges.get(name)
        if flat is None:
            raise UsageError(f"name: expected a parameter of this optimizer, got {name!r}")
        shape = flat.parameter.shape
        return {kind: array.reshape(shape) for kind, array in flat.arrays().items()}

    @property
    def skipped(self) -> dict[str, int]:
        """By name, the number of steps in which a parameter was frozen, if any.

        Together with ``step_count`` and ``state`` it is the complete state.
        """
        return skipped_steps(self._ranges.values())

    @skipped.setter
    def skipped(self, skipped: Mapping[str, int]) -> None:
        restore_skipped(self._ranges.values(), skipped)

    def squared_norm(self, *, without: Collection[str] = (), parts: int = 1) -> float:
        """Return the square of the global norm of the scaled gradients, except those of the parameters ``without``.

        The sum equals, to the bit, that of ``parts`` owners that hold a part of each gradient (see ``norm``).
        """
        counted = [one for one in self.parameters if one.name not in without and not is_frozen(one)]
        sums = (
            combined(squared_norm(gradient[start:stop]) for gradient, start, stop in _parts(counted, parts, part))
            for part in range(parts)
        )
        return combined(sums) * self.factor**2

    def is_finite(self) -> bool:
        """Return whether all gradients are finite; those of frozen parameters are ignored."""
        return all(all_finite(one.grad.reshape(-1)) for one in self.parameters if not is_frozen(one))

    def scale(self, factor: float) -> None:
        """Multiply the gradients by ``factor`` in the next step."""
        self.factor *= factor

    def clip(self, limit: float | None) -> float:
        """Scale the gradients, in the next step, so that their global norm is at most ``limit``; return the norm.

        None leaves them unchanged.  Raises ``NonFiniteValue`` if the norm is not finite.
        """
        norm = math.sqrt(self.squared_norm())
        if not math.isfinite(norm):
            raise NonFiniteValue(f"gradients: expected a finite global norm at step {self.step_count}, got {norm}")
        if limit is not None:
            self.scale(clip_factor(norm, limit))
        return norm

    def step(self, learning_rate: float) -> None:
        """Update all parameters once, in place.  Gradients are unchanged.

        Raises ``NonFiniteValue``, with nothing changed, if a gradient is not finite.
        """
        if not self.is_finite():
            raise NonFiniteValue(f"gradients: expected finite numbers at step {self.step_count}, got others")
        self.step_count += 1
        for flat in self._ranges.values():
            parameter = flat.parameter
            if is_frozen(parameter):
                flat.skip()
                continue
            flat.update(
                flat.of(stored_value(parameter)),
                flat.of(parameter.grad),
                step=self.step_count,
                learning_rate=learning_rate,
                factor=self.factor,
            )
        self.factor = 1.0

    def zero_grad(self) -> None:
        """Set all gradients to zero, and the pending scale to one."""
        self.factor = 1.0
        for parameter in self.parameters:
            parameter.zero_grad()


def skipped_steps(ranges: Iterable[FlatRange]) -> dict[str, int]:
    """Return, by parameter, the number of steps that ``ranges`` have skipped, if any."""
    return {flat.parameter.name: flat.skipped for flat in ranges if flat.skipped}


def restore_skipped(ranges: Iterable[FlatRange], skipped: Mapping[str, int]) -> None:
    """Restore the result of ``skipped_steps``; names of other parameters are ignored."""
    for flat in ranges:
        flat.skipped = skipped.get(flat.parameter.name, 0)


def _no_parameter(given: object) -> UsageError:
    """Return the error for an object given as a parameter.  Raises the error for one on a device, with the remedy."""
    if (value := getattr(given, "value", None)) is not None:
        check_on_host(getattr(given, "name", "without a name"), value)
    return UsageError(describe_no_parameter(given))


def distinct(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Return ``parameters`` in order, each once: tied layers share one.

    Raises ``UsageError`` if there is none, or if two different ones have the same name.
    """
    by_name: dict[str, Parameter] = {}
    for parameter in parameters:
        if not isinstance(parameter, Parameter):
            raise _no_parameter(parameter)
        if by_name.setdefault(parameter.name, parameter) is not parameter:
            raise UsageError(f"parameters: two are named {parameter.name!r}; names must be unique")
    if not by_name:
        raise UsageError("parameters: expected at least one parameter, got none")
    return tuple(by_name.values())


def _parts(parameters: Iterable[Parameter], parts: int, part: int) -> Iterable[tuple[Array, int, int]]:
    """Yield each flat gradient and the range of its ceil chunk ``part`` of ``parts``."""
    for parameter in parameters:
        yield parameter.grad.reshape(-1), *ceil_chunk(parameter.size, parts, part)
