"""Statistics of multi-node training: steps, memory, and traffic between leaders.  Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from asyncpar.backends.backend import CommunicationBackend
from asyncpar.gradsync import HostGroups, least_bytes
from asyncpar.gradsync.statistics import StepRecord, SyncStatistics, SyncTraffic
from asyncpar.zero.config import ZeROStage
from asyncpar.zero.memory import MemoryUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionInfo:
    """Bytes that this rank would have sent to other nodes uncompressed, and those that it has sent."""

    original_size: int = 0
    compressed_size: int = 0

    @property
    def compression_ratio(self) -> float:
        """Uncompressed bytes over bytes sent; 1 without compression, and on ranks that send nothing."""
        return self.original_size / self.compressed_size if self.compressed_size else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiNodeStats:
    """A snapshot of one rank.

    ``zero_stage``, ``communication_backend`` and ``gradient_compression_enabled`` are settings; ``memory_savings`` is
    the part of what parameters, gradients and states would take without sharding that this rank does not hold.
    ``steps`` counts optimizer steps, ``micro_steps`` the gradients in them.  ``synchronization`` has times and traffic,
    ``compression`` what went between nodes.
    """

    num_nodes: int
    devices_per_node: int
    node_rank: int
    local_rank: int
    global_rank: int
    zero_stage: ZeROStage = ZeROStage.STAGE1
    communication_backend: str = str(CommunicationBackend.NATIVE)
    gradient_compression_enabled: bool = False
    memory_savings: float = 0.0
    parameter_count: int = 0
    steps: int = 0
    micro_steps: int = 0
    memory: MemoryUsage = field(default_factory=MemoryUsage)
    compression: CompressionInfo = CompressionInfo()
    synchronization: SyncStatistics = field(default_factory=SyncStatistics)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        """Return a few lines for people, at most 80 columns."""
        sync, memory, compression = self.synchronization, self.memory, self.compression
        sent = _size(compression.compressed_size)
        rows = {
            "node": f"{self.node_rank} of {self.num_nodes}, local rank {self.local_rank} of {self.devices_per_node}",
            "backend": self.communication_backend,
            "sharding": f"ZeRO {self.zero_stage}, {self.memory_savings:.0%} of memory saved",
            "compression": "8-bit gradients" if self.gradient_compression_enabled else "off",
            "parameters": f"{self.parameter_count:,}",
            "steps": f"{self.steps:,} of {self.micro_steps:,} micro-steps",
            "synchronization": f"{sync.average_sync_time_ms:.2f} ms on average, {sync.overlap_fraction:.0%} hidden",
            "between nodes": f"{sent} sent, {compression.compression_ratio:.2f} times fewer than uncompressed",
            "memory": _size(memory.total),
            "  parameters": _size(memory.parameters),
            "  gradients": _size(memory.gradients + memory.accumulation),
            "  optimizer": _size(memory.optimizer_states),
            "  buffers": _size(memory.buffers),
            "  residuals": _size(memory.residuals),
        }
        head = f"Multi-node training, rank {self.global_rank} of {self.world_size}"
        return "\n".join([head, *(f"  {name:16}{text}" for name, text in rows.items())])

    def print_stats(self, stream: TextIO | None = None) -> None:
        """Write the figures to ``stream``, by default standard output."""
        out = sys.stdout if stream is None else stream
        out.write(f"{self}\n")
        out.flush()


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


class LeaderTraffic:
    """Reads the counters of the leaders' group; nothing is counted where there is one node, or on other ranks."""

    def __init__(self, groups: HostGroups, *, is_compressed: bool) -> None:
        self._leaders = groups.between if groups.hosts > 1 else None
        self._is_compressed = is_compressed
        self._before = SyncTraffic()
        self.info = CompressionInfo()

    def begin(self) -> None:
        """Count from here on."""
        self._before = self._read()

    def end(self, nbytes: int) -> None:
        """Gradients of ``nbytes`` have been all-reduced since ``begin``, uncompressed or not."""
        sent = (self._read() - self._before).payload_bytes
        plain = sent
        if self._is_compressed and self._leaders is not None:
            plain = least_bytes(nbytes, self._leaders)
        known = self.info
        self.info = CompressionInfo(
            original_size=known.original_size + plain, compressed_size=known.compressed_size + sent
        )

    def _read(self) -> SyncTraffic:
        return SyncTraffic.read([] if self._leaders is None else [self._leaders])


class ShardedTimes:
    """Times and traffic of the reductions of a sharded flow: ``clock`` returns seconds."""

    def __init__(self, groups: HostGroups, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.record = StepRecord()
        self.statistics = SyncStatistics()
        self._communicators = [groups.world, *groups.all]
        self._before = SyncTraffic()

    def begin(self) -> None:
        """Count a reduction from here on."""
        self.record, self._before = StepRecord(), SyncTraffic.read(self._communicators)

    def last_gradient(self) -> None:
        """Note the time at which the last gradient is final: from now on the caller only waits."""
        self.record.last_gradient_at = self.clock()

    def end(self) -> None:
        """Add the reduction to the totals."""
        self.record.count(SyncTraffic.read(self._communicators) - self._before, least_bytes=None)
        self.record.add_to(self.statistics)
