"""Pipeline parallelism: schedules as data, checked and simulated before they run.

Read ``operation.py`` and ``schedule.py`` first; ``orders/`` makes the built-in schedules, ``check.py`` says whether
one can run, and ``simulation.py`` what it takes.
"""

from asyncpar.pipeline.blocking import check_blocking
from asyncpar.pipeline.check import check_schedule
from asyncpar.pipeline.costs import UNIT_COSTS, CostModel, Costs
from asyncpar.pipeline.custom import CustomSchedule
from asyncpar.pipeline.errors import InvalidSchedule
from asyncpar.pipeline.layout import StageLayout
from asyncpar.pipeline.operation import Content, Message, OperationKind, PipelineOp
from asyncpar.pipeline.schedule import PipelineSchedule, Schedule
from asyncpar.pipeline.schedule_file import format_schedule, load_schedule, parse_schedule, write_schedule
from asyncpar.pipeline.simulation import Simulation, Span, peak_in_flight, simulate

__all__ = [
    "UNIT_COSTS",
    "Content",
    "CostModel",
    "Costs",
    "CustomSchedule",
    "InvalidSchedule",
    "Message",
    "OperationKind",
    "PipelineOp",
    "PipelineSchedule",
    "Schedule",
    "Simulation",
    "Span",
    "StageLayout",
    "check_blocking",
    "check_schedule",
    "format_schedule",
    "load_schedule",
    "parse_schedule",
    "peak_in_flight",
    "simulate",
    "write_schedule",
]
