"""Measurements of training steps, and the analysis of their bottlenecks.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from asyncpar.errors import UsageError

_SECONDS = (
    "seconds",
    "compute_seconds",
    "communication_seconds",
    "pipeline_wait_seconds",
    "tensor_parallel_seconds",
)
_COUNTS = ("step", "memory_used", "memory_limit", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasure:
    """One step on one rank.

    ``seconds`` is the time of the whole step.  Parts of it: ``compute_seconds`` in forward, backward and optimizer
    without their communication; ``tensor_parallel_seconds`` in collectives of tensor-parallel ranks;
    ``pipeline_wait_seconds`` waiting for activations and gradients of neighbouring stages; ``communication_seconds``
    waiting for other collectives, such as those of gradients and parameters, as far as compute does not hide them.

    ``memory_used`` is the peak in bytes, of ``memory_limit`` bytes (0: no limit).  ``tokens`` are those of the whole
    batch, of all replicas together; 0 on ranks that do not know.
    """

    step: int
    seconds: float
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    pipeline_wait_seconds: float = 0.0
    tensor_parallel_seconds: float = 0.0
    memory_used: int = 0
    memory_limit: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        for name in _SECONDS:
            value = getattr(self, name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise UsageError(f"{name}: expected a finite number of seconds, 0 or more, got {value}")
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise UsageError(f"{name}: expected 0 or more, got {getattr(self, name)}")


COMMUNICATION_LIMIT = 0.30
MEMORY_LIMIT = 0.90
PIPELINE_LIMIT = 0.70
TENSOR_PARALLEL_LIMIT = 0.80


class BottleneckKind(StrEnum):
    """The resource that limits a step."""

    COMMUNICATION = "communication"
    MEMORY = "memory"
    PIPELINE = "pipeline"
    TENSOR_PARALLEL = "tensor_parallel"


class Severity(StrEnum):
    """The severity of a bottleneck, ascending."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    CRITICAL = "critical"


