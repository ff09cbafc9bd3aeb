"""The flow of gradients over replicas into parameters: the interface, and the flow of unsharded replicas."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.gradsync import GradientSynchronizer, StepOutcome, SyncStatistics
from asyncpar.gradsync.layout_cache import is_of_codec, owed_parameter
from asyncpar.gradsync.plan import HasGradient
from asyncpar.nn.half import stored_value
from asyncpar.nn.optimizers import Optimizer, Rule
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.zero.memory import MemoryUsage
from asyncpar.zero.share import Held, StatePiece, pieces_of, restore_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionState:
    """State of the reduction on one rank between steps, such as residuals: flat arrays by name.

    ``number`` is that of the last reduction, equal on all ranks.  ``parts`` describes the arrays that are parts of the
    amount lacking from reduced gradients: the parameter, and the weight of the part in the sum over all replicas.
    ``lost`` are those that another layout can neither use nor recompute.
    """

    arrays: Mapping[str, Array]
    number: int
    parts: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    lost: Sequence[str] = ()


class GradientFlow(ABC):
    """Reduces the gradients of ``parameters`` over all ranks that have a part of them, and moves the parameters.

    A step is ``zero_grad``, ``reducing`` around the backward passes, then, after ranks have inspected norms, ``scale``
    and ``step``, or neither.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = tuple(parameters)

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether ``squared_norm`` counts only this rank's shards, not gradients that all replicas hold."""

    @property
    @abstractmethod
    def step_count(self) -> int:
        """Number of updates so far."""

    @property
    @abstractmethod
    def skipped(self) -> Mapping[str, int]:
        """By parameter, the number of those updates in which it was frozen, if any."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget all gradients."""

    @abstractmethod
    def reducing(self) -> AbstractAsyncContextManager[OnGradient]:
        """Reduce gradients as they become final in the block; after it all are means over the replicas."""

    @abstractmethod
    async def norm(self) -> float:
        """Return the norm of the reduced gradients of all replicas; may be non-finite.  All replicas call it."""

    @abstractmethod
    def squared_norm(self, without: Collection[str]) -> float:
        """Return the squared norm of this rank's reduced gradients except those ``without``; may be non-finite."""

    @property
    @abstractmethod
    def spoiled(self) -> Sequence[str]:
        """Names of the parameters whose gradients were not finite on this rank, before the reduction, in the last step.

        Known once the gradients are reduced.
        """

    @property
    @abstractmethod
    def overflowed(self) -> Sequence[str]:
        """Names of the reduced gradients that are not finite on this rank, or of the buckets that contain them."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the gradients by ``factor``, in the step."""

    @abstractmethod
    async def step(self, learning_rate: float) -> None:
        """Move the parameters."""

    @abstractmethod
    async def catch_up(self, learning_rate: float) -> None:
        """Take the step that other ranks have taken with these gradients; all ranks call ``resume`` after it."""

    @abstractmethod
    async def resume(self, attempt: int) -> None:
        """Recover from a failure.  All ranks call it, each time with a new number that is the same on all of them."""

    @abstractmethod
    def pieces(self) -> Sequence[StatePiece]:
        """Return this rank's part of a checkpoint: values and optimizer states."""

    @abstractmethod
    async def restore(
        self,
        arrays: Mapping[tuple[str, str], Array],
        step_count: int,
        skipped: Mapping[str, int],
        attempt: int | None = None,
    ) -> None:
        """Continue from other ``pieces``, by (parameter, kind), after so many updates.  All ranks call it.

        If a rank may fail before it reaches this, all pass the same new number as ``attempt`` each time.
        """

    @abstractmethod
    def reduction_state(self) -> ReductionState:
        """Return the state of the gradient reduction on this rank between steps."""

    @abstractmethod
    def restore_reduction(self, state: ReductionState | None) -> None:
        """Continue from ``state``; None: start afresh."""

    @property
    @abstractmethod
    def replica(self) -> int:
        """The number of this rank among those that hold the same parts of the same parameters."""

    @abstractmethod
    def owe(self, lacking: Mapping[str, Array]) -> Sequence[str]:
        """Compensate in the next steps for what reduced gradients lack: flat, by parameter.

        It is equal on all replicas, and replaces current residuals.  Returns the parameters that cannot be compensated.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the names by which its collectives meet."""

    @abstractmethod
    def statistics(self) -> SyncStatistics:
        """Return times and traffic so far of the reductions by a synchronizer."""

    @abstractmethod
    def memory(self) -> MemoryUsage:
        """Return the memory that this rank holds now, by purpose."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of parameters, gradients, states, buckets and residuals that this rank holds, at their peak."""

    @property
    @abstractmethod
    def nbytes_needed(self) -> int:
        """Bytes that it will hold in a step; not all are allocated before the first one."""


