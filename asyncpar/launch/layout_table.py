"""Tables of layouts, with as many columns as fit, and a document for programs."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from asyncpar.bench.table import Column, choose_columns, format_row, format_titles
from asyncpar.core.config.schedule_type import schedule_record
from asyncpar.estimate.job import Job
from asyncpar.estimate.layout import Layout
from asyncpar.estimate.search import Findings, Search

_GIGA = 1e9
_MEGA = 1e6
_BEST, _PLAIN = "\x1b[1;32m", "\x1b[0m"


Row = tuple[Job, Layout]
COLUMNS: tuple[Column[Row], ...] = (
    Column(title="dp", unit="", width=4, worth=10, show=lambda row: str(row[1].config.dp_size)),
    Column(title="tp", unit="", width=4, worth=10, show=lambda row: str(row[1].config.tp_size)),
    Column(title="pp", unit="", width=4, worth=10, show=lambda row: str(row[1].config.pp_size)),
    Column(title="ZeRO", unit="", width=5, worth=7, show=lambda row: str(row[1].zero.number)),
    Column(title="schedule", unit="", width=12, worth=5, show=lambda row: _schedule(row[1])),
    Column(title="memory", unit="GB", width=8, worth=8, show=lambda row: _digits(row[1].memory.total / _GIGA)),
    Column(title="traffic", unit="GB", width=8, worth=4, show=lambda row: _digits(row[1].traffic.total / _GIGA)),
    Column(title="bubble", unit="%", width=7, worth=6, show=lambda row: f"{row[1].pipeline.bubble_fraction * 100:.1f}"),
    Column(title="step", unit="s", width=8, worth=9, show=lambda row: _digits(row[1].step_seconds)),
    Column(title="micro-batches", unit="", width=15, worth=2, show=lambda row: str(row[1].micro_batches)),
    Column(title="tokens", unit="/s", width=10, worth=3, show=lambda row: _digits(tokens_rate(*row))),
)


def show_findings(
    job: Job, search: Search, findings: Findings, top: int, *, source: str, width: int | None, colour: bool
) -> str:
    """Return the text to print: the question, the ``top`` best layouts, and why others were left out.

    ``source`` is where bandwidths were measured, "" if nowhere.

    ``width`` is the number of characters in a line, None for no limit.
    """
    layouts = findings.layouts[:top]
    columns = choose_columns(COLUMNS, width)
    rows = [format_row((job, layout), columns) for layout in layouts]
    if colour and rows:
        rows[0] = f"{_BEST}{rows[0]}{_PLAIN}"
    question = [line for text in _title(job, search, source) for line in _wrap(text, width)]
    end = [line for text in _summary(findings, len(layouts)) for line in _wrap(text, width)]
    return "\n".join([*question, "", *format_titles(columns), *rows, "", *end, ""])


def _wrap(text: str, width: int | None) -> list[str]:
    return [text] if width is None else textwrap.wrap(text, width)


def document(job: Job, search: Search, findings: Findings, top: int, source: str) -> dict[str, Any]:
    """Return the same as a document for programs: all sizes in bytes, all times in seconds."""
    return {
        "model": {**asdict(job.model), "parameters": job.model.parameters},
        "machine": asdict(job.machine),
        "bandwidths": source or "not measured",
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
            "buffers": memory.buffers.buckets + memory.buffers.residuals,
            "gathered": memory.buffers.gathered,
            "workspace": memory.workspace,
            "total": memory.total,
        },
        "traffic": {**asdict(layout.traffic), "total": layout.traffic.total},
        "bubble_fraction": layout.pipeline.bubble_fraction,
        "bubble_over_ideal": layout.pipeline.bubble_over_ideal,
        "step_seconds": layout.step_seconds,
        "tokens_per_second": tokens_rate(job, layout),
    }


def _title(job: Job, search: Search, source: str) -> list[str]:
    model, machine = job.model, job.machine
    return [
        f"{search.world} ranks, {machine.ranks_per_host} per host, {search.memory / _GIGA:g} GB each",
        f"{machine.flops / _GIGA:g} GFLOP/s a rank, {machine.bandwidth / _GIGA:g} GB/s between hosts, "
        f"{machine.host_bandwidth / _GIGA:g} inside" + (f", {source}" if source else ""),
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


def _schedule(layout: Layout) -> str:
    return schedule_record(layout.config.pipeline_schedule).short if layout.config.pp_size > 1 else "-"


def _digits(number: float) -> str:
    """Format ``number`` with at least three digits, or two below 0.001, so columns of eight characters keep a gap."""
    if number < 0.001:
        return f"{number:.2g}"
    places = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.3g}" if number < 0.1 else f"{number:.{places}f}"
