"""Figures of a gradient hook."""

from __future__ import annotations

from dataclasses import field, replace

from asyncpar.core.records import dataclass
from asyncpar.gradsync.bucket_run import RunTimes
from asyncpar.gradsync.statistics import SyncTraffic, merge_intervals

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HookStatistics:
    """Totals over the steps that this rank has completed since the last reset; times in seconds.

    ``bytes_sent`` is the payload that this rank's communicators sent for the hook, with what the codec ``"auto"`` took
    to measure; ``bytes_uncompressed`` what all-reduces of least traffic would have sent of the gradients as they are:
    2 (ranks - 1) / ranks of their size, or in shared memory their size.  ``encode``, ``exchange`` and ``decode`` add up
    over buckets, which are under way side by side, and do not count the wait for a thread; ``under_way`` is time in
    which at least one was, and ``exposed`` what backward waited for at its end.  ``buckets_not_finite`` came to NaN or
    infinity.  ``residual_norm`` is that of the error feedback now.
    """

    codec: str
    ranks: int
    steps: int = 0
    buckets: int = 0
    buckets_compressed: int = 0
    buckets_not_finite: int = 0
    bytes_sent: int = 0
    bytes_uncompressed: int = 0
    encode: float = 0.0
    exchange: float = 0.0
    decode: float = 0.0
    under_way: float = 0.0
    exposed: float = 0.0
    residual_norm: float = 0.0

    @property
    def compression_ratio(self) -> float:
        """Bytes of all-reduces with least traffic and no codec, divided by the bytes sent; 1 if none were sent."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0

    def __str__(self) -> str:
        odd = f", {self.buckets_not_finite} not finite" if self.buckets_not_finite else ""
        return "\n".join(
            [
                f"gradient hook, codec {self.codec}, {self.ranks} ranks: {self.steps} steps, {self.buckets} buckets "
                f"({self.buckets_compressed} compressed{odd})",
                f"sent {_size(self.bytes_sent)} instead of {_size(self.bytes_uncompressed)}: "
                f"{self.compression_ratio:.2f} times less",
                f"encode {self.encode:.3f} s, exchange {self.exchange:.3f} s, decode {self.decode:.3f} s; "
                f"{self.under_way:.3f} s under way, of which backward waited {self.exposed:.3f} s",
                f"error feedback holds a norm of {self.residual_norm:.4g}",
            ]
        )


@dataclass(slots=True, kw_only=True)
class HookTally:
    """Adds up: buckets as they come through, and steps at their end."""

    codec: str
    ranks: int
    total: HookStatistics = field(init=False)
    _sent: int = 0
    """By communicators, in all."""
    _base: int = 0
    """Of which, before the last reset."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all totals to zero."""
        self.total = HookStatistics(codec=self.codec, ranks=self.ranks)
        self._base = self._sent

    def statistics(self, *, residual_norm: float) -> HookStatistics:
        """Return the figures so far."""
        return replace(self.total, residual_norm=residual_norm)

    def add_step(self, step: StepTally, traffic: SyncTraffic) -> None:
        """Add a step that is complete; ``traffic`` is all that was sent so far."""
        before, merged = self.total, merge_intervals(step.intervals)
        self._sent = traffic.payload_bytes
        self.total = replace(
            before,
            steps=before.steps + 1,
            buckets=before.buckets + len(step.intervals),
            buckets_compressed=before.buckets_compressed + step.compressed,
            buckets_not_finite=before.buckets_not_finite + step.not_finite,
            bytes_sent=self._sent - self._base,
            bytes_uncompressed=before.bytes_uncompressed + step.bytes_uncompressed,
            encode=before.encode + step.encode,
            exchange=before.exchange + step.exchange,
            decode=before.decode + step.decode,
            under_way=before.under_way + sum(stop - start for start, stop in merged),
        )

    def add_wait(self, seconds: float) -> None:
        """Add the time that backward has waited at its end."""
        self.total = replace(self.total, exposed=self.total.exposed + seconds)


@dataclass(slots=True, kw_only=True)
class StepTally:
    """Figures of one step."""

    intervals: list[tuple[float, float]] = field(default_factory=list)
    compressed: int = 0
    not_finite: int = 0
    bytes_uncompressed: int = 0
    encode: float = 0.0
    exchange: float = 0.0
    decode: float = 0.0

    def add(self, interval: tuple[float, float], times: RunTimes) -> None:
        """Add a bucket that is through."""
        self.intervals.append(interval)
        self.encode += times.sending
        self.exchange += times.exchanging
        self.decode += times.receiving


def _size(count: int) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"