class ReplicatedFlow(GradientFlow):
    """``synchronizer`` makes gradients equal, over tensor-parallel ranks and ties, too; each replica updates all.

    A ``synchronizer`` that skips non-finite steps makes the norm infinite.  ``rank`` is this rank's number in the
    world.  ``gradients``, if given, are synchronized in place of the gradients of the parameters, and ``weight`` is the
    factor applied to their means afterwards.
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
        gradients: Sequence[HasGradient] | None = None,
        weight: int = 1,
    ) -> None:
        super().__init__(parameters)
        self._gradients = self.parameters if gradients is None else gradients
        self._optimizer = Optimizer(self.parameters, rule)
        self._synchronizer = synchronizer
        self._replicas = replicas
        self._rank = rank
        self._weight = weight
        self._outcome = StepOutcome()

    @property
    def step_count(self) -> int:
        return self._optimizer.step_count

    @property
    def skipped(self) -> Mapping[str, int]:
        return self._optimizer.skipped

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @asynccontextmanager
    async def reducing(self) -> AsyncIterator[OnGradient]:
        async with self._synchronizer.step(self._gradients) as step:
            yield step.ready
        self._outcome = step.outcome

    async def norm(self) -> float:
        found: list[float] = []
        await off_loop(lambda: found.append(self.squared_norm(())), nbytes=self._stored_nbytes)
        return math.sqrt(found[0])

    def squared_norm(self, without: Collection[str]) -> float:
        """Add up one part for each replica, which gives the same bits as replicas that own one part each."""
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
        await off_loop(partial(self._optimizer.step, learning_rate), nbytes=4 * self._stored_nbytes)

    async def catch_up(self, learning_rate: float) -> None:
        await self.step(learning_rate)

    async def resume(self, attempt: int) -> None:
        self._synchronizer.restart(attempt)

    def pieces(self) -> Sequence[StatePiece]:
        return pieces_of(self._held())

    async def restore(
        self,
        arrays: Mapping[tuple[str, str], Array],
        step_count: int,
        skipped: Mapping[str, int],
        attempt: int | None = None,
    ) -> None:
        if attempt is not None:
            self._synchronizer.restart(attempt)
        restore_pieces(self._held(), arrays)
        self._optimizer.step_count, self._optimizer.skipped = step_count, skipped

    def reduction_state(self) -> ReductionState:
        arrays = self._synchronizer.state()
        share = self._weight / self._synchronizer.replicas.size
        owed = {key: owed_parameter(key) for key in arrays}
        return ReductionState(
            arrays=arrays,
            number=self._synchronizer.steps,
            parts={key: (name, share) for key, name in owed.items() if name is not None},
            lost=[key for key in arrays if is_of_codec(key)],
        )

    def restore_reduction(self, state: ReductionState | None) -> None:
        if state is None:
            self._synchronizer.restore({})
        else:
            self._synchronizer.restore(state.arrays, steps=state.number)

    @property
    def replica(self) -> int:
        return self._synchronizer.replicas.rank

    def owe(self, lacking: Mapping[str, Array]) -> Sequence[str]:
        of_means = {name: (values / self._weight).astype(np.float32) for name, values in lacking.items()}
        return self._synchronizer.owe(of_means)

    def close(self) -> None:
        self._synchronizer.close()

    def statistics(self) -> SyncStatistics:
        return self._synchronizer.get_sync_stats()

    def memory(self) -> MemoryUsage:
        held = self._synchronizer.get_memory_usage()
        return MemoryUsage(
            parameters=self._stored_nbytes,
            gradients=sum(parameter.grad.nbytes for parameter in self.parameters if parameter.has_grad),
            optimizer_states=self._optimizer.nbytes,
            buffers=held.buffers,
            residuals=held.residuals,
        )

    @property
    def _stored_nbytes(self) -> int:
        return sum(stored_value(parameter).nbytes for parameter in self.parameters)

    @property
    def nbytes(self) -> int:
        kept = 2 * self._stored_nbytes + self._optimizer.nbytes
        return kept + self._synchronizer.get_memory_usage().total

    @property
    def nbytes_needed(self) -> int:
        return self.nbytes

    def _held(self) -> list[Held]:
        return [(flat, flat.of(stored_value(flat.parameter))) for flat in self._optimizer.ranges]
