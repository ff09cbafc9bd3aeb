"""`asyncpar plan`: the layouts of a model over ranks that fit, with the memory, traffic and time of each."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncpar.core.config.checks import check_choice
from asyncpar.core.config.parallel import DEFAULT_ORDER, MemoryOptimizationStrategy, PipelineScheduleType
from asyncpar.core.config.schedule_type import parse_schedule_name
from asyncpar.errors import UsageError
from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_line, print_result
from asyncpar.launch.options import parse_count

if TYPE_CHECKING:
    from asyncpar.estimate.job import Job, Machine
    from asyncpar.estimate.search import Findings, Search

_GIGA = 1e9
_OPTIMIZERS = {"adam": 2, "momentum": 1, "sgd": 0}
_BATCH_PER_RANK = 4
_BANDWIDTH, _HOST_BANDWIDTH = "1.25", "4"
_USUAL = "~/.cache/asyncpar/lanes.json"
"""Stands for the file that ``calibrate(cache=True)`` writes, at whatever path."""


@click.command(cls=OneLineCommand)
@option("--layers", metavar="N", required=True, help="Transformer layers.")
@option("--hidden", metavar="N", required=True, help="Features between layers.")
@option("--heads", metavar="N", required=True, help="Attention heads.")
@option("--vocab", metavar="N", required=True, help="Tokens in the vocabulary.")
@option("--seq", metavar="N", required=True, help="Tokens in a sequence.")
@option("--world", metavar="N", required=True, help="Ranks.")
@option("--ffn", metavar="N", default="4", help="The perceptron is N times as wide as --hidden.  [4]")
@option("--untied", is_flag=True, help="The head has weights of its own.")
@option("--batch", metavar="N", default=None, help="Sequences per step, on all ranks.  [4 micro-batches a rank]")
@option("--micro-batch", metavar="N", default="1", help="Sequences in a micro-batch.  [1]")
@option("--memory", metavar="GB", default="8", help="Memory of a rank.  [8]")
@option("--precision", metavar="NAME", default="fp32", help="fp32, or mixed: half, with float32 masters.  [fp32]")
@option("--optimizer", metavar="NAME", default="adam", help=f"{', '.join(_OPTIMIZERS)}.  [adam]")
@option("--schedule", metavar="NAME,...", default=None, help="Only these, such as 1f1b,zbv.  [all eight]")
@option("--chunks", metavar="N", default="2", help="Pieces per rank of the interleaved schedule.  [2]")
@option("--zero", metavar="N,...", default="0,1,2,3", help="Only these ZeRO stages.  [0,1,2,3]")
@option("--uneven", is_flag=True, help="Stages may differ by one layer.")
@option("--recompute", is_flag=True, help="Compute every layer again in the backward pass.")
@option("--memory-strategy", metavar="NAME", default="basic", help="basic, standard, aggressive, extreme.  [basic]")
@option("--sequence-parallel", is_flag=True, help="Cut norms and dropout over tensor-parallel ranks, too.")
@option("--order", metavar="AXES", default=DEFAULT_ORDER, help=f"Fastest axis first.  [{DEFAULT_ORDER}]")
@option("--ranks-per-host", metavar="N", default="8", help="Ranks that share a host.  [8]")
@option("--flops", metavar="GFLOP/S", default=None, help="What a rank computes.  [50]")
@option("--bandwidth", metavar="GB/S", default=None, help="Between hosts, each way.  [1.25]")
@option("--host-bandwidth", metavar="GB/S", default=None, help="Between ranks of a host.  [4]")
@option("--measured", metavar="FILE", default=None, bare=_USUAL, help="Bandwidths as jobs have measured them.")
@option("--devices", metavar="WAY", default=None, help="A GPU for each rank: nccl, hierarchical, staged.")
@option("--top", metavar="N", default="10", help="Show the N best.  [10]")
@option("--json", "prints_json", is_flag=True, help="One JSON document on stdout, in bytes and seconds.")
def plan(**given: Any) -> None:
    """Find layouts of a transformer over ranks: data, tensor and pipeline
    parallel sizes, ZeRO stage and pipeline schedule.  Nothing is started.

    \b
    asyncpar plan --layers 24 --hidden 1024 --heads 16 --vocab 50257 \\
        --seq 1024 --world 16
    asyncpar plan ... --memory 16 --precision mixed --schedule 1f1b,zbv

    Shown are, best first, layouts whose fullest rank has enough memory: that
    memory, what the busiest rank sends per step, the part of the pipeline's
    time in which its busiest rank idles (bubble), and a rough step time.  GB
    are 10^9 bytes.  Memory is parameters, gradients, optimizer states and
    activations by the published formulas, without buffers.  Bubbles come from
    simulation.

    With --measured, bandwidths that are not given are those of this host that
    comm.calibrate(cache=True) has kept in the last week, to the slowest of the
    others; --measured=FILE reads the file of calibrate(cache="FILE").

    With --devices, arrays go at published speeds of NVLink 4, InfiniBand NDR
    and PCI Express 5, which were not measured here: by NCCL, by NCCL on each
    host and at --bandwidth between them, or all through the host.

    Exits with 1 if no layout fits.
    """
    exit_with("plan", lambda: run_plan(given))


def run_plan(given: dict[str, Any]) -> int:
    """Show the layouts and return the exit code: 1 if there are none.  Raises ``UsageError`` for wrong arguments."""
    from asyncpar.estimate.search import find_layouts
    from asyncpar.launch.layout_table import document, show_findings

    top = _count(given, "top")
    source = _fill_measured(given)
    job, search = _job(given), _search(given)
    findings = find_layouts(job, search)
    if given["prints_json"]:
        print_result("the layouts", json.dumps(document(job, search, findings, top, source), indent=2) + "\n")
    elif findings.layouts:
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else None
        colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        shown = show_findings(job, search, findings, top, source=source, width=width, colour=colour)
        print_result("the layouts", shown, colors=True)
    if findings.layouts:
        return 0
    print_line(f"asyncpar plan: {_nothing_fits(job, search, findings)}", err=True)
    return 1


def _job(given: dict[str, Any]) -> Job:
    from asyncpar.estimate.job import Job, ModelShape, Precision

    world, micro_batch = _count(given, "world"), _count(given, "micro_batch")
    if given["optimizer"] not in _OPTIMIZERS:
        raise UsageError(f"--optimizer: expected one of {', '.join(_OPTIMIZERS)}, got {given['optimizer']!r}")
    model = ModelShape(
        layers=_count(given, "layers"),
        hidden=_count(given, "hidden"),
        heads=_count(given, "heads"),
        vocabulary=_count(given, "vocab"),
        sequence=_count(given, "seq"),
        ffn_multiple=_count(given, "ffn"),
        is_tied=not given["untied"],
    )
    return Job(
        model=model,
        machine=_machine(given),
        batch=_BATCH_PER_RANK * world * micro_batch if given["batch"] is None else _count(given, "batch"),
        micro_batch_size=micro_batch,
        precision=check_choice("--precision", Precision, given["precision"]),
        optimizer_states=_OPTIMIZERS[given["optimizer"]],
        memory_strategy=check_choice("--memory-strategy", MemoryOptimizationStrategy, given["memory_strategy"]),
        recompute=given["recompute"],
        sequence_parallel=given["sequence_parallel"],
        order=given["order"],
    )


def _fill_measured(given: dict[str, Any]) -> str:
    """Fill in the bandwidths that were not given; return their source, "" if there is none."""
    source = _read_measured(given) if given["measured"] is not None else ""
    for name, usual in (("bandwidth", _BANDWIDTH), ("host_bandwidth", _HOST_BANDWIDTH)):
        given[name] = usual if given[name] is None else given[name]
    return source


def _read_measured(given: dict[str, Any]) -> str:
    from asyncpar.collectives.lane_cache import LaneCache, default_path
    from asyncpar.net.membership.host import host_name

    path = default_path() if given["measured"] == _USUAL else Path(given["measured"])
    host = host_name()
    known, parts = LaneCache(path).of_host(host), []
    others = "another host" if known.hosts == 1 else f"the slowest of {known.hosts} hosts"
    for name, costs, what in (
        ("bandwidth", known.between, f"between {host} and {others}"),
        ("host_bandwidth", known.within, f"inside {host}"),
    ):
        if costs is not None and given[name] is None:
            given[name] = f"{costs.bandwidth / _GIGA:.3g}"
            parts.append(what)
    if known.within is None and known.between is None:
        raise UsageError(
            f"--measured: expected figures of {host} of the last week in {path}, there are none; "
            "call comm.calibrate(cache=True) in a job there, or give --bandwidth"
        )
    return f"measured {' and '.join(parts)} ({path})" if parts else ""


def _machine(given: dict[str, Any]) -> Machine:
    from asyncpar.estimate.job import Machine

    ranks, way = _count(given, "ranks_per_host"), given["devices"]
    bandwidth = _giga("--bandwidth", given["bandwidth"])
    host_bandwidth = _giga("--host-bandwidth", given["host_bandwidth"])
    if way is None:
        flops = _giga("--flops", "50" if given["flops"] is None else given["flops"])
        return Machine(ranks_per_host=ranks, flops=flops, bandwidth=bandwidth, host_bandwidth=host_bandwidth)
    if given["flops"] is None:
        raise UsageError("--devices: expected --flops with it: what your model really gets of a GPU, in GFLOP/s")
    try:
        return Machine.of_devices(
            ranks,
            flops=_giga("--flops", given["flops"]),
            way=way,
            bandwidth=bandwidth,
            host_bandwidth=host_bandwidth,
        )
    except UsageError as error:
        raise UsageError(f"--devices: {error}") from error


def _search(given: dict[str, Any]) -> Search:
    from asyncpar.core.config.strategies import ZeROStage
    from asyncpar.estimate.search import Search

    schedules = given["schedule"]
    return Search(
        world=_count(given, "world"),
        memory=_giga("--memory", given["memory"]),
        schedules=tuple(PipelineScheduleType)
        if schedules is None
        else tuple(dict.fromkeys(_schedule(name) for name in schedules.split(","))),
        zero_stages=tuple(dict.fromkeys(ZeROStage.of(_zero(text)) for text in given["zero"].split(","))),
        chunks=parse_count("--chunks", given["chunks"], least=2),
        is_uneven=given["uneven"],
    )


def _schedule(name: str) -> str:
    try:
        return parse_schedule_name(name)
    except UsageError as error:
        raise UsageError(f"--{error}") from error


def _zero(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise UsageError(f"--zero: expected stages 0 to 3 joined by ',', got {text!r}")
    return int(text)


def _count(given: dict[str, Any], name: str) -> int:
    return parse_count(f"--{name.replace('_', '-')}", given[name], least=1)


def _giga(name: str, text: str) -> float:
    """Parse a positive number of billions."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise UsageError(f"{name}: expected a positive number, got {text!r}")
    return number * _GIGA


def _nothing_fits(job: Job, search: Search, findings: Findings) -> str:
    """Return why no layout fits, and what to change."""
    from asyncpar.launch.layout_table import place_of

    ranks = "1 rank" if search.world == 1 else f"{search.world} ranks"
    reasons = ", ".join(f"{count} {misfit}" for misfit, count in findings.misfits.items())
    text = f"no layout fits on {ranks}: {reasons}"
    least = findings.least
    if least is None:
        return f"{text}; change the sizes that do not divide" + ("" if search.is_uneven else ", or give --uneven")
    needed = math.ceil(least.memory.total / _GIGA * 100) / 100
    return (
        f"{text}; the least memory needed is {needed:.2f} GB per rank, {search.memory / _GIGA:g} GB are there: "
        f"{place_of(least)}; give --memory {needed:.2f}, more ranks" + ("" if job.recompute else ", or --recompute")
    )
