"""Detection of the rank and the array in which NaN or infinity first occurs.

Theory of operation.  A value that is not finite spreads: to the stages after and before by messages, to the other
slices of a stage by its collectives, to all replicas by the reduction.  So each rank records the first one that it sees
in a step, and whether that came from elsewhere (as the input of a stage, or the gradient of its output) or was computed
there.  Ranks that share a stage run the same collectives in the same order: of those whose own values were not finite,
the ones that contributed them to the earliest collective are the origin, because the others had its result.

Everything is checked once, when it is given or taken; after its first finding, a rank checks no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from asyncpar.hybrid.model import Loss
from asyncpar.nn.optimizers import all_finite
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage


class Sighting(msgspec.Struct, frozen=True):
    """The first non-finite value of a step on one rank.

    ``is_own``: it was computed there, from finite input; ``place`` is the array; ``calls`` counts the collectives of
    the stage before it.
    """

    is_own: bool
    place: str
    calls: int


class FiniteReport(msgspec.Struct, frozen=True):
    """The findings of one rank about a step that is not finite.

    ``slices`` are the ranks that share its stage, ``spoiled`` the parameters whose gradients were not finite there
    before any reduction, ``overflowed`` those whose gradients are not finite after it.
    """

    rank: int
    slices: tuple[int, ...]
    sighting: Sighting | None
    spoiled: list[str]
    overflowed: list[str]


class FiniteWatch:
    """Records where a step first was non-finite on this rank.  For the compute thread; between steps for the loop."""

    def __init__(self) -> None:
        self.sighting: Sighting | None = None
        self._calls = 0

    def begin(self) -> None:
        """Forget the findings of the last step."""
        self.sighting, self._calls = None, 0

    def take(self, values: object, place: str) -> None:
        """Check ``values`` that come from another rank."""
        self._check(values, place, is_own=False)

    def make(self, values: object, place: str) -> None:
        """Check ``values`` that were computed here."""
        self._check(values, place, is_own=True)

    def share(self, values: Array) -> None:
        """Check ``values`` that go into a collective of the ranks that share this stage, and count it."""
        self._check(values, "what it gave to its tensor-parallel ranks", is_own=True)
        self._calls += 1

    def _check(self, values: object, place: str, *, is_own: bool) -> None:
        if self.sighting is None and not _is_finite(values):
            self.sighting = Sighting(is_own=is_own, place=place, calls=self._calls)


class WatchedStage(Stage[Any]):
    """``stage``, number ``number`` of the pipeline; ``watch`` checks its inputs and outputs."""

    def __init__(self, stage: Stage[Any], number: int, watch: FiniteWatch) -> None:
        self._stage = stage
        self._is_first = number == 0
        self._place = f"pass of stage {number}"
        self._watch = watch

    def forward(self, x: Any) -> tuple[Array, Any]:
        if self._is_first:
            self._watch.make(x, "the inputs")
        else:
            self._watch.take(x, f"the input of the forward {self._place}")
        y, saved = self._stage.forward(x)
        self._watch.make(y, f"the forward {self._place}")
        return y, saved

    def forward_again(self, x: Any) -> tuple[Array, Any]:
        return self._stage.forward_again(x)

    def backward(
        self, saved: Any, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array | None:
        self._watch.take(dy, f"the input of the backward {self._place}")
        dx = self._stage.backward(saved, dy, on_gradient, deferred)
        self._watch.make(dx, f"the backward {self._place}")
        return dx

    def parameters(self) -> tuple[Parameter, ...]:
        return self._stage.parameters()

    def generators(self) -> tuple[np.random.Generator, ...]:
        return self._stage.generators()


def watched_loss(loss: Loss, watch: FiniteWatch) -> Loss:
    """Return ``loss``; ``watch`` checks its value and gradient."""

    def compute(output: Array, targets: Any) -> tuple[float, Array]:
        value, gradient = loss(output, targets)
        watch.make(value, "the loss")
        watch.make(gradient, "the gradient of the loss")
        return value, gradient

    return compute


def find_origins(reports: Sequence[FiniteReport]) -> str:
    """Return the ranks and arrays in which a step ceased to be finite.  Pure: all ranks return the same."""
    by_rank = {report.rank: report for report in reports}
    origins = [
        f"rank {report.rank} has NaN or infinity in {_place_of(report)}"
        for report in reports
        if _is_origin(report, by_rank)
    ]
    if origins:
        return "; ".join(origins)
    if any(report.sighting is not None for report in reports):
        seen = ", ".join(str(report.rank) for report in reports if report.sighting is not None)
        return f"NaN or infinity was first seen on ranks {seen}"
    overflowed = list(dict.fromkeys(name for report in reports for name in report.overflowed))
    return (
        f"the sum over ranks overflowed in {', '.join(overflowed)}" if overflowed else "the sum of squares overflowed"
    )


def _is_origin(report: FiniteReport, by_rank: dict[int, FiniteReport]) -> bool:
    """Return whether the rank computed non-finite values before all ranks that share its stage."""
    sighting = report.sighting
    if sighting is None:
        return bool(report.spoiled)
    others = (by_rank[rank].sighting for rank in report.slices)
    return sighting.is_own and sighting.calls == min(one.calls for one in others if one is not None)


def _place_of(report: FiniteReport) -> str:
    return ", ".join(report.spoiled) if report.sighting is None else report.sighting.place


def _is_finite(values: object) -> bool:
    if isinstance(values, float):
        return math.isfinite(values)
    if not isinstance(values, np.ndarray) or values.dtype.kind in "biuSUO":
        return True
    return all_finite(values.reshape(-1))
