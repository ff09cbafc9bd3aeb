"""Statistics of gradient synchronization: times from events, traffic from the counters of communicators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.tables import bytes_text, html_table, seconds_text, text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTraffic:
    """Payload bytes and messages that this rank sent, and rounds of messages that it took part in.

    ``bandwidth`` is the highest measured rate of sending, in bytes/s; 0 if it has sent nothing.
    """

    payload_bytes: int = 0
    messages: int = 0
    steps: int = 0
    bandwidth: float = 0.0

    @classmethod
    def read(cls, communicators: Iterable[Communicator]) -> SyncTraffic:
        """Return the sums over all operations of ``communicators`` so far."""
        read = [(communicator, communicator.traffic) for communicator in communicators]
        entries = [entry for _, traffic in read for entry in traffic.operations]
        return cls(
            bandwidth=max((one.bandwidth for one, traffic in read if traffic.payload_bytes), default=0.0),
            payload_bytes=sum(entry.payload_bytes for entry in entries),
            messages=sum(entry.messages for entry in entries),
            steps=sum(entry.steps for entry in entries),
        )

    def __sub__(self, earlier: SyncTraffic) -> SyncTraffic:
        """Return the traffic since ``earlier``, with the bandwidth known by now."""
        return SyncTraffic(
            bandwidth=self.bandwidth,
            payload_bytes=self.payload_bytes - earlier.payload_bytes,
            messages=self.messages - earlier.messages,
            steps=self.steps - earlier.steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMemory:
    """Bytes that a synchronizer holds on this rank now, besides the gradients.

    ``buffers`` are buckets and their encoding buffers, ``residuals`` the memory of error feedback, ``accumulation`` the
    sums of micro-steps.
    """

    buffers: int = 0
    residuals: int = 0
    accumulation: int = 0

    @property
    def total(self) -> int:
        return self.buffers + self.residuals + self.accumulation


@dataclass(slots=True, kw_only=True)
class SyncStatistics:
    """Totals over all completed synchronizations; times are in seconds unless the name has another unit.

    ``total_sync_time`` counts time in which at least one bucket was in progress, ``total_bucket_sync_time`` sums over
    buckets.  ``total_exposed_time`` is the part that the caller had to wait for after its last gradient.
    ``bytes_on_wire`` is the payload that this rank's communicators sent during steps, in ``messages_sent`` messages and
    ``communication_rounds`` rounds; ``bytes_uncompressed`` what the algorithms of least traffic would have sent of
    uncompressed gradients: 2 (ranks - 1) / ranks of their size, or in shared memory their size.
    ``total_skipped_steps`` counts steps that were skipped because of non-finite gradients; no other figure includes
    them.  ``communication_efficiency`` is ``bytes_on_wire`` over what could have been sent in ``total_sync_time`` at
    ``measured_bandwidth``, 0 to 1; 1.0 before the first step.  ``measured_bandwidth``, in bytes/s, is the highest rate
    at which this rank was seen to send, in one operation or in a whole step, or the figure of ``calibrate``.
    ``residual_norm`` is the current norm of error feedback, ``memory_bytes`` the memory that the synchronizer holds
    now.
    """

    total_sync_operations: int = 0
    total_sync_time: float = 0.0
    total_buckets_synced: int = 0
    total_bucket_sync_time: float = 0.0
    total_exposed_time: float = 0.0
    average_sync_time_ms: float = 0.0
    communication_efficiency: float = 1.0
    measured_bandwidth: float = 0.0
    bytes_on_wire: int = 0
    bytes_uncompressed: int = 0
    messages_sent: int = 0
    communication_rounds: int = 0
    total_skipped_steps: int = 0
    residual_norm: float = 0.0
    memory_bytes: int = 0

    @property
    def compression_ratio_achieved(self) -> float:
        """How many times fewer bytes compression sent; 1 without it."""
        return self.bytes_uncompressed / self.bytes_on_wire if self.bytes_on_wire else 1.0

    @property
    def overlap_fraction(self) -> float:
        """The part of communication time that was hidden behind the caller's own work, 0 to 1."""
        if self.total_sync_time <= 0.0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self.total_exposed_time / self.total_sync_time))

    def __str__(self) -> str:
        """Return a table of the figures, with units, rounded."""
        return text_table(self._rows(), left=1)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("gradients", "so far"),
            ("steps", f"{self.total_sync_operations:,}"),
            ("skipped steps", f"{self.total_skipped_steps:,}"),
            ("buckets", f"{self.total_buckets_synced:,}"),
            ("time of a step", seconds_text(self.average_sync_time_ms / 1e3)),
            ("hidden behind computation", f"{self.overlap_fraction:.0%}"),
            ("sent", bytes_text(self.bytes_on_wire)),
            ("compression", f"{self.compression_ratio_achieved:.3g} x"),
            ("messages", f"{self.messages_sent:,}"),
            ("bandwidth", f"{bytes_text(self.measured_bandwidth)}/s"),
            ("efficiency", f"{self.communication_efficiency:.0%}"),
            ("residual norm", f"{self.residual_norm:.3g}"),
            ("memory", bytes_text(self.memory_bytes)),
        ]

    def update_average_sync_time(self) -> None:
        """Bring ``average_sync_time_ms`` up to date with the totals."""
        if self.total_sync_operations:
            self.average_sync_time_ms = 1e3 * self.total_sync_time / self.total_sync_operations


