"""Configuration of 3D-parallel training (data, tensor, pipeline), and the place of each rank in it.  Pure."""

from __future__ import annotations

from asyncpar.core.config.group_ids import ProcessGroupIds
from asyncpar.core.config.rank_mapping import RankMapping
from asyncpar.core.config.schedule_type import PipelineScheduleType
from asyncpar.core.config.strategies import CommunicationStrategy, MemoryOptimizationStrategy, MemoryRequirements
from asyncpar.core.config.three_d import DEFAULT_ORDER, ThreeDParallelismConfig

__all__ = [
    "DEFAULT_ORDER",
    "CommunicationStrategy",
    "MemoryOptimizationStrategy",
    "MemoryRequirements",
    "PipelineScheduleType",
    "ProcessGroupIds",
    "RankMapping",
    "ThreeDParallelismConfig",
]
