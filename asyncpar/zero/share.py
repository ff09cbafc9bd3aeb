"""The part of one parameter that a rank owns, by stage, and the pieces of it that a checkpoint holds."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from asyncpar.core.config.placement import is_frozen
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.core.sums import sum_dtype
from asyncpar.errors import UsageError
from asyncpar.nn.half import stored_dtype, stored_value
from asyncpar.nn.optimizers import FlatRange, Rule
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.zero.partition import Spec


class ParameterShare:
    """The flat range ``start`` to ``stop`` of a parameter that this rank owns: its values, gradient and states.

    Without sharding, the *updated* range is the whole parameter, but the range *counted* in norms is still the owned
    one, so that all ranks together count everything once.
    """

    def __init__(self, parameter: Parameter, bounds: tuple[int, int], rule: Rule, stage: ZeROStage) -> None:
        self.parameter = parameter
        self.start, self.stop = bounds
        updated = bounds if stage.shards_states else (0, parameter.size)
        self.range = FlatRange(parameter, *updated, rule)
        self.has_gradient = False
        """Whether anything has been added to the sharded gradient."""
        self.is_spoiled = False
        """Whether this rank's gradient was non-finite before the reduction."""
        self._shards_gradients = stage.shards_gradients
        self._gradient: Array | None = None
        self._adding = threading.Lock()
        self._value: Array | None = None

    @property
    def count(self) -> int:
        """Number of values that this rank owns."""
        return self.stop - self.start

    @property
    def is_frozen(self) -> bool:
        """Whether the parameter is currently a constant."""
        return is_frozen(self.parameter)

    # -- values ------------------------------------------------------------------------------------------------------

    def part_with_value(self) -> None:
        """Keep only this rank's part of the value, and release the parameter."""
        self._value = self.range.of(stored_value(self.parameter)).copy()
        self.parameter.release_value()

    @property
    def value(self) -> Array:
        """The updated values: flat, as stored, writable."""
        return self.range.of(stored_value(self.parameter)) if self._value is None else self._value

    @property
    def own_value(self) -> Array:
        """The values that this rank owns."""
        return self.value[self._own]

    @property
    def flat_value(self) -> Array:
        """All values of an unsharded parameter."""
        return stored_value(self.parameter).reshape(-1)

    # -- gradients ---------------------------------------------------------------------------------------------------

    @property
    def gradient(self) -> Array:
        """The reduced gradient of the updated values: flat, writable.

        Its dtype is that of storage, except for a sharded gradient of two-byte values to which a second reduction was
        added, which is float32.
        """
        if not self._shards_gradients:
            return self.range.of(self.parameter.grad)
        if self._gradient is None:
            self._gradient = np.zeros(self.count, stored_dtype(self.parameter))
        return self._gradient

    @property
    def own_gradient(self) -> Array:
        """The reduced gradient of the values that this rank owns."""
        return self.gradient[self._own]

    def take_gradient(self) -> Array | None:
        """Remove the parameter's gradient and return it, flat; None if there is none."""
        if not self.parameter.has_grad:
            return None
        gradient = self.parameter.grad.reshape(-1)
        self.parameter.release_grad()
        return gradient

    def add_reduced(self, part: slice, reduced: Array) -> None:
        """Add ``reduced`` to a part of the sharded gradient; the first call in a step overwrites it.

        Callable from any thread, also for several parts at once.
        """
        with self._adding, np.errstate(over="ignore", invalid="ignore"):
            if not self.has_gradient:
                self.gradient[part] = reduced
                return
            total = self._gradient = self.gradient.astype(sum_dtype(self.gradient.dtype), copy=False)
            total[part] += reduced

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self.is_spoiled = False
        if self._shards_gradients:
            self.parameter.release_grad()
            self.has_gradient = False
            if self._gradient is not None:
                self._gradient.fill(0)
                if self._gradient.dtype != stored_dtype(self.parameter):
                    self._gradient = None
        else:
            self.parameter.zero_grad()

    # -- the step ----------------------------------------------------------------------------------------------------

    def update(self, **settings: Any) -> None:
        """Move the values against the gradient, unless the parameter is frozen; see ``FlatRange.update``."""
        if self.is_frozen:
            self.range.skip()
        elif len(self.range):
            self.range.update(self.value, self.gradient, **settings)

    @property
    def held(self) -> Held:
        """The range with its values, as ``pieces_of`` takes it."""
        return self.range, self.value

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def parameter_bytes(self) -> int:
        """Permanent bytes of values."""
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
        """Bytes of the sharded gradient after several reductions were added up in it."""
        return self.count * sum_dtype(stored_dtype(self.parameter)).itemsize

    @property
    def whole_bytes(self) -> int:
        """Bytes of value, gradient and states without sharding."""
        states = len(self.range.arrays()) * self.parameter.size * self.parameter.dtype.itemsize
        return 2 * self._whole_bytes + states

    @property
    def _whole_bytes(self) -> int:
        return self.parameter.size * stored_dtype(self.parameter).itemsize

    @property
    def _own(self) -> slice:
        """The slice of owned values within the updated ones."""
        return slice(self.start - self.range.start, self.stop - self.range.start)


