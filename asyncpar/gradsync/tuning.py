"""Find bucket size, algorithm and message size of gradient steps during training.  Pure.

Theory of operation.  A *choice* is a bucket size, an algorithm and a size of messages.  Every step yields figures that
are equal on all ranks: the seconds that it kept the caller waiting after the last gradient, and the seconds of the
whole step.  Steps use the best known choice, and now and then a neighbour of it, which differs in one of the three: a
*trial*.  The cost model, with the current measurements of lanes, predicts which neighbours are worth a trial, by their
ratio to the best choice, whose time is known.  A trial takes place only if its expected loss plus the loss of earlier
trials is within the budget, a part of the time of all steps.  So a choice that is far slower is not tried, and one that
turns out so ends trials for a while.  A neighbour that is faster by more than noise, three times, becomes the best; one
trial that is not ends it, and the choice is tried again a few steps later, up to three times in all, since it may have
been unlucky.  Disturbances only add delay, so of the times with a choice the last of the fastest quarter counts.

The first step with a choice makes buffers and plans and opens links, so its time is not counted, but its loss is.  Thus
a trial takes two steps; algorithms are tried before sizes, since they differ most from the model.  All ranks give the
same figures to machines in the same state, and so arrive at the same choices.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from asyncpar.collectives.lane_estimate import quickest_quartile
from asyncpar.collectives.plan import parse_segment, split_segment
from asyncpar.core.config.names import Name
from asyncpar.core.tables import text_table
from asyncpar.errors import UsageError

AUTO: Final = "auto"
"""Name that stands for the algorithm of the strategy, or of the cost model for each bucket."""

_WARM_UP: Final = 3
"""First steps that do not count: links are opened, and buckets follow the order of gradients from the second."""

_BETTER: Final = 0.97
_SAMPLES: Final = 5
_ENOUGH: Final = 3
_MARGIN: Final = 0.03
"""Least expected loss of a trial, as a part of the best time: it may turn out slower than predicted."""

_HOPELESS: Final = 3.0
_HIDDEN: Final = 0.01
"""If less than this part of a step is waited for, there is nothing to gain."""

_SOON: Final = 4
"""Steps after which a choice of fewer than ``_ENOUGH`` steps may be tried again: it may have been unlucky."""

_AGAIN: Final = 200
"""Steps after which any choice may be tried again: links change."""

_USUAL_STEPS: Final = 9
_PIN: Final = re.compile(r"(?:(\d+(?:\.\d+)?)m)?(?:@([a-z][a-z0-9-]*(?:/\S+)?))?", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """Buckets of at most ``bucket_size_mb`` MiB, reduced by ``algorithm`` in messages of ``segment``.

    ``algorithm`` may be ``AUTO``; ``segment`` is empty for the built-in size, or one such as ``256k``.
    """

    bucket_size_mb: float
    algorithm: str = AUTO
    segment: str = ""

    @property
    def name(self) -> Name:
        """The algorithm as ``all_reduce`` takes it, or ``AUTO``."""
        return Name(f"{self.algorithm}/{self.segment}" if self.segment else self.algorithm)

    def __str__(self) -> str:
        """Return the choice in the format of a pin of ``TuningConfig``."""
        return f"{self.bucket_size_mb:g}m" + ("" if self.algorithm == AUTO else f"@{self.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningConfig:
    """Settings of the search for bucket size, algorithm and message size during training.

    ``budget`` is the part of the time of all steps that trials may cost, above 0 and up to 0.5.  ``bucket_sizes_mb``
    (MiB) are tried besides the configured size, and ``segments``, from ``4k`` to ``2m``, besides the built-in size of
    messages, 1 MiB.  ``pin`` fixes one or both: ``25m`` the bucket size in MiB, ``@ring`` or ``@ring/256k`` the
    algorithm with its messages, ``4m@ring/256k`` both; then nothing is tuned.
    """

    budget: float = 0.01
    bucket_sizes_mb: tuple[float, ...] = (1.0, 4.0, 25.0, 100.0)
    segments: tuple[str, ...] = ("256k", "2m")
    pin: str = ""

    def __post_init__(self) -> None:
        if not 0.0 < self.budget <= 0.5:
            raise UsageError(f"budget: expected a part of the time of steps, 0 < budget <= 0.5, got {self.budget}")
        if not all(size > 0.0 and math.isfinite(size) for size in self.bucket_sizes_mb):
            raise UsageError(f"bucket_sizes_mb: expected positive numbers of MiB, got {self.bucket_sizes_mb}")
        for segment in self.segments:
            try:
                parse_segment(segment)
            except UsageError as error:
                raise UsageError(f"segments: expected sizes such as 256k, 4k to 2m, got {segment!r}") from error
        match = _PIN.fullmatch(self.pin)
        if match is None or (match[1] and not float(match[1]) > 0.0):
            raise UsageError(f"pin: expected 25m, @ring, or 25m@ring/256k, got {self.pin!r}")
        if match[2]:
            try:
                split_segment(match[2])
            except UsageError as error:
                raise UsageError(f"pin: {self.pin!r}: {error}") from error

    @property
    def pinned_size(self) -> float | None:
        """The pinned bucket size in MiB, None if it is tuned."""
        match = _PIN.fullmatch(self.pin)
        return float(match[1]) if match is not None and match[1] else None

    @property
    def pinned_algorithm(self) -> str | None:
        """The pinned algorithm, with its size of messages if it has one; None if it is tuned."""
        match = _PIN.fullmatch(self.pin)
        return match[2] or None if match is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOutcome:
    """What tuning has found so far, the same on all ranks.

    ``best`` is the best choice, as ``TuningConfig`` takes it for a ``pin``.  In ``steps`` steps of ``seconds`` seconds,
    trials of others have cost ``lost`` seconds.
    """

    best: str
    steps: int
    seconds: float
    lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All values of choices; the search starts from the first of each.

    ``with_messages`` are the algorithms that have a message size.
    """

    bucket_sizes_mb: tuple[float, ...]
    algorithms: tuple[str, ...]
    segments: tuple[str, ...] = ("",)
    with_messages: frozenset[str] = frozenset()

    @property
    def first(self) -> Choice:
        """The choice from which the search starts."""
        return self._made(self.bucket_sizes_mb[0], self.algorithms[0], self.segments[0])

    def _made(self, size: float, algorithm: str, segment: str) -> Choice:
        return Choice(size, algorithm, segment if algorithm in self.with_messages else "")

    def neighbours(self, of: Choice) -> Iterator[Choice]:
        """Yield the choices that differ from ``of`` in one value."""
        for algorithm in self.algorithms:
            if algorithm != of.algorithm:
                yield self._made(of.bucket_size_mb, algorithm, of.segment)
        for segment in self.segments:
            if segment != of.segment and of.algorithm in self.with_messages:
                yield replace(of, segment=segment)
        for size in self.bucket_sizes_mb:
            if size != of.bucket_size_mb:
                yield replace(of, bucket_size_mb=size)


