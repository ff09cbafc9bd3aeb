"""Workers of DiLoCo (Douillard et al. 2023), one for each portion: each trains by itself from the common point.

The states of a worker's inner optimizer, which it keeps from round to round, are part of the state: they move with its
portion.  The common point and the momentum of the outer optimizer are on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.placement import is_frozen
from asyncpar.elasticity.parts import StateParts
from asyncpar.elasticity.transfer import PartKind
from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.nn.half import stored_dtype
from asyncpar.nn.optimizers import Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.parallel.local.outer import OuterConfig, outer_step

Array: TypeAlias = NDArray[Any]
Contribution: TypeAlias = Mapping[str, Array]
"""The result of a worker, by kind: ``DIFFERENCE`` and the arrays that it keeps."""

DIFFERENCE = "difference"
_STEPS = "steps"


class LocalWorkers:
    """``count`` workers that train the parameters of ``optimizer``, whose own states they take over."""

    def __init__(self, name: str, optimizer: Optimizer, config: OuterConfig, count: int) -> None:
        parameters = optimizer.parameters
        dtypes = {parameter.dtype for parameter in parameters}
        if len(dtypes) > 1 or any(stored_dtype(parameter) != parameter.dtype for parameter in parameters):
            raise UsageError(
                f"outer: expected parameters of one dtype, stored as it is, got {sorted(map(str, dtypes))}"
            )
        self.optimizer = optimizer
        self.config = config
        self.dtype = dtypes.pop()
        self.size = sum(parameter.size for parameter in parameters)
        self._name = name
        self._count = count
        self._is_at_work = False
        for flat in optimizer.ranges:
            flat.states = {}

    @property
    def kinds(self) -> list[PartKind]:
        """The arrays that each worker keeps."""
        states = [self._kind(f"{self._name}.{state}", self.size) for state in self.optimizer.rule.state_names]
        counts = 1 + len(self.optimizer.parameters)  # of steps, and of those that each parameter has skipped
        return [*states, self._kind(f"{self._name}.{_STEPS}", counts)]

    def _kind(self, name: str, length: int) -> PartKind:
        return PartKind(
            name=name,
            dtype=self.dtype,
            lengths=(length,) * self._count,
            initial=lambda _: np.zeros(length, self.dtype),
            is_uniform=True,
        )

    @property
    def sent_kinds(self) -> dict[str, PartKind]:
        """The arrays of a contribution."""
        return {kind.name: kind for kind in [*self.kinds, self._kind(DIFFERENCE, self.size)]}

    @contextmanager
    def at_work(
        self,
        parts: StateParts | None,
        portion: int,
        common: Callable[[str], Array],
        done: Callable[[Contribution], object],
    ) -> Iterator[Optimizer]:
        """Make the optimizer that of a worker, and the parameters its own, which begin at the ``common`` point.

        Its result goes to ``done``, unless it fails.  Without ``parts`` it has kept nothing, and its result is of no
        use.
        """
        optimizer, kept = self.optimizer, self._copies(parts, portion)
        if self._is_at_work:
            raise UsageError(f"worker: portion {portion} has to wait until the previous worker has ended")
        begin, start = {parameter.name: common(parameter.name).copy() for parameter in optimizer.parameters}, 0
        values = {name: value.copy() for name, value in begin.items()}
        counts = kept[f"{self._name}.{_STEPS}"]
        optimizer.step_count, optimizer.factor = int(counts[0]), 1.0
        for flat, skipped in zip(optimizer.ranges, counts[1:], strict=True):
            flat.skipped = int(skipped)
            stop = start + flat.parameter.size
            flat.states = {state: kept[f"{self._name}.{state}"][start:stop] for state in optimizer.rule.state_names}
            flat.fill = None
            flat.parameter.restore_value(values[flat.parameter.name])
            start = stop
        self._is_at_work = True
        try:
            yield optimizer
            counts[:] = [optimizer.step_count, *(flat.skipped for flat in optimizer.ranges)]
            done({**kept, DIFFERENCE: self._difference(begin)})
        finally:
            self._is_at_work = False
            optimizer.step_count, optimizer.factor, optimizer.skipped = 0, 1.0, {}
            for flat in optimizer.ranges:
                flat.states = {}
                flat.parameter.restore_value(common(flat.parameter.name))

    def _copies(self, parts: StateParts | None, portion: int) -> dict[str, Array]:
        if parts is None:
            return {kind.name: kind.initial(portion) for kind in self.kinds}
        return {kind.name: parts.committed(kind.name, portion).copy() for kind in self.kinds}

    def shown(self, parameter: Parameter) -> Callable[[Array], None]:
        """Return the function that shows ``parameter`` an array of the common point, while no worker uses it."""

        def show(array: Array) -> None:
            if not self._is_at_work:
                parameter.restore_value(array)

        return show

    def _difference(self, begin: Mapping[str, Array]) -> Array:
        found = [begin[parameter.name] - parameter.value for parameter in self.optimizer.parameters]
        return np.concatenate([array.reshape(-1) for array in found])

    def keep(self, parts: StateParts, portion: int, contribution: Contribution) -> None:
        """Make the arrays that a worker keeps its part of the state after this round."""
        for kind in self.kinds:
            parts.open(kind.name, portion)[...] = contribution[kind.name]

    def advance(self, mean: Array, arrays: Callable[[str], tuple[Array, Array]]) -> None:
        """Move the common point by the ``mean`` difference: ``arrays(name)`` are its committed and its next values.

        Frozen parameters stay where they are, and keep their momentum.
        Raises ``NonFiniteValue`` when that is NaN or infinite.
        """
        start = 0
        for parameter in self.optimizer.parameters:
            part = mean[start : start + parameter.size].reshape(parameter.shape)
            old, common = arrays(parameter.name)
            before, moved = arrays(momentum_name(parameter.name))
            start += parameter.size
            if is_frozen(parameter):
                common[...], moved[...] = old, before
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                outer_step(self.config, old, before, part, common=common, moved=moved)
            if not np.isfinite(common).all():
                raise NonFiniteValue(f"outer step: expected finite parameters, got others in {parameter.name!r}")


def momentum_name(name: str) -> str:
    """Return the name of a parameter's outer momentum in the state."""
    return f"outer.{name}.momentum"
