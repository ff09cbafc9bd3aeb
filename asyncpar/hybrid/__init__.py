"""3D-parallel training: data, tensor and pipeline parallelism together, with ZeRO, mixed precision and checkpoints.

Read ``coordinator.py`` first, then ``step.py``, then ``assembly.py``.
"""

from asyncpar.core.config.parallel import (
    MemoryOptimizationStrategy,
    PipelineScheduleType,
    ThreeDParallelismConfig,
)
from asyncpar.hybrid.analysis import PerformanceAnalysis, StepMeasure
from asyncpar.hybrid.config import HybridConfig, Precision
from asyncpar.hybrid.coordinator import ThreeDParallelismCoordinator
from asyncpar.hybrid.loss_scaling import LossScaler, LossScaling
from asyncpar.hybrid.model import Loss, ParallelModel, StageLayers, StagePlace, TransformerModel
from asyncpar.hybrid.monitor import Performance3DMonitor
from asyncpar.hybrid.recovery import StepTaken
from asyncpar.hybrid.step import StepResult

__all__ = [
    "HybridConfig",
    "Loss",
    "LossScaler",
    "LossScaling",
    "MemoryOptimizationStrategy",
    "ParallelModel",
    "Performance3DMonitor",
    "PerformanceAnalysis",
    "PipelineScheduleType",
    "Precision",
    "StageLayers",
    "StagePlace",
    "StepMeasure",
    "StepResult",
    "StepTaken",
    "ThreeDParallelismConfig",
    "ThreeDParallelismCoordinator",
    "TransformerModel",
]