VALUE = "value"
"""The kind of a parameter's values among its states, in the compute dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """The flat range ``flat`` of this rank's part ``slice`` of the tensor ``kind`` of a parameter.

    ``kind`` is ``value`` or a state's name.  ``array`` is flat, the engine's own, in the compute dtype: for parameters
    in half precision, the values are the master values.
    """

    parameter: str
    kind: str
    slice: TensorSlice
    flat: tuple[int, int]
    array: Array

    def __str__(self) -> str:
        start, stop = self.flat
        return f"{self.kind} of {self.parameter}, values {start} to {stop} of {list(self.slice.local_shape)}"


Held: TypeAlias = tuple[FlatRange, Array]
"""The range of a parameter that this rank updates, with its values: flat, as stored, writable."""


def pieces_of(held: Iterable[Held]) -> list[StatePiece]:
    """Return all pieces of ``held`` that must be kept."""
    return [
        StatePiece(
            parameter=flat.parameter.name,
            kind=kind,
            slice=flat.parameter.slice,
            flat=(flat.start, flat.stop),
            array=array,
        )
        for flat, value in held
        for kind, array in _arrays(flat, value).items()
    ]


def restore_pieces(held: Iterable[Held], arrays: Mapping[tuple[str, str], Array]) -> None:
    """Write ``arrays``, by name of the parameter and kind, into ``held``.

    Raises ``UsageError``, with nothing written, unless there is one for each piece, of its length and dtype.
    """
    known = tuple(held)
    targets = {(one.parameter, one.kind): one.array for one in pieces_of(known)}
    for key, array in arrays.items():
        if key not in targets:
            raise UsageError(f"arrays: expected pieces of this engine, got {key[1]} of {key[0]}")
        expected = targets[key]
        if array.size != expected.size or array.dtype != expected.dtype:
            raise UsageError(
                f"arrays: expected {expected.size} values of {expected.dtype} as {key[1]} of {key[0]}, "
                f"got {array.size} of {array.dtype}"
            )
    for name, kind in targets.keys() - arrays.keys():
        raise UsageError(f"arrays: expected {kind} of {name}, which is missing")
    for key, target in targets.items():
        target[...] = arrays[key].reshape(-1)
    for flat, value in known:
        if flat.master is not None:
            with np.errstate(over="ignore"):
                value[...] = flat.master


def _arrays(flat: FlatRange, value: Array) -> dict[str, Array]:
    """Return the exact values and the states, by kind."""
    return {VALUE: value if flat.master is None else flat.master, **flat.states}


def describe(specs: Iterable[Spec], parameters: Iterable[Parameter]) -> list[str]:
    """Return a line for each parameter, with a checksum of its values."""
    return [
        f"{spec} with values of checksum {zlib.crc32(stored_value(parameter).reshape(-1).view(np.uint8).data):08x}"
        for spec, parameter in zip(specs, parameters, strict=True)
    ]