@dataclass(slots=True)
class StepRecord:
    """Intervals of one step in which buckets were in progress, and its traffic."""

    intervals: list[tuple[float, float]] = field(default_factory=list)
    traffic: SyncTraffic = field(default_factory=SyncTraffic)
    bytes_uncompressed: int = 0
    last_gradient_at: float = 0.0
    """When the caller had nothing left to do but wait."""

    def count(self, traffic: SyncTraffic, *, least_bytes: int | None) -> None:
        """Add the traffic, and that of an all-reduce of least traffic; None: it was one."""
        self.traffic = traffic
        self.bytes_uncompressed = traffic.payload_bytes if least_bytes is None else least_bytes

    def add_to(self, statistics: SyncStatistics) -> None:
        """Add this step to the totals."""
        merged = merge_intervals(self.intervals)
        statistics.total_sync_operations += 1
        seconds = sum(stop - start for start, stop in merged)
        statistics.total_sync_time += seconds
        statistics.total_exposed_time += sum(
            max(0.0, stop - max(start, self.last_gradient_at)) for start, stop in merged
        )
        statistics.total_buckets_synced += len(self.intervals)
        statistics.total_bucket_sync_time += sum(stop - start for start, stop in self.intervals)
        statistics.bytes_on_wire += self.traffic.payload_bytes
        statistics.messages_sent += self.traffic.messages
        statistics.communication_rounds += self.traffic.steps
        statistics.bytes_uncompressed += self.bytes_uncompressed
        statistics.update_average_sync_time()
        if seconds > 0.0:  # buckets may overlap, so a step may send faster than any of its operations
            achieved = self.traffic.payload_bytes / seconds
            statistics.measured_bandwidth = max(statistics.measured_bandwidth, self.traffic.bandwidth, achieved)
        possible = statistics.total_sync_time * statistics.measured_bandwidth
        if possible > 0.0:
            statistics.communication_efficiency = statistics.bytes_on_wire / possible


def merge_intervals(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of ``intervals`` as disjoint intervals in order."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOutcome:
    """The outcome of one bucket, the same on all replicas.

    ``culprits`` are the ranks whose gradients were NaN or infinite, with the names of the parameters.  ``lost`` is the
    bucket if its mean cannot be computed, else empty.
    """

    culprits: Mapping[int, Sequence[str]] = field(default_factory=dict)
    contributors: int
    lost: str = ""


class NonFiniteFindings(msgspec.Struct, frozen=True):
    """The culprits of a step that the replicas of one group know, and the buckets whose mean cannot be computed."""

    culprits: dict[int, list[str]]
    lost: list[str]


@dataclass(slots=True)
class StepOutcome:
    """The outcome of a step; complete when its block has been left.

    ``is_skipped``: gradients are unchanged, because some were not finite (``NonFinitePolicy.SKIP_STEP``).
    ``culprits``: the parameters that were NaN or infinite, by rank of the world.  ``lost`` are the buckets whose means
    cannot be computed; ``text`` is the reason, and empty if there are none.
    """

    is_skipped: bool = False
    culprits: dict[int, list[str]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    text: str = ""

    def add(self, findings: Iterable[NonFiniteFindings]) -> None:
        """Add the findings of groups of replicas, some of which occur more than once.

        Without culprits, finite values had an infinite sum.
        """
        for finding in findings:
            for rank, names in finding.culprits.items():
                known = self.culprits.setdefault(rank, [])
                known += [name for name in names if name not in known]
            self.lost += [name for name in finding.lost if name not in self.lost]
        who = [
            f"rank {rank} has NaN or infinity in {', '.join(names)}" for rank, names in sorted(self.culprits.items())
        ]
        if self.lost:
            self.text = "; ".join(who) or f"the sum over ranks overflowed in {', '.join(self.lost)}"


def collect(outcomes: Iterable[BucketOutcome]) -> NonFiniteFindings:
    """Return the findings of all buckets together."""
    culprits: dict[int, list[str]] = {}
    lost: list[str] = []
    for outcome in outcomes:
        for rank, names in outcome.culprits.items():
            culprits.setdefault(rank, []).extend(names)
        lost += [outcome.lost] if outcome.lost else []
    return NonFiniteFindings(culprits, lost)
