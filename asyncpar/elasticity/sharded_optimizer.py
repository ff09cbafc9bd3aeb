"""An optimizer of which each portion has a part: ZeRO (Rajbhandari et al. 2020) for worlds that change.

The values of all parameters, one after another, are cut into as many parts as there are portions, whatever the world.
The rank that has a portion in a world keeps the states of its part, and moves its values.  Everything is elementwise,
and norms are summed exactly over parts, so the bits do not depend on which rank that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.config.placement import is_frozen
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.elasticity.parts import StateParts
from asyncpar.elasticity.transfer import PartKind
from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.nn.half import stored_dtype, stored_value
from asyncpar.nn.optimizers import MASTER, Optimizer, all_finite, clip_factor, combined, squared_norm
from asyncpar.nn.optimizers.rule import apply
from asyncpar.nn.parameter import Parameter

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """``parameter[start:stop]``, flat, at offset ``place`` among the values of its part."""

    parameter: Parameter
    start: int
    stop: int
    place: slice


class ShardedGradients:
    """This rank's part of reduced gradients, for ``step.update``: ``flat`` may be changed in place."""

    def __init__(self, flat: Array) -> None:
        self.flat = flat


class ShardedOptimizer:
    """The parts of ``optimizer``, whose own states it takes over.

    ``bounds`` are the limits of the parts among the values of all parameters.
    """

    def __init__(self, name: str, optimizer: Optimizer, stage: ZeROStage, bounds: Sequence[int]) -> None:
        self.optimizer = optimizer
        self.stage = stage
        self.name = name
        parameters = optimizer.parameters
        dtypes = {(parameter.dtype, stored_dtype(parameter)) for parameter in parameters}
        if len(dtypes) > 1:
            raise UsageError(f"zero: expected parameters of one dtype, got {sorted(str(one) for _, one in dtypes)}")
        self.dtype, self.stored = dtypes.pop()
        self.size = sum(parameter.size for parameter in parameters)
        self.bounds = list(bounds)
        self._pieces = [list(self._pieces_of(part)) for part in range(len(self.bounds) - 1)]
        self._initial = {parameter.name: stored_value(parameter) for parameter in parameters}
        self.is_updated = False
        """Whether it was updated in the step under way."""
        self.arguments: list[float | None] = []
        """The rate and the norm for clipping of its last update.

        They are part of the state: each rank computes other parts, so these show whether all compute them alike.
        """
        self.values: Array | None = None
        """The new values of all parameters in the step under way, where all ranks have them."""
        for flat in optimizer.ranges:
            flat.states, flat.master = {}, None

    def _pieces_of(self, part: int) -> Iterator[ParameterPiece]:
        first, last, start = self.bounds[part], self.bounds[part + 1], 0
        for parameter in self.optimizer.parameters:
            begin, end = max(first, start), min(last, start + parameter.size)
            if begin < end:
                yield ParameterPiece(parameter, begin - start, end - start, slice(begin - first, end - first))
            start += parameter.size

    @property
    def has_master(self) -> bool:
        return self.stored != self.dtype

    @property
    def kinds(self) -> list[PartKind]:
        """The arrays that are kept of each part."""
        lengths = tuple(last - first for first, last in zip(self.bounds, self.bounds[1:], strict=False))
        states = [
            PartKind(
                name=f"{self.name}.{state}",
                dtype=self.dtype,
                lengths=lengths,
                initial=lambda part: np.zeros(lengths[part], self.dtype),
                is_uniform=True,
            )
            for state in self.optimizer.rule.state_names
        ]
        if self.has_master:
            states.append(self._value_kind(MASTER, self.dtype, lengths))
        if self.stage.shards_parameters:
            states.append(self._value_kind("value", self.stored, lengths))
        return states

    def _value_kind(self, name: str, dtype: np.dtype[Any], lengths: tuple[int, ...]) -> PartKind:
        def initial(part: int) -> Array:
            pieces = [
                self._initial[piece.parameter.name].reshape(-1)[piece.start : piece.stop]
                for piece in self._pieces[part]
            ]
            return np.concatenate(pieces).astype(dtype) if pieces else np.empty(0, dtype)

        return PartKind(name=f"{self.name}.{name}", dtype=dtype, lengths=lengths, initial=initial)

    def forget_initial(self) -> None:
        """Free the values from before the first step: no more parts are made from them."""
        self._initial = {}

    def flat_of(self, arrays: Sequence[Array], parts: Sequence[int]) -> Array:
        """Return a copy of the values of ``parts`` of ``arrays``, one for each parameter."""
        by_name = dict(zip((parameter.name for parameter in self.optimizer.parameters), arrays, strict=True))
        pieces = [
            by_name[piece.parameter.name].reshape(-1)[piece.start : piece.stop]
            for part in parts
            for piece in self._pieces[part]
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, arrays[0].dtype)

    # -- a step --------------------------------------------------------------------------------------------------------

    async def update(
        self,
        communicator: Communicator,
        parts: StateParts,
        gradient: Array,
        *,
        learning_rate: float,
        clip_norm: float | None,
    ) -> Array:
        """Make the step of this rank's parts with their ``gradient``, and return their new values, flat.

        All ranks call it.  Raises ``NonFiniteValue`` on all of them, with nothing changed.
        """
        changed = parts.changed
        self._forget_frozen(changed, gradient)
        factor = await self._factor(communicator, parts, gradient, clip_norm)

        def work() -> Array:
            first = self.bounds[changed[0]] if changed else 0
            values = np.empty(gradient.size, self.stored)
            for part in changed:
                place = slice(self.bounds[part] - first, self.bounds[part + 1] - first)
                self._move(parts, part, values[place], gradient[place], learning_rate=learning_rate, factor=factor)
            return values

        values = await off_loop(work, nbytes=gradient.nbytes)
        self.count_step()
        return values

    def count_step(self) -> None:
        """Count a step, made here or by others."""
        self.optimizer.step_count += 1
        for flat in self.optimizer.ranges:
            if is_frozen(flat.parameter):
                flat.skip()
        self.optimizer.factor = 1.0
        self.is_updated = True

    def ended(self) -> None:
        """Handle the commit or abort of the step under way."""
        self.is_updated, self.values = False, None
        if self.stage.shards_parameters:
            self.release(self.optimizer.parameters)

    def release(self, parameters: Sequence[Parameter]) -> None:
        """Free the values of ``parameters``, which their owners keep."""
        for parameter in parameters:
            parameter.release_value()

    def _forget_frozen(self, changed: Sequence[int], gradient: Array) -> None:
        """Set the gradients of frozen parameters to zero, so no norm counts them."""
        first = self.bounds[changed[0]] if changed else 0
        for part in changed:
            start = self.bounds[part] - first
            for piece in self._pieces[part]:
                if is_frozen(piece.parameter):
                    gradient[start + piece.place.start : start + piece.place.stop] = 0.0

    async def _factor(
        self, communicator: Communicator, parts: StateParts, gradient: Array, clip_norm: float | None
    ) -> float:
        """Return the factor that scales the gradients to a global norm of at most ``clip_norm``."""
        first = self.bounds[parts.changed[0]] if parts.changed else 0
        flats = [gradient[self.bounds[part] - first : self.bounds[part + 1] - first] for part in parts.owned]
        found = await off_loop(
            lambda: np.array([[squared_norm(flat), all_finite(flat)] for flat in flats]).reshape(-1, 2),
            nbytes=gradient.nbytes,
        )
        gathered = found if communicator.size == 1 else await communicator.all_gather_v(found)
        factor = self.optimizer.factor
        norm = math.sqrt(combined(gathered[:, 0].tolist()) * factor**2)
        if not gathered[:, 1].all() or (clip_norm is not None and not math.isfinite(norm)):
            raise NonFiniteValue(f"gradients: expected finite numbers at step {self.optimizer.step_count}, got others")
        return factor if clip_norm is None else factor * clip_factor(norm, clip_norm)

    def _move(
        self, parts: StateParts, part: int, values: Array, gradient: Array, *, learning_rate: float, factor: float
    ) -> None:
        """Move one part; ``values`` becomes its stored form."""
        states = {state: self._opened(parts, state, part) for state in self.optimizer.rule.state_names}
        value_kind = f"{self.name}.value"
        if self.has_master:
            moved = self._opened(parts, MASTER, part)
        else:
            moved = values
            if self.stage.shards_parameters:
                values[...] = parts.committed(value_kind, part)
            else:
                for piece in self._pieces[part]:
                    values[piece.place] = stored_value(piece.parameter).reshape(-1)[piece.start : piece.stop]
        skipped = self.optimizer.skipped
        for piece in self._pieces[part]:
            if is_frozen(piece.parameter):
                continue
            apply(
                self.optimizer.rule,
                moved[piece.place],
                gradient[piece.place],
                {state: array[piece.place] for state, array in states.items()},
                step=self.optimizer.step_count + 1 - skipped.get(piece.parameter.name, 0),
                learning_rate=learning_rate,
                decays=len(piece.parameter.shape) >= 2,
                factor=factor,
            )
        if self.has_master:
            with np.errstate(over="ignore"):
                values[...] = moved
        if self.stage.shards_parameters:
            parts.open(value_kind, part)[...] = values

    def _opened(self, parts: StateParts, state: str, part: int) -> Array:
        kind = f"{self.name}.{state}"
        opened = parts.open(kind, part)
        opened[...] = parts.committed(kind, part)
        return opened

    # -- parameters ----------------------------------------------------------------------------------------------------

    def show(self, parts: StateParts) -> None:
        """Show the committed values of this rank's parts in their parameters; they must not be changed."""
        for part in parts.changed:
            values = parts.committed(f"{self.name}.value", part)
            for piece in self._pieces[part]:
                piece.parameter.restore_value(values[piece.place].reshape(piece.parameter.shape))

    def spread(self, values: Array) -> None:
        """Copy all values, flat, into the parameters, and record them."""
        self.values, start = values, 0
        for parameter in self.optimizer.parameters:
            stored_value(parameter).reshape(-1)[...] = values[start : start + parameter.size]
            start += parameter.size

    async def gather(self, communicator: Communicator, parts: StateParts, parameters: Sequence[Parameter]) -> None:
        """Give ``parameters`` their latest values, which other ranks keep.  All ranks call it with the same ones."""
        wanted = {parameter.name for parameter in parameters}
        mine = [
            parts.latest(f"{self.name}.value", part)[piece.place]
            for part in parts.owned
            for piece in self._pieces[part]
            if piece.parameter.name in wanted
        ]
        sent = np.concatenate(mine) if mine else np.empty(0, self.stored)
        values = sent if communicator.size == 1 else await communicator.all_gather_v(sent)
        start = 0
        for parameter in self.optimizer.parameters:
            if parameter.name in wanted:
                value = values[start : start + parameter.size].reshape(parameter.shape)
                parameter.restore_value(np.ascontiguousarray(value))
                start += parameter.size
