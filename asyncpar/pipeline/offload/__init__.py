"""Storage of activations between forward and backward passes: in memory, counted, or on disk."""

from asyncpar.pipeline.errors import OffloadError
from asyncpar.pipeline.offload.entry import MemoryUsageStats, Volume
from asyncpar.pipeline.offload.manager import MemoryManager

__all__ = ["MemoryManager", "MemoryUsageStats", "OffloadError", "Volume"]