_BY_SEVERITY = tuple(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """``value``, a share, is on the wrong side of ``threshold``; ``rank`` is the worst one."""

    kind: BottleneckKind
    severity: Severity
    value: float
    threshold: float
    advice: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPerformance:
    """Sums over the last ``steps`` steps of one rank; see ``StepMeasure``.

    ``memory_used`` is the peak, and ``memory_limit`` the limit at that step.
    """

    rank: int
    steps: int
    last_step: int
    seconds: float
    compute_seconds: float
    communication_seconds: float
    pipeline_wait_seconds: float
    tensor_parallel_seconds: float
    memory_used: int
    memory_limit: int
    tokens: int

    @property
    def seconds_per_step(self) -> float:
        return _ratio(self.seconds, self.steps)

    @property
    def compute_per_step(self) -> float:
        """Seconds per step in which this rank itself was computing."""
        return _ratio(self.compute_seconds, self.steps)

    @property
    def communication_share(self) -> float:
        """The part of its time in collectives, including tensor-parallel ones."""
        return min(1.0, _ratio(self.communication_seconds + self.tensor_parallel_seconds, self.seconds))

    @property
    def pipeline_utilization(self) -> float:
        """The part of its time in which this rank did not wait for other stages."""
        return 1.0 - min(1.0, _ratio(self.pipeline_wait_seconds, self.seconds))

    @property
    def tensor_parallel_efficiency(self) -> float:
        """The part of computing with tensor-parallel peers that was not communication."""
        together = self.compute_seconds + self.tensor_parallel_seconds
        return 1.0 - _ratio(self.tensor_parallel_seconds, together)

    @property
    def memory_share(self) -> float:
        """The peak over its limit; 0 without one."""
        return _ratio(self.memory_used, self.memory_limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerformanceAnalysis:
    """Figures of one or many ``ranks``, ordered by rank; bottlenecks, the most severe first.

    ``seconds_per_step`` is that of the rank that took longest, ``tokens_per_second`` that of all ranks together.
    """

    ranks: tuple[RankPerformance, ...]
    seconds_per_step: float
    tokens_per_second: float
    bottlenecks: tuple[Bottleneck, ...]

    @property
    def slowest(self) -> RankPerformance:
        """The rank that computes longest in a step, for which the others wait."""
        return max(self.ranks, key=lambda one: one.compute_per_step)

    @property
    def imbalance(self) -> float:
        """The compute time of the slowest rank over the mean of all ranks; 1 if no rank computes."""
        mean = sum(one.compute_per_step for one in self.ranks) / len(self.ranks)
        return _ratio(self.slowest.compute_per_step, mean) if mean else 1.0

    @property
    def compute_share(self) -> float:
        """The part of all ranks' time in which they computed."""
        return self._share(sum(one.compute_seconds for one in self.ranks))

    @property
    def communication_share(self) -> float:
        """The part of all ranks' time in collectives other than those of tensor-parallel ranks."""
        return self._share(sum(one.communication_seconds for one in self.ranks))

    @property
    def tensor_parallel_share(self) -> float:
        """The part of all ranks' time in collectives of tensor-parallel ranks."""
        return self._share(sum(one.tensor_parallel_seconds for one in self.ranks))

    @property
    def pipeline_wait_share(self) -> float:
        """The part of all ranks' time in which they waited for other stages."""
        return self._share(sum(one.pipeline_wait_seconds for one in self.ranks))

    def _share(self, seconds: float) -> float:
        return _ratio(seconds, sum(one.seconds for one in self.ranks))


def summarize(rank: int, measures: Sequence[StepMeasure]) -> RankPerformance:
    """Return the figures of a rank over ``measures``, which may be none."""
    fullest = max(measures, key=_fullness, default=None)
    return RankPerformance(
        rank=rank,
        steps=len(measures),
        last_step=measures[-1].step if measures else 0,
        seconds=sum(measure.seconds for measure in measures),
        compute_seconds=sum(measure.compute_seconds for measure in measures),
        communication_seconds=sum(measure.communication_seconds for measure in measures),
        pipeline_wait_seconds=sum(measure.pipeline_wait_seconds for measure in measures),
        tensor_parallel_seconds=sum(measure.tensor_parallel_seconds for measure in measures),
        memory_used=0 if fullest is None else fullest.memory_used,
        memory_limit=0 if fullest is None else fullest.memory_limit,
        tokens=sum(measure.tokens for measure in measures),
    )


def analyze(ranks: Iterable[RankPerformance]) -> PerformanceAnalysis:
    """Return the analysis of the figures of ranks; those without a step are left out.

    Raises ``UsageError`` if none has a step, or two have the same rank.
    """
    known = sorted((one for one in ranks if one.steps), key=lambda one: one.rank)
    if not known:
        raise UsageError("performance: expected at least one recorded step, got none")
    for one, other in pairwise(known):
        if one.rank == other.rank:
            raise UsageError(f"performance: expected each rank once, got rank {one.rank} twice")
    return PerformanceAnalysis(
        ranks=tuple(known),
        seconds_per_step=max(one.seconds_per_step for one in known),
        tokens_per_second=max(_ratio(one.tokens, one.seconds) for one in known),
        bottlenecks=tuple(sorted(_bottlenecks(known), key=_gravity, reverse=True)),
    )


def _bottlenecks(ranks: Sequence[RankPerformance]) -> Iterable[Bottleneck]:
    """Yield the figures beyond their thresholds, on the worst rank."""
    worst = max(ranks, key=lambda one: one.memory_share)
    if worst.memory_share > MEMORY_LIMIT:
        yield Bottleneck(
            kind=BottleneckKind.MEMORY,
            severity=Severity.CRITICAL,
            value=worst.memory_share,
            threshold=MEMORY_LIMIT,
            advice="recompute more activations, use a higher ZeRO stage, more tensor-parallel ranks, or smaller "
            "micro-batches",
            rank=worst.rank,
        )
    worst = max(ranks, key=lambda one: one.communication_share)
    if worst.communication_share > COMMUNICATION_LIMIT:
        yield Bottleneck(
            kind=BottleneckKind.COMMUNICATION,
            severity=Severity.HIGH,
            value=worst.communication_share,
            threshold=COMMUNICATION_LIMIT,
            advice="let gradients travel during the backward pass, accumulate over more micro-batches, compress what "
            "travels between hosts, or even out the work of ranks that others wait for",
            rank=worst.rank,
        )
    worst = min(ranks, key=lambda one: one.pipeline_utilization)
    if worst.pipeline_utilization < PIPELINE_LIMIT:
        yield Bottleneck(
            kind=BottleneckKind.PIPELINE,
            severity=Severity.MEDIUM,
            value=worst.pipeline_utilization,
            threshold=PIPELINE_LIMIT,
            advice="use more micro-batches per step, more model chunks per stage, a zero-bubble schedule, or stages "
            "of more equal work",
            rank=worst.rank,
        )
    worst = min(ranks, key=lambda one: one.tensor_parallel_efficiency)
    if worst.tensor_parallel_efficiency < TENSOR_PARALLEL_LIMIT:
        yield Bottleneck(
            kind=BottleneckKind.TENSOR_PARALLEL,
            severity=Severity.MEDIUM,
            value=worst.tensor_parallel_efficiency,
            threshold=TENSOR_PARALLEL_LIMIT,
            advice="put tensor-parallel ranks on one host (order), use fewer of them, or larger micro-batches",
            rank=worst.rank,
        )


def _gravity(bottleneck: Bottleneck) -> int:
    """Return the sort key of findings by severity, which keeps the order of equal ones."""
    return _BY_SEVERITY.index(bottleneck.severity)


def _fullness(measure: StepMeasure) -> tuple[float, int]:
    return _ratio(measure.memory_used, measure.memory_limit), measure.memory_used


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
