"""The beginning and end of tensor-parallel layers.

Between them every rank holds the same activations, or, with sequence parallelism, the same part of every sequence.
Inside, each rank holds its part of the layers and computes with that.  Entering and leaving are the two conjugate
operators f and g of Megatron-LM (Shoeybi et al. 2019; with sequence parallelism Korthikanti et al. 2022):

                 forward                           backward
    enter  (f)   nothing | all-gather              all-reduce | reduce-scatter
    leave  (g)   all-reduce | reduce-scatter       nothing | all-gather

With sequence parallelism the work on weight gradients gathers inputs again, so if it is deferred, all ranks of the
group must do it in the same order, like everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncpar.core.config.placement import UNPLACED, Placement, Replication
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array
from asyncpar.nn.tensor.group import TensorGroup

SEQUENCE = 1
"""The dimension of activations (batch, length, features) that sequence parallelism cuts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRegion:
    """The ranks that share layers, and the layout of activations outside of these.

    With ``sequence_parallel`` each rank holds a part of every sequence there, otherwise all hold everything.
    """

    group: TensorGroup
    sequence_parallel: bool = False

    @property
    def placement(self) -> Placement:
        """The placement of parameters outside, of which every rank holds a copy."""
        if self.group.size == 1:
            return UNPLACED
        partial = Replication.PARTIAL if self.sequence_parallel else Replication.WHOLE
        return Placement(replicated=partial)

    def enter(self, x: Array) -> Array:
        """Return whole activations for those in the outside layout."""
        return self.group.all_gather(x, SEQUENCE) if self.sequence_parallel else x

    def start_enter_gradient(self, dx: Array) -> Callable[[], Array]:
        """Start adding up the gradients of entered activations over ranks; ``dx`` may be overwritten.

        The returned function waits for the sum, so that something else can be computed meanwhile.
        """
        if self.sequence_parallel:
            return lambda: self.group.reduce_scatter(dx, SEQUENCE)
        return self.group.start_all_reduce(dx)

    def leave(self, y: Array) -> Array:
        """Return the sum of all ranks' ``y`` in the outside layout; ``y`` may be overwritten."""
        return self.group.reduce_scatter(y, SEQUENCE) if self.sequence_parallel else self.group.all_reduce(y)

    def leave_gradient(self, dy: Array) -> Array:
        """Return the whole gradient of the activations passed to ``leave``."""
        return self.group.all_gather(dy, SEQUENCE) if self.sequence_parallel else dy

    def sequence_bounds(self, length: int) -> tuple[int, int]:
        """Return start and stop of this rank's outside part of sequences of ``length``."""
        return self.group.bounds(length) if self.sequence_parallel else (0, length)

    def cut(self, name: str, what: str, length: int) -> tuple[int, int]:
        """Return start and stop of this rank's part of ``length``; no part may be empty."""
        if length < self.group.size:
            raise UsageError(f"{name}: expected {what} >= {self.group.size} tensor-parallel ranks, got {length}")
        return self.group.bounds(length)

    def check_held(self, name: str, x: Array, features: int) -> None:
        """Raise ``UsageError`` unless ``x`` can be activations of ``features`` in the outside layout."""
        self._check(name, x, features, "batch, part of the length")

    def check_inside(self, name: str, x: Array, features: int) -> None:
        """Raise ``UsageError`` unless ``x`` can be activations of ``features`` in the inside layout."""
        self._check(name, x, features, "batch, length")

    def _check(self, name: str, x: Array, features: int, leading: str) -> None:
        if x.ndim < 1 or x.shape[-1] != features or (self.sequence_parallel and x.ndim != 3):
            leading = leading if self.sequence_parallel else "..."
            raise UsageError(f"{name}: expected an input of shape ({leading}, {features}), got {x.shape}")
