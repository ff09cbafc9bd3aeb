"""What becomes of the gradients of a step: how they are reduced, and how they move parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from asyncpar.gradsync import SyncStatistics
from asyncpar.multinode.gradient_buffer import GradientIntake
from asyncpar.multinode.statistics import CompressionInfo, MemoryUsage
from asyncpar.nn.parameter import Array, OnGradient
from asyncpar.zero.share import StatePiece


class StepFlow(ABC):
    """The way of gradients on one rank; all ranks go it together, ``run``, then ``apply``, then ``step``."""

    @abstractmethod
    def run(self, intake: GradientIntake) -> AbstractAsyncContextManager[OnGradient]:
        """Make the sums of ``intake`` the mean over all ranks; yields what to call for those that are final.

        Leaving the block means that all are.  Whatever goes wrong, on any rank, raises on every rank.  Ranks that have
        taken in different numbers of micro-steps, or none, are a ``UsageError``, on every rank.
        """

    @abstractmethod
    async def apply(self, intake: GradientIntake) -> None:
        """Divide the means by the number of micro-steps, and forget what ``intake`` has of them."""

    @abstractmethod
    async def step(self, learning_rate: float, *, clip_norm: float | None) -> float:
        """Move all parameters once and return the global norm of gradients before clipping.

        Raises ``NonFiniteValue``, on every rank and with nothing changed, where gradients are not finite.
        """

    @abstractmethod
    def forget(self) -> None:
        """Forget all gradients."""

    @abstractmethod
    def memory(self) -> MemoryUsage:
        """Return what parameters, gradients, states and buffers take now."""

    @property
    @abstractmethod
    def memory_savings(self) -> float:
        """The part of parameters, gradients and states that is not held on this rank because others hold it."""

    @abstractmethod
    def statistics(self) -> SyncStatistics:
        """Return times and traffic so far."""

    @abstractmethod
    async def pieces(self) -> list[StatePiece]:
        """Return what a checkpoint must hold of this rank; all ranks call it."""

    @abstractmethod
    async def restore(self, arrays: Mapping[tuple[str, str], Array], *, step_count: int) -> None:
        """Go on from the ``pieces`` of a checkpoint, flat, by (parameter, kind); all ranks call it."""

    @abstractmethod
    def reduction_state(self) -> dict[str, Array]:
        """Return what the reduction of gradients keeps on this rank between steps, by name."""

    @property
    @abstractmethod
    def reductions(self) -> int:
        """The number of the last reduction, equal on all ranks."""

    @abstractmethod
    def restore_reduction(self, state: Mapping[str, Array] | None, reductions: int) -> None:
        """Go on from ``reduction_state`` and ``reductions``, or, where that is None, from nothing."""

    @property
    @abstractmethod
    def compression(self) -> CompressionInfo:
        """What this rank has sent to other nodes."""

    @property
    @abstractmethod
    def owns_part(self) -> bool:
        """Does this rank own states that no other rank has?"""
