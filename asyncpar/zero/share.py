"""What a rank holds of one parameter, by stage."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncpar.nn.half import stored_dtype, stored_value
from asyncpar.nn.optimizers import Rule, Stretch
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.zero.config import ZeROStage


class Share:
    """The stretch ``start`` to ``stop`` of a parameter that this rank owns: its values, gradient and states.

    Without sharding, the stretch that is *updated* is the whole parameter, and the one that is *counted*, for norms, is
    still the owned one: so that all ranks together count everything once.
    """

    def __init__(self, parameter: Parameter, bounds: tuple[int, int], rule: Rule, stage: ZeROStage) -> None:
        self.parameter = parameter
        self.start, self.stop = bounds
        updated = bounds if stage.shards_states else (0, parameter.size)
        self.stretch = Stretch(parameter, *updated, rule)
        self.has_gradient = False
        """Has anything been added to the sharded gradient?"""
        self.is_spoiled = False
        """Was this rank's gradient not finite, before it was reduced?"""
        self._shards_gradients = stage.shards_gradients
        self._gradient: Array | None = None
        self._value: Array | None = None

    @property
    def count(self) -> int:
        """Number of values that this rank owns."""
        return self.stop - self.start

    # -- values ------------------------------------------------------------------------------------------------------

    def part_with_value(self) -> None:
        """Keep only what this rank owns of the value, and release the parameter."""
        self._value = self.stretch.of(stored_value(self.parameter)).copy()
        self.parameter.release_value()

    @property
    def value(self) -> Array:
        """The values that are updated: flat, as stored, to be written to."""
        return self.stretch.of(stored_value(self.parameter)) if self._value is None else self._value

    @property
    def own_value(self) -> Array:
        """The values that this rank owns."""
        return self.value[self._own]

    @property
    def flat_value(self) -> Array:
        """All values, of a parameter that is not sharded."""
        return stored_value(self.parameter).reshape(-1)

    # -- gradients ---------------------------------------------------------------------------------------------------

    @property
    def gradient(self) -> Array:
        """The reduced gradient of the values that are updated: flat, as stored, to be written to."""
        if not self._shards_gradients:
            return self.stretch.of(self.parameter.grad)
        if self._gradient is None:
            self._gradient = np.zeros(self.count, stored_dtype(self.parameter))
        return self._gradient

    @property
    def own_gradient(self) -> Array:
        """The reduced gradient of the values that this rank owns."""
        return self.gradient[self._own]

    def take_gradient(self) -> Array | None:
        """Take the parameter's gradient away from it, flat; None if there is none."""
        if not self.parameter.has_grad:
            return None
        gradient = self.parameter.grad.reshape(-1)
        self.parameter.release_grad()
        return gradient

    def add_reduced(self, part: slice, reduced: Array) -> None:
        """Add ``reduced`` to a part of the sharded gradient; the first time in a step, it is written."""
        own = self.gradient[part]
        if not self.has_gradient:
            own[...] = reduced
            return
        with np.errstate(over="ignore", invalid="ignore"):
            if own.dtype.itemsize == 2:
                own[...] = own.astype(np.float32) + reduced.astype(np.float32)
            else:
                own += reduced

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self.is_spoiled = False
        if self._shards_gradients:
            self.parameter.release_grad()
            self.has_gradient = False
            if self._gradient is not None:
                self._gradient.fill(0)
        else:
            self.parameter.zero_grad()

    # -- the step ----------------------------------------------------------------------------------------------------

    def update(self, **settings: Any) -> None:
        """Move the values against the gradient; see ``Stretch.update``."""
        if len(self.stretch):
            self.stretch.update(self.value, self.gradient, **settings)

    def restore(self, kind: str, array: Array) -> None:
        """Write the states ``kind``, or the ``value``, of what is updated."""
        if kind != VALUE:
            self.stretch.states[kind][...] = array
            return
        if self.stretch.master is not None:
            self.stretch.master[...] = array
        with np.errstate(over="ignore"):
            self.value[...] = array

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def parameter_bytes(self) -> int:
        """Bytes of values that stay."""
        return self.value.nbytes if self._value is not None else self._whole_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole value while a sharded parameter is gathered."""
        return self._whole_bytes if self._value is not None and not self.parameter.is_released else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient, the parameter's own and the sharded one."""
        own = 0 if self._gradient is None else self._gradient.nbytes
        return own + (self.whole_gradient_bytes if self.parameter.has_grad else 0)

    @property
    def whole_gradient_bytes(self) -> int:
        """Bytes of the parameter's own gradient while it has one."""
        return self._whole_bytes

    @property
    def own_gradient_bytes(self) -> int:
        """Bytes of the sharded gradient once there is one."""
        return self.count * stored_dtype(self.parameter).itemsize

    @property
    def whole_bytes(self) -> int:
        """Bytes of value, gradient and states without sharding."""
        states = len(self.stretch.arrays()) * self.parameter.size * self.parameter.dtype.itemsize
        return 2 * self._whole_bytes + states

    @property
    def _whole_bytes(self) -> int:
        return self.parameter.size * stored_dtype(self.parameter).itemsize

    @property
    def _own(self) -> slice:
        """Where what this rank owns lies in what it updates."""
        return slice(self.start - self.stretch.start, self.stop - self.stretch.start)


VALUE = "value"
"""The kind of a parameter's values among its states, in the dtype that is computed in."""
