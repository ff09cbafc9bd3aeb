"""Gradients of plain data parallelism: all replicas have all of them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from asyncpar.core.concurrency.offload import off_loop
from asyncpar.gradsync import GradientSynchronizer, StepOutcome
from asyncpar.hybrid.flow import GradientFlow
from asyncpar.nn.half import HalfParameter, stored_value
from asyncpar.nn.optimizers import MASTER, Optimizer, Rule
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.zero.share import VALUE, StatePiece


class ReplicatedFlow(GradientFlow):
    """``synchronizer`` makes gradients equal, over tensor-parallel ranks and ties, too; each replica updates all.

    It must skip what is not finite: the caller finds out by the norm.  ``rank`` is this one's number in the world.
    """

    is_sharded = False

    def __init__(
        self,
        parameters: Iterable[Parameter],
        rule: Rule,
        synchronizer: GradientSynchronizer,
        *,
        replicas: int,
        rank: int,
    ) -> None:
        super().__init__(parameters)
        self._optimizer = Optimizer(self.parameters, rule)
        self._synchronizer = synchronizer
        self._replicas = replicas
        self._rank = rank
        self._outcome = StepOutcome()

    @property
    def step_count(self) -> int:
        return self._optimizer.step_count

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @asynccontextmanager
    async def reducing(self) -> AsyncIterator[OnGradient]:
        async with self._synchronizer.step(self.parameters) as step:
            yield step.ready
        self._outcome = step.outcome

    def squared_norm(self, without: Collection[str]) -> float:
        """The sum is that of as many parts as there are replicas: what it comes to when each owns a part."""
        return (
            math.inf
            if self._outcome.is_skipped
            else self._optimizer.squared_norm(without=without, parts=self._replicas)
        )

    @property
    def spoiled(self) -> Sequence[str]:
        return self._outcome.culprits.get(self._rank, [])

    @property
    def overflowed(self) -> Sequence[str]:
        return self._outcome.lost

    def scale(self, factor: float) -> None:
        self._optimizer.scale(factor)

    async def step(self, learning_rate: float) -> None:
        moved = sum(stored_value(parameter).nbytes for parameter in self.parameters)
        await off_loop(partial(self._optimizer.step, learning_rate), nbytes=4 * moved)

    async def catch_up(self, learning_rate: float) -> None:
        await self.step(learning_rate)

    async def resume(self, attempt: int) -> None:
        self._synchronizer.restart(attempt)

    def pieces(self) -> Sequence[StatePiece]:
        return [
            StatePiece(
                parameter=parameter.name,
                kind=kind,
                slice=parameter.slice,
                flat=(0, parameter.size),
                array=array.reshape(-1),
            )
            for parameter in self.parameters
            for kind, array in self._arrays(parameter).items()
        ]

    async def restore(self, arrays: Mapping[tuple[str, str], Array], step_count: int, attempt: int) -> None:
        self._synchronizer.restart(attempt)
        for parameter in self.parameters:
            for kind, array in self._arrays(parameter).items():
                array[...] = arrays[parameter.name, kind].reshape(array.shape)
            if isinstance(parameter, HalfParameter):
                parameter.stored[...] = self._optimizer.state(parameter.name)[MASTER]
        self._optimizer.step_count = step_count

    def reduction_state(self) -> dict[str, Array]:
        return self._synchronizer.state()

    @property
    def reductions(self) -> int:
        return self._synchronizer.steps

    def restore_reduction(self, state: Mapping[str, Array] | None, reductions: int) -> None:
        self._synchronizer.restore(state or {}, steps=None if state is None else reductions)

    def close(self) -> None:
        self._synchronizer.close()

    @property
    def kept_nbytes(self) -> int:
        stored = sum(2 * stored_value(parameter).nbytes for parameter in self.parameters)
        return stored + self._optimizer.nbytes

    @property
    def nbytes(self) -> int:
        return self.kept_nbytes + self._synchronizer.get_memory_usage().total

    @property
    def nbytes_needed(self) -> int:
        return self.nbytes

    def _arrays(self, parameter: Parameter) -> dict[str, Array]:
        """Return the values, those of the optimizer where they are more exact, and the states, by kind."""
        arrays = dict(self._optimizer.state(parameter.name))
        arrays[VALUE] = arrays.pop(MASTER) if isinstance(parameter, HalfParameter) else parameter.value
        return arrays
