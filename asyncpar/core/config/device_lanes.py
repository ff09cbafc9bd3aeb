"""Costs of moving arrays on CUDA devices: NCCL inside a host and between hosts, and copies to pinned memory.  Pure.

**The built-in figures were not measured by asyncpar.**  They are published figures of one generation of hardware, and
give the order of magnitude: NVLink 4 moves 450 GB/s each way (NVIDIA H100 Tensor Core GPU Architecture, 2022),
InfiniBand NDR 400 Gbit/s, 50 GB/s, for each GPU (NVIDIA Quantum-2), PCI Express 5.0 x16 64 GB/s each way (PCI-SIG).
Latencies are guesses of microseconds.  ``Communicator.calibrate`` replaces them by measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import UsageError

NVLINK_COSTS = LaneCosts(latency=3e-6, bandwidth=450e9, reduction=1e12)
"""Between GPUs of a host, which reduce as fast as their memory moves three arrays at 3.35 TB/s."""

INFINIBAND_COSTS = LaneCosts(latency=5e-6, bandwidth=50e9, reduction=1e12)
"""Between hosts, where each GPU has an adapter of its own."""

PCI_EXPRESS_COSTS = LaneCosts(latency=10e-6, bandwidth=64e9)
"""Between a GPU and pinned memory of its host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLanes:
    """Costs of NCCL ``within`` a host and ``between`` hosts, for each GPU, and of a ``copy`` to or from the host."""

    within: LaneCosts = NVLINK_COSTS
    between: LaneCosts = INFINIBAND_COSTS
    copy: LaneCosts = PCI_EXPRESS_COSTS

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(getattr(self, field.name), LaneCosts):
                raise UsageError(f"{field.name}: expected LaneCosts, got {getattr(self, field.name)!r}")

    @property
    def is_built_in(self) -> bool:
        """Whether all figures are the built-in ones, on which no choice is based."""
        return self is BUILT_IN_LANES

    def __str__(self) -> str:
        return "; ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


BUILT_IN_LANES = DeviceLanes()
