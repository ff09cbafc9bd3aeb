"""The way of gradients from the backward pass to the update of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.zero.share import StatePiece


class GradientFlow(ABC):
    """Reduces the gradients of ``parameters`` over everyone who has a part of them, and moves the parameters.

    A step is ``zero_grad``, ``reducing`` around the backward passes, then, after ranks have looked at norms, ``scale``
    and ``step``, or neither.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = tuple(parameters)

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Does ``squared_norm`` count this rank's shards only, and not what all replicas have alike?"""

    @property
    @abstractmethod
    def step_count(self) -> int:
        """Number of updates so far."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget all gradients."""

    @abstractmethod
    def reducing(self) -> AbstractAsyncContextManager[OnGradient]:
        """Reduce gradients as they become final in the block; behind it all are means over the replicas."""

    @abstractmethod
    def squared_norm(self, without: Collection[str]) -> float:
        """Return the square of the norm of this rank's reduced gradients but those ``without``; may be not finite."""

    @property
    @abstractmethod
    def spoiled(self) -> Sequence[str]:
        """Names of the parameters whose gradients were not finite on this rank, before the reduction, in the last step.

        Known once the gradients are reduced.
        """

    @property
    @abstractmethod
    def overflowed(self) -> Sequence[str]:
        """Names of the reduced gradients that are not finite on this rank, or of the buckets that they are in."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the gradients by ``factor``, in the step."""

    @abstractmethod
    async def step(self, learning_rate: float) -> None:
        """Move the parameters."""

    @abstractmethod
    async def catch_up(self, learning_rate: float) -> None:
        """Take, alone, the step that other ranks have taken with these gradients; ``resume`` follows on all ranks."""

    @abstractmethod
    async def resume(self, attempt: int) -> None:
        """Bring ranks together again after a failure.  All ranks call it, with the same number, a new one each time."""

    @abstractmethod
    def pieces(self) -> Sequence[StatePiece]:
        """Return what a checkpoint has to hold of this rank: values and optimizer states."""

    @abstractmethod
    async def restore(self, arrays: Mapping[tuple[str, str], Array], step_count: int, attempt: int) -> None:
        """Go on from other ``pieces``, by (parameter, kind).  All ranks call it, with a new ``attempt`` each time."""

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

    @abstractmethod
    def close(self) -> None:
        """Give back the names by which its collectives meet."""

    @property
    @abstractmethod
    def kept_nbytes(self) -> int:
        """Bytes of parameters, gradients and states that this rank holds."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of parameters, gradients, states, buckets and residuals that this rank holds, at their peak."""

    @property
    @abstractmethod
    def nbytes_needed(self) -> int:
        """Bytes that it will hold in a step, which are not all there before the first one."""
