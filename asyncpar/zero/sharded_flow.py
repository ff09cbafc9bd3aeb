"""Gradients of replicas that shard states, gradients or parameters (ZeRO)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.placement import Placement, is_frozen
from asyncpar.gradsync import GradientSynchronizer, StepOutcome, SyncStatistics
from asyncpar.nn.parameter import Array, OnGradient
from asyncpar.zero.engine import ZeroEngine
from asyncpar.zero.flow import GradientFlow, ReductionState
from asyncpar.zero.memory import MemoryUsage
from asyncpar.zero.share import StatePiece

_ENGINE, _SHARED = "engine/", "shared/"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """This rank's gradient shard of a parameter, of which ranks of other slices or stages own the same part."""

    name: str
    grad: NDArray[np.floating[Any]]
    placement: Placement
    requires_grad: bool


class ShardedFlow(GradientFlow):
    """``engine`` reduces over the replicas; gradients shared beyond them are then added up shard by shard.

    ``synchronizer`` does that, over the ranks of one replica; None if nothing is shared.
    """

    is_sharded = True

    def __init__(self, engine: ZeroEngine, synchronizer: GradientSynchronizer | None) -> None:
        super().__init__(engine.parameters)
        self._engine = engine
        self._synchronizer = synchronizer
        self._outcome = StepOutcome()

    @property
    def step_count(self) -> int:
        return self._engine.step_count

    @property
    def skipped(self) -> Mapping[str, int]:
        return self._engine.skipped

    def zero_grad(self) -> None:
        self._engine.zero_grad()

    @asynccontextmanager
    async def reducing(self) -> AsyncIterator[OnGradient]:
        try:
            yield self._engine.ready
            await self._engine.reduce()
            if self._synchronizer is not None:
                async with self._synchronizer.step(self._shared()) as step:
                    pass
                self._outcome = step.outcome
        except BaseException:
            await self._engine.abandon()
            raise

    async def norm(self) -> float:
        return await self._engine.global_norm()

    def squared_norm(self, without: Collection[str]) -> float:
        return math.inf if self._outcome.is_skipped else self._engine.squared_norm(without=without)

    @property
    def spoiled(self) -> Sequence[str]:
        return self._engine.spoiled()

    @property
    def overflowed(self) -> Sequence[str]:
        return [*self._engine.overflowed(), *self._outcome.lost]

    def scale(self, factor: float) -> None:
        self._engine.scale(factor)

    async def step(self, learning_rate: float) -> None:
        await self._engine.step(learning_rate)

    async def catch_up(self, learning_rate: float) -> None:
        await self._engine.catch_up(learning_rate)

    async def resume(self, attempt: int) -> None:
        if self._synchronizer is not None:
            self._synchronizer.restart(attempt)
        await self._engine.resume(attempt)

    def pieces(self) -> Sequence[StatePiece]:
        return self._engine.state_pieces()

    async def restore(
        self,
        arrays: Mapping[tuple[str, str], Array],
        step_count: int,
        skipped: Mapping[str, int],
        attempt: int | None = None,
    ) -> None:
        if self._synchronizer is not None and attempt is not None:
            self._synchronizer.restart(attempt)
        await self._engine.restore(arrays, step_count=step_count, skipped=skipped, attempt=attempt or 0)

    def reduction_state(self) -> ReductionState:
        residuals, weights = self._engine.residuals(), self._engine.weights()
        arrays: dict[str, Array] = {f"{_ENGINE}{name}": values for name, values in residuals.items()}
        parts = {f"{_ENGINE}{name}": (name, weights[name]) for name in residuals}
        if self._synchronizer is None:
            return ReductionState(arrays=arrays, number=0, parts=parts)
        arrays |= {f"{_SHARED}{name}": values for name, values in self._synchronizer.state().items()}
        return ReductionState(arrays=arrays, number=self._synchronizer.steps, parts=parts)

    def restore_reduction(self, state: ReductionState | None) -> None:
        arrays = {} if state is None else state.arrays
        self._engine.restore_residuals(
            {key.removeprefix(_ENGINE): array for key, array in arrays.items() if not key.startswith(_SHARED)}
        )
        if self._synchronizer is not None:
            shared = {key.removeprefix(_SHARED): arrays[key] for key in arrays if key.startswith(_SHARED)}
            self._synchronizer.restore(shared, steps=None if state is None else state.number)

    @property
    def replica(self) -> int:
        return self._engine.communicator.rank

    def owe(self, lacking: Mapping[str, Array]) -> Sequence[str]:
        if self._synchronizer is not None:  # it encodes nothing, as each rank is its only replica
            self._synchronizer.restore({})
        return self._engine.owe(lacking)

    def close(self) -> None:
        self._engine.close()
        if self._synchronizer is not None:
            self._synchronizer.close()

    def statistics(self) -> SyncStatistics:
        return SyncStatistics() if self._synchronizer is None else self._synchronizer.get_sync_stats()

    def memory(self) -> MemoryUsage:
        stats = self._engine.memory_stats()
        return MemoryUsage(
            parameters=stats.parameters + stats.gathered,
            gradients=stats.gradients,
            optimizer_states=stats.states,
            buffers=stats.buffers,
            residuals=stats.residuals,
        )

    @property
    def nbytes(self) -> int:
        stats = self._engine.memory_stats()
        return stats.kept + stats.transient_peak + self._shared_nbytes

    @property
    def nbytes_needed(self) -> int:
        return max(self.nbytes, self._engine.memory_needed() + self._shared_nbytes)

    @property
    def _shared_nbytes(self) -> int:
        return 0 if self._synchronizer is None else self._synchronizer.get_memory_usage().total

    def _shared(self) -> list[_Shard]:
        reduced = self._engine.reduced()
        return [
            _Shard(
                name=parameter.name,
                grad=reduced[parameter.name],
                placement=parameter.placement,
                requires_grad=not is_frozen(parameter),
            )
            for parameter in self.parameters
            if parameter.placement.replicated is not None or parameter.placement.tied is not None
        ]
