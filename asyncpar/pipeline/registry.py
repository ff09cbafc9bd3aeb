"""The registry of pipeline schedules, and schedules by name.  Pure.

``register_schedule`` makes a schedule available by its name to everything that takes one: ``ThreeDParallelismConfig``,
the estimates, the training commands.  All ranks register the same schedules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.core.config.schedule_type import SCHEDULES, PipelineScheduleType, ScheduleRecord, schedule_record
from asyncpar.errors import UsageError
from asyncpar.pipeline.check import check_schedule
from asyncpar.pipeline.errors import InvalidSchedule
from asyncpar.pipeline.schedule import PipelineSchedule, Schedule

_PROVED_STAGES = range(1, 9)
_PROVED_MICRO_BATCHES = (1, 2, 3, 4, 5, 8, 13)
_PROVED_CHUNKS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind(ScheduleRecord):
    """The record of a schedule, for ``register_schedule``.

    ``make`` is called with ``num_stages``, ``num_microbatches`` and ``num_model_chunks`` by name and returns a
    ``Schedule``; a subclass of ``Schedule`` will do.  It accepts any number of micro-batches from 1, on which the
    layout must not depend, and raises ``UsageError`` for numbers of stages or chunks that the schedule cannot have.
    """

    name: str
    make: Callable[..., Schedule]

    @property
    def short(self) -> str:
        return self.name

    def chunks(self, num_model_chunks: int) -> int:
        return self._example(1, num_model_chunks).num_model_chunks

    def stage_ranks(self, stages: int, num_model_chunks: int) -> tuple[int, ...]:
        return self._example(stages, num_model_chunks).layout.ranks

    def _example(self, stages: int, num_model_chunks: int) -> Schedule:
        return self.make(num_stages=stages, num_microbatches=1, num_model_chunks=num_model_chunks)


def make_schedule(name: str, *, num_stages: int, num_microbatches: int, num_model_chunks: int = 1) -> Schedule:
    """Return the schedule called ``name`` for these numbers of ranks, micro-batches, and model chunks per rank.

    Raises ``UsageError`` for an unknown name and for numbers that the schedule cannot have.

    ``num_model_chunks`` is the number of stages that each rank has.
    """
    record = schedule_record(name)
    if isinstance(record, ScheduleKind):
        return record.make(num_stages=num_stages, num_microbatches=num_microbatches, num_model_chunks=num_model_chunks)
    return PipelineSchedule(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule_type=PipelineScheduleType(name),
        num_model_chunks=num_model_chunks,
    )


def schedule_of(config: ThreeDParallelismConfig, micro_batches: int) -> Schedule:
    """Return the schedule that ``config`` names, for steps of ``micro_batches``."""
    return make_schedule(
        config.pipeline_schedule,
        num_stages=config.pp_size,
        num_microbatches=micro_batches,
        num_model_chunks=config.num_model_chunks,
    )


def register_schedule(kind: ScheduleKind) -> None:
    """Register the schedule ``kind`` under its name in this process.

    It is proved first: for 1 to 8 stages, up to 13 micro-batches, and 1 and 2 chunks, as far as ``make`` accepts them.
    Raises ``UsageError`` for a name that is taken, and for a schedule that cannot run, that differs from one call of
    ``make`` to the next, or whose layout depends on the number of micro-batches.
    """
    SCHEDULES.check(kind.name)
    what = f"schedule {kind.name!r}: make"
    try:
        inspect.signature(kind.make).bind(num_stages=1, num_microbatches=1, num_model_chunks=1)
    except TypeError as error:
        raise UsageError(
            f"{what}: expected a function of num_stages, num_microbatches and num_model_chunks, got {kind.make!r}"
        ) from error
    is_proved = False
    for stages, chunks in product(_PROVED_STAGES, _PROVED_CHUNKS):
        try:
            is_proved |= _prove(kind, stages, chunks, what)
        except InvalidSchedule as error:
            message = f"{what}: wrong for {stages} stages with {chunks} chunks: {error}; correct the order"
            raise InvalidSchedule(message, rank=error.rank, operation=error.operation) from error
    if not is_proved:
        raise UsageError(f"{what}: expected it to take some number of stages from 1 to 8, but it refused them all")
    SCHEDULES.register(kind)


def unregister_schedule(name: str) -> None:
    """Remove a registered schedule.  Raises ``UsageError`` if there is none of this name, or it is built in."""
    if not isinstance(schedule_record(name), ScheduleKind):
        raise UsageError(f"schedule: expected the name of a registered one, got {name!r}, which belongs to the package")
    SCHEDULES.unregister(name)


def _prove(kind: ScheduleKind, stages: int, chunks: int, what: str) -> bool:
    """Check the schedules of these sizes; return whether ``make`` accepts them, False if it raises ``UsageError``."""
    try:
        ranks = kind.stage_ranks(stages, chunks)
    except InvalidSchedule:
        raise
    except UsageError:
        return False
    for micro_batches in _PROVED_MICRO_BATCHES:
        made, again = (
            kind.make(num_stages=stages, num_microbatches=micro_batches, num_model_chunks=chunks) for _ in range(2)
        )
        if not isinstance(made, Schedule):
            raise UsageError(f"{what}: expected a function that returns a Schedule, got one of {made!r}")
        sizes = f"{stages} stages, {micro_batches} micro-batches, {chunks} chunks"
        got = (made.num_stages, made.num_microbatches, made.layout.num_model_chunks)
        if got != (stages, micro_batches, made.num_model_chunks):
            raise UsageError(f"{what}: expected a schedule of {sizes}, got {got[0]}, {got[1]} and {got[2]}")
        if made.layout.ranks != ranks:
            raise UsageError(f"{what}: expected one layout for any number of micro-batches, got another for {sizes}")
        check_schedule(made)
        if made.digest() != again.digest():
            raise UsageError(f"{what}: expected the same orders from equal numbers, got different ones for {sizes}")
    return True
