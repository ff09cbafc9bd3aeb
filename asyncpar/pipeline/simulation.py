"""Costs of operations, and the resulting time, idle time and memory of a schedule.  Pure.

Ranks compute their orders one operation at a time; each begins when the rank is free and all its inputs are available.
Messages are sent concurrently with the computation (receives are posted ahead, sends run in the background): results of
another rank are available ``latency`` later, those of the same rank at once.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncpar.errors import UsageError
from asyncpar.pipeline.check import check_schedule
from asyncpar.pipeline.dependencies import computing, in_order_of_need
from asyncpar.pipeline.operation import Message, OperationKind, PipelineOp
from asyncpar.pipeline.rendering import Row, check_width, table, timeline
from asyncpar.pipeline.schedule import Schedule


def is_time(value: float) -> bool:
    """Whether ``value`` is a span of time: finite and not negative."""
    return 0.0 <= value < math.inf


CostModel = Callable[[PipelineOp], float]
"""Seconds (or any unit) that an operation takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Time of each kind of operation; a whole ``backward`` defaults to the sum of both halves.

    ``stage_factors``, if given, are the factors of these times for each virtual stage.

    ``forward``, ``backward_input`` and ``backward_weight`` are the times of one micro-batch in one stage, in any unit.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    backward: float | None = None
    stage_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "backward"):
            value = getattr(self, name)
            if value is not None and not is_time(value):
                raise UsageError(f"{name}: expected a finite time of 0 or more, got {value!r}")
        for factor in self.stage_factors:
            if not is_time(factor):
                raise UsageError(f"stage_factors: expected a finite factor of 0 or more, got {factor!r}")

    def __call__(self, operation: PipelineOp) -> float:
        factor = self.stage_factors[operation.stage] if self.stage_factors else 1.0
        match operation.kind:
            case OperationKind.FORWARD:
                return factor * self.forward
            case OperationKind.BACKWARD_INPUT:
                return factor * self.backward_input
            case OperationKind.BACKWARD_WEIGHT:
                return factor * self.backward_weight
            case OperationKind.BACKWARD:
                halves = self.backward_input + self.backward_weight
                return factor * (halves if self.backward is None else self.backward)
        raise AssertionError(f"{operation} is not computed")


UNIT_COSTS = Costs()
"""One for a forward and for each half of a backward pass."""


def cost_of(operation: PipelineOp, costs: CostModel) -> float:
    """Return the cost of an operation; raise a UsageError if that is not a span of time."""
    cost = costs(operation)
    if not is_time(cost):
        raise UsageError(f"costs: expected a finite time of 0 or more for {operation}, got {cost!r}")
    return cost


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSpan:
    """An operation and the time of its run."""

    operation: PipelineOp
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """``spans[rank]`` are the operations of each rank with times; ``peak_in_flight[rank]`` is the most that it kept at
    any time.

    A micro-batch is in flight in a chunk from its forward until its backward, or its weight gradients, are done.
    """

    name: str
    virtual_stages: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[OperationSpan, ...], ...]
    peak_in_flight: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Time from the first operation's start to the last one's end."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, its compute time."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def ideal(self) -> float:
        """The compute time of the busiest rank, a lower bound for any order."""
        return max(self.busy)

    @property
    def bubble_over_ideal(self) -> float:
        """Lost time as a part of the ideal: the definition of the Megatron papers."""
        return (self.makespan - self.ideal) / self.ideal if self.ideal else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Lost time as a part of the makespan: the definition of the GPipe paper."""
        return (self.makespan - self.ideal) / self.makespan if self.makespan else 0.0

    @property
    def span_bubble(self) -> float:
        """The most that a rank idles between its own first and last operation.

        Less than makespan - ideal if ranks begin the next step while others still end this one.
        """
        gaps = (spans[-1].end - spans[0].start - busy for spans, busy in zip(self.spans, self.busy, strict=True))
        return max(gaps)

    def render(self, width: int = 80) -> str:
        """Return the figures, a table of ranks and the timeline, in lines of at most ``width`` characters."""
        rows = [
            Row(rank=rank, stages=stages, busy=busy, idle=self.makespan - busy, peak=peak)
            for rank, (stages, busy, peak) in enumerate(
                zip(self.virtual_stages, self.busy, self.peak_in_flight, strict=True)
            )
        ]
        figures = [
            f"{self.name}: makespan {self.makespan:g}, ideal {self.ideal:g}",
            f"bubble {self.bubble_over_ideal:.1%} of ideal, {self.bubble_fraction:.1%} of makespan",
        ]
        drawn = [[(span.operation, span.start, span.end) for span in spans] for spans in self.spans]
        wrapped = [line for figure in figures for line in textwrap.wrap(figure, check_width(width))]
        return "\n".join([*wrapped, "", *table(rows, width), "", *timeline(drawn, width)])

    def __str__(self) -> str:
        return self.render()


def simulate(schedule: Schedule, costs: CostModel = UNIT_COSTS, latency: float = 0.0) -> Simulation:
    """Simulate ``schedule``, with ``latency`` for each hop between ranks.

    Raises InvalidSchedule, before anything is simulated, if it cannot be run (``check_schedule``).

    ``costs`` are the times of operations.
    """
    check_schedule(schedule)
    _check_costs(schedule, costs, latency)
    ranks = schedule.layout.ranks
    orders = [schedule.compute_order(rank) for rank in range(schedule.num_stages)]
    ready: dict[Message, float] = {}
    spans: list[list[OperationSpan]] = [[] for _ in orders]
    for rank, operation, needed in in_order_of_need(orders, computing(len(ranks) - 1), schedule.place_of):
        arrivals = [ready[message] + (latency if ranks[message.stage] != rank else 0.0) for message in needed]
        start = max([*arrivals, spans[rank][-1].end if spans[rank] else 0.0])
        end = start + cost_of(operation, costs)
        spans[rank].append(OperationSpan(operation=operation, start=start, end=end))
        if operation.made is not None:
            ready[operation.made] = end
    return Simulation(
        name=schedule.name,
        virtual_stages=tuple(schedule.virtual_stages_of(rank) for rank in range(schedule.num_stages)),
        spans=tuple(map(tuple, spans)),
        peak_in_flight=tuple(peak_in_flight(order) for order in orders),
    )


def peak_in_flight(order: Iterable[PipelineOp]) -> int:
    """Return the largest number of micro-batches, counted once per chunk, between forward and the end of backward."""
    kept = peak = 0
    for operation in order:
        kept += operation.kind is OperationKind.FORWARD
        peak = max(peak, kept)
        kept -= operation.kind.frees_activation
    return peak


def _check_costs(schedule: Schedule, costs: CostModel, latency: float) -> None:
    if not is_time(latency):
        raise UsageError(f"latency: expected a finite time of 0 or more, got {latency!r}")
    if isinstance(costs, Costs) and costs.stage_factors and len(costs.stage_factors) != schedule.num_virtual_stages:
        raise UsageError(
            f"stage_factors: expected one for each of {schedule.num_virtual_stages} virtual stages, "
            f"got {costs.stage_factors!r}"
        )
