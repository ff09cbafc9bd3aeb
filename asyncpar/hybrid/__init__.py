"""3D-parallel training: data, tensor and pipeline parallelism together, with ZeRO, mixed precision and checkpoints.

Read ``coordinator.py`` first, then ``step.py``, then ``assembly.py``.
"""

from asyncpar.core.config.parallel import (
    DEFAULT_ORDER,
    CommunicationStrategy,
    MemoryOptimizationStrategy,
    MemoryRequirements,
    PipelineScheduleType,
    ProcessGroupIds,
    RankMapping,
    ThreeDParallelismConfig,
)
from asyncpar.core.config.placement import Placement, Replication
from asyncpar.hybrid.analysis import PerformanceAnalysis, StepMeasure
from asyncpar.hybrid.config import HybridConfig, Precision
from asyncpar.hybrid.coordinator import ThreeDParallelismCoordinator
from asyncpar.hybrid.loss_scaling import LossScaler, LossScaling
from asyncpar.hybrid.model import Loss, ParallelModel, StageLayers, StagePlace, TransformerModel
from asyncpar.hybrid.monitor import Performance3DMonitor
from asyncpar.hybrid.recovery import StepTaken
from asyncpar.hybrid.step import StepResult

__all__ = [
    "DEFAULT_ORDER",
    "CommunicationStrategy",
    "HybridConfig",
    "Loss",
    "LossScaler",
    "LossScaling",
    "MemoryOptimizationStrategy",
    "MemoryRequirements",
    "ParallelModel",
    "Performance3DMonitor",
    "PerformanceAnalysis",
    "PipelineScheduleType",
    "Placement",
    "Precision",
    "ProcessGroupIds",
    "RankMapping",
    "Replication",
    "StageLayers",
    "StagePlace",
    "StepMeasure",
    "StepResult",
    "StepTaken",
    "ThreeDParallelismConfig",
    "ThreeDParallelismCoordinator",
    "TransformerModel",
]
