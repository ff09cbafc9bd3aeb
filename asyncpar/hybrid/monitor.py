"""Keeps what a rank measures of its last steps, and brings the figures of all ranks together."""

from __future__ import annotations

from collections import deque

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.hybrid.analysis import PerformanceAnalysis, RankPerformance, analyze, summarize
from asyncpar.hybrid.measure import StepMeasure
from asyncpar.hybrid.report import render_report

DEFAULT_CAPACITY = 100


class Performance3DMonitor:
    """The last ``capacity`` steps of ``rank``."""

    def __init__(self, rank: int = 0, *, capacity: int = DEFAULT_CAPACITY) -> None:
        if rank < 0:
            raise UsageError(f"rank: expected 0 or more, got {rank}")
        if capacity < 1:
            raise UsageError(f"capacity: expected at least 1 step, got {capacity}")
        self._rank = rank
        self._measures: deque[StepMeasure] = deque(maxlen=capacity)

    @property
    def measures(self) -> tuple[StepMeasure, ...]:
        """The steps that are kept, the oldest first."""
        return tuple(self._measures)

    def record(self, measure: StepMeasure) -> None:
        """Keep ``measure``; it takes the place of the oldest when there are ``capacity``.

        Steps that do not come before it are forgotten: training has gone back, to a checkpoint say.
        """
        while self._measures and self._measures[-1].step >= measure.step:
            self._measures.pop()
        self._measures.append(measure)

    def clear(self) -> None:
        """Forget all steps, such as those of a warm-up."""
        self._measures.clear()

    def performance(self) -> RankPerformance:
        """Return the figures of this rank."""
        return summarize(self._rank, self._measures)

    def analyze(self) -> PerformanceAnalysis:
        """Return the analysis of this rank alone.  Raises ``UsageError`` before the first step."""
        return analyze([self.performance()])

    async def analyze_all(self, communicator: Communicator) -> PerformanceAnalysis:
        """Return the analysis of all ranks of ``communicator``, which call this together; equal on all of them.

        Raises ``UsageError``, on every rank, where no rank has recorded a step.
        """
        everyone = await communicator.all_gather_object(self.performance(), wanted=RankPerformance)
        return analyze(everyone)

    def report(self, *, width: int = 80) -> str:
        """Return a report on this rank for people; see ``render_report``."""
        return render_report(self.analyze(), width=width)
