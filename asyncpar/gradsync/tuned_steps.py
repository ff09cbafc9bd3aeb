"""Tunes the steps of one synchronizer: creates the tuner, and feeds it the figures of all ranks.

Ranks exchange their measurements in the collective that ends a step, so nothing more is sent.  The wait for a step
lasts, by the clock of a host, from when the last of its ranks has nothing left to do until the last of them has the
result; the least over hosts counts, that of the host that came last and waited for no other.  The least seconds of
whole steps, the least latency and the highest bandwidth count.  Changes take effect between two steps, on all ranks
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import AnyCodec
from asyncpar.collectives.communicator import Communicator, lane_figures_of, recorder_of
from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.errors import UsageError
from asyncpar.gradsync.plan import GradientSpec
from asyncpar.gradsync.tuning import Choice, Tuner, TuningConfig, TuningOutcome
from asyncpar.gradsync.tuning_space import StepModel, check_pin, make_tuner

FIGURES: Final = 5
"""Number of figures: seconds waited, seconds of the step, negative latency and bandwidth of lanes, and end time."""

BucketBytes = Callable[[Sequence[GradientSpec], float], tuple[int, ...]]
"""Returns the bytes of the buckets of gradients, for a bucket size in MiB."""


class StepTuning:
    """The tuning of the steps of the replicas ``communicator``.  Raises ``UsageError`` for a pin that cannot run."""

    def __init__(self, config: TuningConfig, communicator: Communicator) -> None:
        check_pin(config, communicator)
        self._config = config
        self._communicator = communicator
        self._tuner: Tuner | None = None
        self._model: StepModel | None = None
        self._clock = recorder_of(communicator).clock
        self._waits_since = 0.0
        self._last_end: float | None = None

    def begin(
        self,
        specs: Sequence[GradientSpec],
        *,
        bucket_size_mb: float,
        strategy: CommunicationStrategy,
        codec: AnyCodec,
        bucket_bytes: BucketBytes,
    ) -> Choice:
        """Return the choice for the next step, with gradients like ``specs``.

        Raises ``UsageError`` if these are on a device, or the pinned algorithm cannot run.
        """
        if self._tuner is None:
            if any(spec.is_on_device for spec in specs):
                raise UsageError("tuning: expected gradients on the host, got some on a device; leave tuning out")
            kept = tuple(specs)
            self._tuner, self._model = make_tuner(
                self._config,
                self._communicator,
                bucket_size_mb=bucket_size_mb,
                strategy=strategy,
                codec=codec,
                sizes=lru_cache(maxsize=32)(lambda size: bucket_bytes(kept, size)),
            )
        return self._tuner.choice

    @property
    def line(self) -> str:
        """The settings that ranks must have in common before a step."""
        return "" if self._tuner is None else f", tuned {self._tuner.choice} after {self._tuner.steps} steps"

    def all_final(self) -> None:
        """Report that the caller of the step has nothing left to do but wait."""
        self._waits_since = self._clock()

    def measure(self) -> NDArray[np.float64]:
        """Return the figures of this rank at the end of a step."""
        now = self._clock()
        waited = now - self._waits_since
        whole = waited if self._last_end is None else now - self._last_end
        self._last_end = now
        return np.array([waited, max(whole, waited), *lane_figures_of(self._communicator), now])

    def observe(self, figures: NDArray[Any], *, steps: int = 1) -> None:
        """Record the figures of all ranks, in rows, of one of ``steps`` equal steps that have succeeded."""
        if self._tuner is None or self._model is None:
            return
        latency, bandwidth = (float(figures[:, column].max()) for column in (2, 3))
        self._model.learn(
            latency=-latency if np.isfinite(latency) else None, bandwidth=bandwidth if np.isfinite(bandwidth) else None
        )
        waited = seconds_waited(figures[:, 0], figures[:, 4], self._communicator.hosts)
        self._tuner.observe(waited, float(figures[:, 1].min()), steps=steps)

    def restart(self) -> None:
        """Forget everything, since ranks may differ."""
        self._tuner = self._model = self._last_end = None

    @property
    def outcome(self) -> TuningOutcome | None:
        """The findings so far; None before the first step."""
        return None if self._tuner is None else self._tuner.outcome

    def table(self) -> str:
        """Return the table of trials; empty before the first step."""
        return "" if self._tuner is None else self._tuner.table()


def seconds_waited(waits: NDArray[Any], ends: NDArray[Any], hosts: Sequence[Sequence[int]]) -> float:
    """Return how long a step was waited for, from the waits of all ranks in seconds and the times of their ends.

    The clock is that of the machine, one for all ranks of a host; where some have another one, the result is still
    between the least and the largest wait there.
    """

    def of_host(ranks: list[int]) -> float:
        waited, ended = waits[ranks], ends[ranks]
        return float(np.clip(ended.max() - (ended - waited).max(), waited.min(), waited.max()))

    return min(of_host(list(ranks)) for ranks in hosts)
