"""Layouts for people, as wide as there is room, and for programs."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncpar.core.config.schedule_type import schedule_record
from asyncpar.estimate.job import Job
from asyncpar.estimate.layout import Layout
from asyncpar.estimate.search import Findings, Search

_GIGA = 1e9
_MEGA = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutColumn:
    """``width`` is that of titles and usual figures; ``is_extra``: only where there is room for all."""

    title: str
    unit: str
    width: int
    show: Callable[[Job, Layout], str]
    is_extra: bool = False


COLUMNS = (
    LayoutColumn(title="dp", unit="", width=4, show=lambda _, one: str(one.config.dp_size)),
    LayoutColumn(title="tp", unit="", width=4, show=lambda _, one: str(one.config.tp_size)),
    LayoutColumn(title="pp", unit="", width=4, show=lambda _, one: str(one.config.pp_size)),
    LayoutColumn(title="ZeRO", unit="", width=5, show=lambda _, one: str(one.zero.number)),
    LayoutColumn(title="schedule", unit="", width=12, show=lambda _, one: _schedule(one)),
    LayoutColumn(title="memory", unit="GB", width=8, show=lambda _, one: _digits(one.memory.total / _GIGA)),
    LayoutColumn(title="traffic", unit="GB", width=8, show=lambda _, one: _digits(one.traffic.total / _GIGA)),
    LayoutColumn(title="bubble", unit="%", width=7, show=lambda _, one: f"{one.pipeline.bubble_fraction * 100:.1f}"),
    LayoutColumn(title="step", unit="s", width=8, show=lambda _, one: _digits(one.step_seconds)),
    LayoutColumn(title="micro-batches", unit="", width=15, show=lambda _, one: str(one.micro_batches), is_extra=True),
    LayoutColumn(
        title="tokens", unit="/s", width=10, show=lambda job, one: _digits(tokens_rate(job, one)), is_extra=True
    ),
)


def show_findings(job: Job, search: Search, findings: Findings, top: int, *, is_terminal: bool) -> str:
    """Return the text to print: the question, the ``top`` best layouts, and why others were left out."""
    layouts = findings.layouts[:top]
    lines = [*_title(job, search), ""]
    end = ["", *_summary(findings, len(layouts))]
    if not is_terminal:
        return "\n".join([*lines, *_plain_rows(job, layouts), *end, ""])
    return _drawn(lines, job, layouts, end)


def document(job: Job, search: Search, findings: Findings, top: int) -> dict[str, Any]:
    """Return the same for programs: all sizes in bytes, all times in seconds."""
    return {
        "model": {**asdict(job.model), "parameters": job.model.parameters},
        "machine": asdict(job.machine),
        "world": search.world,
        "memory": search.memory,
        "batch": job.batch,
        "micro_batch_size": job.micro_batch_size,
        "precision": str(job.precision),
        "fitting": len(findings.layouts),
        "misfits": {str(misfit): count for misfit, count in findings.misfits.items()},
        "layouts": [_row(job, layout) for layout in findings.layouts[:top]],
        "least": None if findings.least is None else _row(job, findings.least),
    }


def tokens_rate(job: Job, layout: Layout) -> float:
    """Return the tokens per second of all ranks together."""
    return job.batch * job.model.sequence / layout.step_seconds


def place_of(layout: Layout) -> str:
    """Return the layout in words."""
    config = layout.config
    schedule = f", {schedule_record(config.pipeline_schedule).short}" if config.pp_size > 1 else ""
    return f"dp {config.dp_size}, tp {config.tp_size}, pp {config.pp_size}, ZeRO {layout.zero.number}{schedule}"


def _row(job: Job, layout: Layout) -> dict[str, Any]:
    config, memory = layout.config, layout.memory
    return {
        "dp": config.dp_size,
        "tp": config.tp_size,
        "pp": config.pp_size,
        "zero": layout.zero.number,
        "schedule": str(config.pipeline_schedule),
        "chunks": config.chunks_per_stage,
        "layers": list(config.virtual_stage_layers()),
        "micro_batches": layout.micro_batches,
        "memory": {
            **asdict(memory.state),
            "accumulating": memory.accumulating,
            "activations": memory.activations,
            "total": memory.total,
        },
        "traffic": {**asdict(layout.traffic), "total": layout.traffic.total},
        "bubble_fraction": layout.pipeline.bubble_fraction,
        "bubble_over_ideal": layout.pipeline.bubble_over_ideal,
        "step_seconds": layout.step_seconds,
        "tokens_per_second": tokens_rate(job, layout),
    }


def _title(job: Job, search: Search) -> list[str]:
    model, machine = job.model, job.machine
    return [
        f"{search.world} ranks, {machine.ranks_per_host} per host, {search.memory / _GIGA:g} GB each",
        f"{machine.flops / _GIGA:g} GFLOP/s a rank, {machine.bandwidth / _GIGA:g} GB/s between hosts, "
        f"{machine.host_bandwidth / _GIGA:g} inside",
        f"{model.parameters / _MEGA:,.1f} M parameters, {job.precision}",
        f"{job.batch} sequences of {model.sequence} a step, {job.micro_batch_size} a micro-batch",
    ]


def _summary(findings: Findings, shown: int) -> list[str]:
    fitting = len(findings.layouts)
    lines = [
        f"{_counted(fitting)} fit{'s' if fitting == 1 else ''}" + (f", the best {shown} shown" * (shown < fitting))
    ]
    lines += [f"{_counted(count)} left out: {misfit}" for misfit, count in findings.misfits.items()]
    return lines


def _counted(count: int) -> str:
    return "1 layout" if count == 1 else f"{count} layouts"


def _plain_rows(job: Job, layouts: Sequence[Layout]) -> list[str]:
    titles = "".join(f"{column.title:>{column.width}}" for column in COLUMNS)
    units = "".join(f"{column.unit:>{column.width}}" for column in COLUMNS)
    rows = ["".join(f"{column.show(job, layout):>{column.width}}" for column in COLUMNS) for layout in layouts]
    return [titles, units.rstrip(), *rows]


def _drawn(lines: Sequence[str], job: Job, layouts: Sequence[Layout], end: Sequence[str]) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    written = io.StringIO()
    measure = Console()
    console = Console(file=written, force_terminal=True, width=measure.width, no_color=measure.no_color)
    everything = sum(column.width for column in COLUMNS)
    columns = [column for column in COLUMNS if not column.is_extra or measure.width >= everything]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(f"{column.title}\n{column.unit or ' '}", justify="right", min_width=1)
    for place, layout in enumerate(layouts):
        table.add_row(*(column.show(job, layout) for column in columns), style=None if place else "bold green")
    for line in lines:
        console.print(line, style="dim" if line else None, highlight=False)
    console.print(table)
    for line in end:
        console.print(line, highlight=False)
    return written.getvalue()


def _schedule(layout: Layout) -> str:
    return schedule_record(layout.config.pipeline_schedule).short if layout.config.pp_size > 1 else "-"


def _digits(number: float) -> str:
    """Return three digits at least, and no more behind the point than it takes."""
    places = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.3g}" if number < 0.1 else f"{number:.{places}f}"
