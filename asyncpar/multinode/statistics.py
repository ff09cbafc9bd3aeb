"""Statistics of multi-node training: steps, memory, and traffic between leaders.  Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self, TextIO

from asyncpar.backends.backend import CommunicationBackend
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.core.tables import bytes_text, html_table, seconds_text, text_table
from asyncpar.gradsync import HostGroups, least_bytes
from asyncpar.gradsync.statistics import StepRecord, SyncStatistics, SyncTraffic
from asyncpar.zero.memory import MemoryUsage, ZeROMemoryStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionInfo:
    """Bytes that this rank would have sent to other nodes uncompressed, and those that it has sent."""

    original_size: int = 0
    compressed_size: int = 0

    @property
    def compression_ratio(self) -> float:
        """Uncompressed bytes over bytes sent; 1 without compression, and on ranks that send nothing."""
        return self.original_size / self.compressed_size if self.compressed_size else 1.0


class MemorySavings(float):
    """The part of parameters, gradients and states that this rank does not hold because others do.

    ``savings["optimizer"]``, ``["gradient"]`` and ``["parameter"]`` are the parts of each alone, ``["communication"]``
    the additional memory of buffers and compression residuals as a part of the whole: 0, or negative.
    """

    components: Mapping[str, float]

    def __new__(cls, whole: float = 0.0, components: Mapping[str, float] | None = None) -> Self:
        """Return ``whole`` with its ``components``, zeros by default."""
        made = super().__new__(cls, whole)
        made.components = MappingProxyType(dict.fromkeys(_COMPONENTS, 0.0) | dict(components or {}))
        return made

    def __getitem__(self, component: str) -> float:
        """Return the part of one of ``components``."""
        return self.components[component]

    def __reduce__(self) -> tuple[type[MemorySavings], tuple[float, dict[str, float]]]:
        return type(self), (float(self), dict(self.components))


_COMPONENTS = ("optimizer", "gradient", "parameter", "communication")


def savings_of(
    usage: MemoryUsage, kept: ZeROMemoryStats | None, values: int, *, owned_gradients: float = 1.0
) -> MemorySavings:
    """Return the savings of ``usage``; ``kept`` are the figures of sharded memory, ``values`` the bytes of parameters.

    ``owned_gradients`` is the part of the gradients that is kept on this rank from their reduction to the step.
    """
    whole = 2 * values + usage.optimizer_states if kept is None else kept.whole
    communication = -usage["communication"] / whole if whole else 0.0
    if kept is None or not values:
        return MemorySavings(0.0, {"communication": communication})
    states = kept.whole - 2 * values
    return MemorySavings(
        kept.reduction,
        {
            "optimizer": 1.0 - kept.states / states if states else 0.0,
            "gradient": 1.0 - owned_gradients,
            "parameter": 1.0 - kept.parameters / values,
            "communication": communication,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiNodeStats:
    """A snapshot of one rank.

    ``zero_stage``, ``communication_backend`` and ``gradient_compression_enabled`` are settings; ``memory_savings`` is
    the part of the unsharded memory of parameters, gradients and states that this rank does not hold.  ``steps`` counts
    optimizer steps, ``micro_steps`` the gradients in them.  ``synchronization`` has times and traffic, ``compression``
    the traffic between nodes.
    """

    num_nodes: int
    devices_per_node: int
    node_rank: int
    local_rank: int
    global_rank: int
    zero_stage: ZeROStage = ZeROStage.STAGE1
    communication_backend: str = str(CommunicationBackend.NATIVE)
    gradient_compression_enabled: bool = False
    memory_savings: MemorySavings = field(default_factory=MemorySavings)
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
        """Return a table of the figures, with units, rounded."""
        return text_table(self._rows(), left=1)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        sync, memory, compression = self.synchronization, self.memory, self.compression
        return [
            ("multi-node training", f"rank {self.global_rank} of {self.world_size}"),
            ("node", f"{self.node_rank} of {self.num_nodes}"),
            ("local rank", f"{self.local_rank} of {self.devices_per_node}"),
            ("backend", self.communication_backend),
            ("sharding", f"ZeRO {self.zero_stage}"),
            ("memory saved", f"{self.memory_savings:.0%}"),
            ("gradients", "in 8 bits" if self.gradient_compression_enabled else "not compressed"),
            ("parameters", f"{self.parameter_count:,}"),
            ("steps", f"{self.steps:,}"),
            ("micro-steps", f"{self.micro_steps:,}"),
            ("time of a synchronization", seconds_text(sync.average_sync_time_ms / 1e3)),
            ("hidden behind computation", f"{sync.overlap_fraction:.0%}"),
            ("sent between nodes", bytes_text(compression.compressed_size)),
            ("compression", f"{compression.compression_ratio:.3g} x"),
            ("memory", bytes_text(memory.total)),
            *((f"  {name}", text) for name, text in memory.rows()),
        ]

    def print_stats(self, stream: TextIO | None = None) -> None:
        """Write the figures to ``stream``, by default standard output."""
        out = sys.stdout if stream is None else stream
        out.write(f"{self}\n")
        out.flush()


class LeaderTraffic:
    """Reads the counters of the leaders' group; nothing is counted with a single node, or on other ranks."""

    def __init__(self, groups: HostGroups, *, is_compressed: bool) -> None:
        self._leaders = groups.between if groups.hosts > 1 else None
        self._is_compressed = is_compressed
        self._before = SyncTraffic()
        self.info = CompressionInfo()

    def begin(self) -> None:
        """Start counting."""
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
        """Start counting a reduction."""
        self.record, self._before = StepRecord(), SyncTraffic.read(self._communicators)

    def last_gradient(self) -> None:
        """Record the time at which the last gradient is final: from now on the caller only waits."""
        self.record.last_gradient_at = self.clock()

    def end(self) -> None:
        """Add the reduction to the totals."""
        self.record.count(SyncTraffic.read(self._communicators) - self._before, least_bytes=None)
        self.record.add_to(self.statistics)
