"""A step of an optimizer that is taken range by range, as gradients become known, and can be undone."""

from __future__ import annotations

import numpy as np

from asyncpar.core.config.placement import is_frozen
from asyncpar.errors import UsageError
from asyncpar.nn.half import stored_value
from asyncpar.nn.optimizers.flat_range import FlatRange
from asyncpar.nn.optimizers.optimizer import Optimizer
from asyncpar.nn.parameter import Array


class EarlyStep:
    """A step of ``optimizer`` with ``learning_rate``, begun before it is known whether it will succeed.

    ``take`` moves a range of a parameter, ``commit`` ends the step, ``undo`` reverts all moves.  Rules are elementwise,
    so the bits are those of ``Optimizer.step``.  The copies for ``undo`` are kept in the optimizer, from the first such
    step on: as much memory again as values and states take.
    """

    def __init__(self, optimizer: Optimizer, learning_rate: float) -> None:
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._ranges = {flat.parameter.name: flat for flat in optimizer.ranges}
        self._moved: list[tuple[str, slice]] = []
        self._kept = optimizer.kept

    def take(self, name: str, part: slice, gradient: Array) -> None:
        """Move the elements ``part`` of the flat parameter ``name`` by their ``gradient``, once per step each."""
        flat = self._ranges.get(name)
        if flat is None:
            raise UsageError(f"name: expected a parameter of this optimizer, got {name!r}")
        arrays = _arrays_of(flat)
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = [np.empty_like(array) for array in arrays]

        def keep(block: slice) -> None:
            """Save a block just before it is moved, when it has to be loaded into the cache anyway."""
            where = slice(part.start + block.start, min(part.start + block.stop, part.stop))
            for array, before in zip(arrays, kept, strict=True):
                before[where] = array[where]
            self._moved.append((name, where))

        with np.errstate(over="ignore", invalid="ignore"):  # non-finite values are detected later, and undone
            flat.update(
                arrays[0][part],
                gradient,
                step=self._optimizer.step_count + 1,
                learning_rate=self._learning_rate,
                factor=self._optimizer.factor,
                part=part,
                fill=keep,
            )

    def commit(self) -> None:
        """End the step: every element was moved, except those of frozen parameters."""
        for flat in self._ranges.values():
            if is_frozen(flat.parameter):
                flat.skip()
        self._optimizer.step_count += 1
        self._optimizer.factor = 1.0
        self._moved.clear()

    def undo(self) -> None:
        """Revert all moves: values and states are as before the step."""
        for name, where in self._moved:
            for array, before in zip(_arrays_of(self._ranges[name]), self._kept[name], strict=True):
                array[where] = before[where]
        self._moved.clear()


def _arrays_of(flat: FlatRange) -> list[Array]:
    """Return all arrays of a parameter that a step moves, its values first."""
    return [flat.of(stored_value(flat.parameter)), *flat.arrays().values()]
