"""The results of a run: frozen records, and their JSON document.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from asyncpar.bench.settings import ROOTED
from asyncpar.collectives.cost import bus_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One operation of one size.

    ``size`` is bytes of the whole buffer, ``count`` its elements; ``time_us`` is the median over the iterations on the
    slowest rank, ``minimum_us`` and ``p90_us`` are determined in the same way.  ``predicted_us`` is the prediction of
    the cost model for ``algorithm``, the one that ran.  ``wrong`` is the number of wrong elements on the rank with
    most.
    """

    operation: str
    size: int
    count: int
    type: str
    redop: str
    root: int
    time_us: float
    minimum_us: float
    p90_us: float
    iterations: int
    wrong: int
    algorithm: str
    predicted_us: float
    algbw: float
    busbw: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchEnvironment:
    """The environment of a run.  ``lane`` is the kind between ranks 0 and 1, ``transport`` the requested one."""

    ranks: int
    hosts: int
    cores: int
    lane: str
    transport: str | None
    version: str
    python: str
    numpy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """The results of a run."""

    surroundings: BenchEnvironment
    measurements: tuple[Measurement, ...]

    @property
    def wrong_sizes(self) -> int:
        """Number of sizes with wrong elements."""
        return sum(measurement.wrong > 0 for measurement in self.measurements)

    @property
    def mean_busbw(self) -> float:
        """The mean bus bandwidth over the sizes that have one, as in the last line of nccl-tests."""
        figures = [measurement.busbw for measurement in self.measurements if measurement.size]
        return sum(figures) / len(figures) if figures else 0.0

    def to_json(self) -> bytes:
        """Return one JSON object."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> BenchReport:
        return msgspec.json.decode(text, type=cls)


def bandwidths(operation: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return ``algbw`` and ``busbw`` in GB/s."""
    algbw = size / seconds / 1e9 if seconds > 0 else 0.0
    return algbw, algbw * bus_factor(operation, ranks)


def root_column(operation: str, root: int) -> int:
    """Return the value in nccl-tests' column: the root, -1 if there is none."""
    return root if operation in ROOTED else -1
