"""3D-parallel training: data, tensor and pipeline parallelism together, with ZeRO, mixed precision and checkpoints.

Read ``coordinator.py`` first, then ``step.py``, then ``assembly.py``.
"""

from asyncpar.hybrid.analysis import PerformanceAnalysis
from asyncpar.hybrid.config import HybridConfig, Precision
from asyncpar.hybrid.coordinator import ThreeDParallelismCoordinator
from asyncpar.hybrid.loss_scaling import LossScaler, LossScaling
from asyncpar.hybrid.measure import StepMeasure
from asyncpar.hybrid.model import Loss, ParallelModel, StageLayers, StagePlace
from asyncpar.hybrid.monitor import Performance3DMonitor
from asyncpar.hybrid.standing import StepTaken
from asyncpar.hybrid.step import StepResult
from asyncpar.hybrid.transformer import TransformerModel

__all__ = [
    "HybridConfig",
    "Loss",
    "LossScaler",
    "LossScaling",
    "ParallelModel",
    "Performance3DMonitor",
    "PerformanceAnalysis",
    "Precision",
    "StageLayers",
    "StagePlace",
    "StepMeasure",
    "StepResult",
    "StepTaken",
    "ThreeDParallelismCoordinator",
    "TransformerModel",
]