@dataclass(slots=True)
class _Record:
    """Seconds of the latest steps with one choice that counted, and the number of the last step with it."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    last: int = 0

    @property
    def seconds(self) -> float:
        """The last of the fastest quarter, since disturbances only add delay."""
        quickest = quickest_quartile(sorted(self.times))
        assert quickest is not None, "it has a time from the beginning"
        return quickest


Predict = Callable[[Choice], float]
"""Predicts the seconds of a step with a choice by the cost model; only ratios count."""


class Tuner:
    """Selects the ``choice`` of the next step; feed ``observe`` after each.

    ``switch_seconds`` is the expected initial cost of new buffers.
    """

    def __init__(self, space: Space, predict: Predict, *, budget: float, switch_seconds: float = 0.0) -> None:
        self._space = space
        self._predict = predict
        self._budget = budget
        self._switch_seconds = switch_seconds
        self._records: dict[Choice, _Record] = {}
        self._usual: deque[float] = deque(maxlen=_USUAL_STEPS)
        """Seconds of the latest whole steps with the best choice."""
        self._is_settling = self._is_resized = False
        """Whether the next step is the first with its choice, and whether its buckets differ from the last ones."""
        self.best = self.choice = space.first
        self.steps = 0
        self.elapsed = 0.0
        """Seconds of all steps so far."""
        self.lost = 0.0
        """Seconds that trials have added to steps."""

    def observe(self, waited: float, whole: float, *, steps: int = 1) -> None:
        """Record a step with ``choice``, with the same figures on all ranks.

        ``waited`` are the seconds waited for after the last gradient, ``whole`` those of the whole step.  It stands for
        ``steps`` steps with that choice.
        """
        self.steps += steps
        self.elapsed += steps * whole
        if self.steps <= _WARM_UP:
            return
        is_trial = self.choice != self.best
        if is_trial or self._is_settling:
            excess = max(0.0, whole - median(self._usual)) if self._usual else 0.0
            self.lost += steps * excess
            if self._is_settling:
                self._switch_seconds = steps * excess if self._is_resized else self._switch_seconds
                self._is_settling = self._is_resized = False
                return
        else:
            self._usual.append(whole)
        record = self._records.setdefault(self.choice, _Record())
        record.times.append(waited)
        record.last = self.steps
        if is_trial:
            self._judge()
        else:
            self._turn(self._quicker_before() or self._next())

    def _judge(self) -> None:
        """Make the tried choice the best one, try it once more to be sure, or go back."""
        record = self._records[self.choice]
        if record.seconds >= _BETTER * self._records[self.best].seconds:
            self._turn(self.best)
        elif len(record.times) >= _ENOUGH:
            self.best = self.choice

    def _turn(self, choice: Choice) -> None:
        self._is_resized |= choice.bucket_size_mb != self.choice.bucket_size_mb
        self._is_settling |= self._is_resized or choice not in self._records
        self.choice = choice

    def _quicker_before(self) -> Choice | None:
        """Return, as the best one again, a choice that was faster than the best one has turned out to be."""
        best = self._records[self.best]
        if len(best.times) < _ENOUGH:
            return self.best
        known = [
            choice
            for choice, record in self._records.items()
            if len(record.times) >= _ENOUGH and record.seconds < _BETTER * best.seconds
        ]
        if not known:
            return None
        self.best = min(known, key=lambda choice: self._records[choice].seconds)
        return self.best

    def _next(self) -> Choice:
        """Return the neighbour to try in the next step, or the best choice where none is worth it."""
        best_seconds = self._records[self.best].seconds
        left = self._budget * self.elapsed - self.lost
        if best_seconds < _HIDDEN * median(self._usual) or left < _MARGIN * best_seconds:
            return self.best
        offers = [
            (choice.algorithm == self.best.algorithm, loss, expected, choice)
            for choice in self._space.neighbours(self.best)
            if self._may_be_tried(choice)
            and (expected := self._expected(choice, best_seconds)) < _HOPELESS * best_seconds
            and (loss := self._loss(choice, expected, best_seconds)) <= left
        ]
        return min(offers)[-1] if offers else self.best

    def _may_be_tried(self, choice: Choice) -> bool:
        record = self._records.get(choice)
        if record is None:
            return True
        return self.steps - record.last >= (_SOON if len(record.times) < _ENOUGH else _AGAIN)

    def _expected(self, choice: Choice, best_seconds: float) -> float:
        record = self._records.get(choice)
        if record is not None:
            return record.seconds
        return best_seconds * self._predict(choice) / self._predict(self.best)

    def _loss(self, choice: Choice, expected: float, best_seconds: float) -> float:
        loss = max(0.0, expected - best_seconds) + _MARGIN * best_seconds
        if choice.bucket_size_mb != self.best.bucket_size_mb:
            return 2 * (loss + self._switch_seconds)  # a step that does not count, one that does, and the way back
        if choice in self._records:
            return loss
        return 2 * loss + (self._switch_seconds / 2 if choice.segment != self.best.segment else 0.0)

    @property
    def outcome(self) -> TuningOutcome:
        """The findings so far."""
        return TuningOutcome(best=str(self.best), steps=self.steps, seconds=self.elapsed, lost=self.lost)

    def table(self) -> str:
        """Return the trials and their results in aligned columns; ``*`` marks the best so far."""
        rows = [("choice", "steps that counted", "waited for, ms")]
        for choice, record in sorted(self._records.items(), key=lambda one: one[1].seconds):
            mark = "*" if choice == self.best else ""
            rows.append((f"{choice}{mark}", str(len(record.times)), f"{record.seconds * 1e3:.2f}"))
        spent = f"{self.lost:.3g} s lost by trials in {self.steps} steps of {self.elapsed:.3g} s"
        return f"{text_table(rows, left=1)}\n{spent}, up to {self._budget:.2%} allowed"


def tuned_sizes(first: float, others: Sequence[float], plans: Callable[[float], object]) -> tuple[float, ...]:
    """Return the bucket sizes that make different plans, starting with ``first``."""
    seen: list[object] = []
    sizes: list[float] = []
    for size in (first, *others):
        plan = plans(size)
        if plan not in seen:
            seen.append(plan)
            sizes.append(size)
    return tuple(sizes)
