"""All layouts of a job over a number of ranks: those that fit, best first, and why the others do not.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from asyncpar.core.config.checks import check_count, check_positive
from asyncpar.core.config.parallel import PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.core.config.schedule_type import check_schedule_name, schedule_record
from asyncpar.core.config.slicing import spread_layers
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.errors import UsageError
from asyncpar.estimate.job import Job
from asyncpar.estimate.layout import Layout, estimate_layouts

MOST_RANKS = 1_000_000
_GIGABYTE = 1e9
_ALONE = PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD
"""The schedule of a pipeline of one stage, for which all are the same."""


class Misfit(StrEnum):
    """Why a layout is impossible.  Schedules with several pieces of the model per rank need a layer per piece."""

    HEADS = "heads do not divide by tp"
    FEW_LAYERS = "fewer layers than stages"
    UNEVEN_LAYERS = "layers do not divide by stages"
    BATCH = "batch does not divide by dp x micro-batch"
    MEMORY = "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The limits of the search for layouts.

    ``memory`` is that of a rank, in bytes.  ``chunks`` is the number of pieces that each stage of an interleaved
    schedule holds.  ``is_uneven``: stages may have different numbers of layers.

    ``schedules`` and ``zero_stages`` are the candidates.
    """

    world: int
    memory: float
    schedules: tuple[PipelineScheduleType | str, ...] = tuple(PipelineScheduleType)
    zero_stages: tuple[ZeROStage, ...] = tuple(ZeROStage)
    chunks: int = 2
    is_uneven: bool = False

    def __post_init__(self) -> None:
        if check_count("world", self.world) > MOST_RANKS:
            raise UsageError(f"world: expected at most {MOST_RANKS} ranks, got {self.world}")
        check_positive("memory", self.memory, "bytes")
        if not self.schedules or not self.zero_stages:
            raise UsageError("schedules, zero_stages: expected at least one of each, got none")
        for schedule in self.schedules:
            check_schedule_name("schedules", schedule)
        check_count("chunks", self.chunks, least=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results of a search.

    ``layouts`` are those that fit, best first; ``misfits`` counts the others; ``least`` is the one that needs least
    memory of those that only memory keeps from fitting, None if there are none.
    """

    layouts: tuple[Layout, ...]
    misfits: Mapping[Misfit, int]
    least: Layout | None


def find_layouts(job: Job, search: Search) -> Findings:
    """Return all layouts of ``job``: the fastest first, and among equally fast ones those that need less memory.

    Equivalent layouts are listed once: with one replica there is no ZeRO, with one stage only one schedule.
    """
    fitting: list[Layout] = []
    misfits = dict.fromkeys(Misfit, 0)
    least: Layout | None = None
    for sizes in factorizations(search.world):
        zero_stages = _zero_stages(search, replicas=sizes[0])
        for schedule in _schedules(search, stages=sizes[2]):
            found = _configuration(job, search, sizes, schedule)
            if isinstance(found, Misfit):
                misfits[found] += len(zero_stages)
                continue
            for layout in estimate_layouts(job, found, zero_stages):
                if layout.memory.total <= search.memory:
                    fitting.append(layout)
                else:
                    misfits[Misfit.MEMORY] += 1
                    least = layout if least is None else min(least, layout, key=lambda one: one.memory.total)
    return Findings(
        layouts=tuple(sorted(fitting, key=_preference)),
        misfits={misfit: count for misfit, count in misfits.items() if count},
        least=least,
    )


def factorizations(world: int) -> Iterator[tuple[int, int, int]]:
    """Yield all (dp, tp, pp) whose product is ``world``."""
    for dp_size in _divisors(world):
        for tp_size in _divisors(world // dp_size):
            yield dp_size, tp_size, world // dp_size // tp_size


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _preference(layout: Layout) -> tuple[float, float, int]:
    return float(f"{layout.step_seconds:.9g}"), layout.memory.total, layout.zero.number


def _zero_stages(search: Search, *, replicas: int) -> Sequence[ZeROStage]:
    return search.zero_stages if replicas > 1 else (ZeROStage.NONE,)


def _schedules(search: Search, *, stages: int) -> Iterable[str]:
    return search.schedules if stages > 1 else (_ALONE,)


def _configuration(
    job: Job, search: Search, sizes: tuple[int, int, int], schedule: str
) -> ThreeDParallelismConfig | Misfit:
    dp_size, tp_size, pp_size = sizes
    model = job.model
    chunks = (
        search.chunks if schedule == PipelineScheduleType.INTERLEAVED_ONE_F1B else schedule_record(schedule).chunks(1)
    )
    pieces = pp_size * chunks
    if model.heads % tp_size:
        return Misfit.HEADS
    if model.layers < pieces:
        return Misfit.FEW_LAYERS
    if model.layers % pieces and not search.is_uneven:
        return Misfit.UNEVEN_LAYERS
    if job.batch % (dp_size * job.micro_batch_size):
        return Misfit.BATCH
    return ThreeDParallelismConfig(
        dp_size=dp_size,
        tp_size=tp_size,
        pp_size=pp_size,
        num_layers=model.layers,
        micro_batch_size=job.micro_batch_size,
        memory_strategy=job.memory_strategy,
        enable_gradient_checkpointing=job.recompute,
        enable_mixed_precision=job.precision == "mixed",
        pipeline_schedule=schedule,
        max_memory_per_device=search.memory / _GIGABYTE,
        num_model_chunks=chunks,
        order=job.order,
        layers_per_stage=spread_layers(model.layers, pieces) if model.layers % pieces else None,
    )
