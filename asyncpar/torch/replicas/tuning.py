"""Tuning of the buckets of replicas during training.

Theory of operation.  The figures of a pass are known when it is over.  Ranks exchange them alongside the buckets of the
next one, so that no pass waits for them, and a choice is kept for two passes: the first is measured, and in the second
ranks exchange figures.  All ranks receive the same figures and arrive at the same next choice.

A pass that one rank cannot complete fails on all ranks, and all of them forget their findings.  A pass that fails on
only some ranks (while they wait for its buckets: at a timeout, by an interrupt) leaves them with less knowledge than
others.  So ranks also send the number of passes that they know of, and if that differs, all forget.  If others have
rebuilt their buckets by the figures received in that very pass, later passes end with a mismatch on all ranks, and the
module has to be wrapped again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Identity
from asyncpar.core.config.names import Name
from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.gradsync.plan import GradientSpec
from asyncpar.gradsync.tuned_steps import FIGURES, StepTuning
from asyncpar.gradsync.tuning import AUTO, Choice, TuningConfig, TuningOutcome
from asyncpar.torch.process_group import ProcessGroup

T = TypeVar("T")

BucketBytes = Callable[[int], tuple[int, ...]]
"""Returns the bytes of the buckets, for the limit of bytes of one."""

_MIB = 1 << 20
_PASSES = 2
"""Passes with a choice for each that is measured."""


class ReplicaTuning:
    """The tuning of the passes of one reducer.  Raises ``UsageError`` for a pin that cannot run."""

    def __init__(
        self,
        config: TuningConfig,
        group: ProcessGroup,
        specs: Sequence[GradientSpec],
        *,
        bucket_bytes: int,
        plan_bytes: BucketBytes,
    ) -> None:
        self._group = group
        self._specs = tuple(specs)
        self._first_bytes = bucket_bytes
        self._plan_bytes = plan_bytes
        self._tuning = self._on_loop(lambda: StepTuning(config, group.communicator))
        self._own: NDArray[np.float64] | None = None
        """The figures of the last measured pass; None if it has failed."""
        self._known = 0
        """Number of passes that led to the current choice."""
        self.choice = self._choose()

    @property
    def bucket_bytes(self) -> int:
        """The limit of bytes of a bucket in the next pass."""
        if self.choice.bucket_size_mb == self._first_bytes / _MIB:
            return self._first_bytes
        return max(1, int(self.choice.bucket_size_mb * _MIB))

    @property
    def algorithm(self) -> Name | None:
        """The algorithm of the next pass; None for that of the cost model."""
        return None if self.choice.algorithm == AUTO else self.choice.name

    def exchanges_figures(self, number: int) -> bool:
        """Return whether ranks exchange their figures in pass ``number``."""
        return number % _PASSES == 0

    def all_final(self) -> None:
        """Record that a pass has nothing left to do but wait."""
        self._tuning.all_final()

    def measure(self) -> None:
        """Record the figures of the finished pass."""
        self._own = self._on_loop(self._tuning.measure)

    def own_message(self) -> NDArray[np.float64]:
        """Return this rank's message: figures, the number of passes it knows of, and whether it has figures."""
        own = np.zeros(FIGURES) if self._own is None else self._own
        return np.array([*own, self._known, self._own is not None])

    def receive(self, messages: NDArray[Any]) -> None:
        """Process the messages of all ranks, in rows, and choose."""
        self._own = None
        known, are_measured = messages[:, FIGURES], messages[:, FIGURES + 1]
        if (known != self._known).any():
            self.forget()
        elif are_measured.all():
            self._tuning.observe(messages[:, :FIGURES], steps=_PASSES)
            self._known += _PASSES
            self.choice = self._choose()

    def forget(self) -> None:
        """Start over, after a pass that has failed on this rank."""
        self._own = None
        self._known = 0
        self._tuning.restart()
        self.choice = self._choose()

    @property
    def outcome(self) -> TuningOutcome | None:
        """The findings so far."""
        return self._tuning.outcome

    def table(self) -> str:
        """Return the table of trials."""
        return self._tuning.table()

    def _choose(self) -> Choice:
        plan_bytes = self._plan_bytes
        return self._on_loop(
            partial(
                self._tuning.begin,
                self._specs,
                bucket_size_mb=self._first_bytes / _MIB,
                strategy=CommunicationStrategy.ADAPTIVE,
                codec=Identity(),
                bucket_bytes=lambda _, size_mb: plan_bytes(max(1, int(size_mb * _MIB))),
            )
        )

    def _on_loop(self, function: Callable[[], T]) -> T:
        """Run a function that reads the state of the group's operations."""
        return self._group.thread.do(function)
