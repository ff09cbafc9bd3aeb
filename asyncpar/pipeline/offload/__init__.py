"""Where activations are between forward and backward: in memory, counted, or on disk."""

from asyncpar.pipeline.offload.errors import OffloadError
from asyncpar.pipeline.offload.manager import MemoryManager
from asyncpar.pipeline.offload.usage import MemoryUsageStats, Volume

__all__ = ["MemoryManager", "MemoryUsageStats", "OffloadError", "Volume"]
