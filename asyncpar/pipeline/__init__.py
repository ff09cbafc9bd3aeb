"""Pipeline parallelism: schedules as data, checked and simulated before they run, and the executor that runs them.

Read ``operation.py`` and ``schedule.py`` first; ``orders/`` makes the built-in schedules, ``check.py`` checks whether
one can run, and ``simulation.py`` predicts its time and memory.  Then ``executor.py`` and ``execution.py``,
``alarm.py`` (how ranks fail together), ``recompute.py`` and ``offload/`` (storage until the backward pass).
"""

from asyncpar.agreement.errors import PipelineMismatch
from asyncpar.pipeline.alarm import StepAlarm, StepFailed
from asyncpar.pipeline.check import check_blocking, check_schedule
from asyncpar.pipeline.custom import CustomSchedule, format_schedule, load_schedule, parse_schedule, write_schedule
from asyncpar.pipeline.errors import ActionFailed, InvalidSchedule
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.pipeline.layout import StageLayout
from asyncpar.pipeline.offload import MemoryManager, MemoryUsageStats, OffloadError
from asyncpar.pipeline.operation import Content, Message, OperationKind, PipelineOp
from asyncpar.pipeline.recompute import Recomputed, apply_memory_strategy
from asyncpar.pipeline.registry import ScheduleKind, make_schedule, register_schedule, unregister_schedule
from asyncpar.pipeline.result import BoundaryTraffic, PipelineResult
from asyncpar.pipeline.schedule import PipelineSchedule, Schedule
from asyncpar.pipeline.simulation import (
    UNIT_COSTS,
    CostModel,
    Costs,
    OperationSpan,
    Simulation,
    peak_in_flight,
    simulate,
)

__all__ = [
    "UNIT_COSTS",
    "ActionFailed",
    "BoundaryTraffic",
    "Content",
    "CostModel",
    "Costs",
    "CustomSchedule",
    "InvalidSchedule",
    "MemoryManager",
    "MemoryUsageStats",
    "Message",
    "OffloadError",
    "OperationKind",
    "OperationSpan",
    "PipelineExecutor",
    "PipelineMismatch",
    "PipelineOp",
    "PipelineResult",
    "PipelineSchedule",
    "Recomputed",
    "Schedule",
    "ScheduleKind",
    "Simulation",
    "StageLayout",
    "StepAlarm",
    "StepFailed",
    "apply_memory_strategy",
    "check_blocking",
    "check_schedule",
    "format_schedule",
    "load_schedule",
    "make_schedule",
    "parse_schedule",
    "peak_in_flight",
    "register_schedule",
    "simulate",
    "unregister_schedule",
    "write_schedule",
]
