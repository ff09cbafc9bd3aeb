"""The range of one parameter that an optimizer owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from asyncpar.nn.half import stored_dtype, stored_value
from asyncpar.nn.optimizers.rule import Rule, apply, new_states
from asyncpar.nn.parameter import Array, Parameter

ALL = slice(None)

MASTER = "master"
"""Name of the float32 values of a parameter that is stored in half precision."""


class FlatRange:
    """The flat range ``start`` to ``stop`` of a parameter's values, with the states that move it.

    ``states`` are flat arrays in the compute dtype.  ``master`` holds the values in that dtype if the parameter is
    stored in half precision, and is None otherwise.
    """

    def __init__(self, parameter: Parameter, start: int, stop: int, rule: Rule) -> None:
        self.parameter = parameter
        self.start = start
        self.stop = stop
        self.decays = len(parameter.shape) >= 2
        self.skipped = 0
        """The number of the owner's steps in which the parameter was frozen; rules count only the others."""
        self._rule = rule
        dtype = parameter.dtype
        self.states: Mapping[str, Array] = new_states(rule, stop - start, dtype)
        self.master: Array | None = None
        self.fill: Callable[[slice], object] | None = None
        """See ``rule.apply``: for owners that keep the old values and write the update to other memory."""
        if stored_dtype(parameter) != dtype:
            self.master = self.of(stored_value(parameter)).astype(dtype)

    def __len__(self) -> int:
        return self.stop - self.start

    def of(self, array: Array) -> Array:
        """Return this range of a C-contiguous array of the parameter's shape, as a flat view."""
        return array.reshape(-1)[self.start : self.stop]

    def update(
        self,
        value: Array,
        gradient: Array,
        *,
        step: int,
        learning_rate: float,
        factor: float,
        part: slice = ALL,
        fill: Callable[[slice], object] | None = None,
    ) -> None:
        """Move ``value`` against ``factor * gradient``; both are flat and as long as this range, as stored.

        With ``part``, both are only that part of this range.  ``step`` counts those of the owner; the rule gets the
        number of those in which the range moved.  ``fill``: see ``rule.apply``, by default the range's own.
        """
        apply(
            self._rule,
            value if self.master is None else self.master[part],
            gradient,
            self.states if part is ALL else {name: state[part] for name, state in self.states.items()},
            step=step - self.skipped,
            learning_rate=learning_rate,
            decays=self.decays,
            factor=factor,
            fill=fill or self.fill,
        )
        if self.master is not None:
            with np.errstate(over="ignore"):
                value[...] = self.master[part]

    def skip(self) -> None:
        """Skip a step of the owner, because the parameter is frozen."""
        self.skipped += 1
        if self.fill is not None:
            self.fill(ALL)
            if self.master is not None:
                with np.errstate(over="ignore"):
                    self.of(stored_value(self.parameter))[...] = self.master

    def arrays(self) -> Mapping[str, Array]:
        """Return the states, and the master if there is one, by name."""
        return dict(self.states) if self.master is None else {**self.states, MASTER: self.master}

    @property
    def nbytes(self) -> int:
        """Bytes of states and master."""
        return sum(array.nbytes for array in self.arrays().values())
