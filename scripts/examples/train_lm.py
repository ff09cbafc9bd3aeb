"""Train a byte-level transformer on real text with data parallelism, and check it against one process.

    asyncpar launch --nproc-per-node 4 scripts/examples/train_lm.py --check
    asyncpar launch --nproc-per-node 4 scripts/examples/train_lm.py --codec int8 --sync diloco:20:0.7:0.7
    python scripts/examples/train_lm.py --steps 20

Without a launcher it trains alone.  The last line on stdout is one JSON object with the figures of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

import asyncpar as ap
from asyncpar.collectives.communicator import Communicator
from asyncpar.config.environment import LaunchEnvironment
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, SyncStatistics, least_bytes
from asyncpar.nn import AdamWConfig, TransformerConfig, WarmupCosine
from asyncpar.observe.reporting import Reporter
from asyncpar.train import (
    Batches,
    Expectation,
    LanguageModel,
    Progress,
    StepReport,
    Summary,
    Texts,
    TrainingConfig,
    compare,
    compression_ratio,
    evaluate,
    expect,
    find_fault,
    make_texts,
    make_trainer,
    open_progress,
    parse_mode,
    plot_losses,
    read_corpus,
    split_rows,
    standard_library_text,
)

LIBRARY_BYTES = 4 << 20
PATIENCE = 5.0
"""Seconds within which the launcher ends the other ranks after one has failed."""

LEAST_WINDOWS = 16
"""A text shorter than this many windows is too short to learn anything from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the distributed part hands over: its losses, its figures, and whether this rank tells about it."""

    losses: list[float]
    summary: Summary
    is_first: bool


class Parser(argparse.ArgumentParser):
    """Raises ``UsageError`` for wrong options, so that not every rank prints them."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options.  Raises ``UsageError`` for a wrong one."""
    parser = Parser(description="Train a byte-level transformer on text, data parallel.")
    parser.add_argument(
        "--text", nargs="+", type=Path, metavar="PATH", help="files or folders (default: the standard library's source)"
    )
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=64, help="windows per step, over all ranks (default: 64)")
    parser.add_argument("--seq", type=int, default=64, help="bytes per window (default: 64)")
    parser.add_argument("--dim", type=int, default=128, help="features (default: 128)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default: 0.002)")
    parser.add_argument("--lr-floor", type=float, default=0.1, help="last rate as a part of the peak (default: 0.1)")
    parser.add_argument("--beta1", type=float, default=0.9, help="of AdamW (default: 0.9; 0 to 0.5 for sparse codecs)")
    parser.add_argument("--beta2", type=float, default=0.99, help="of AdamW (default: 0.99; 0.999 for sparse codecs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument(
        "--codec",
        "--compress",
        default="none",
        metavar="NAME",
        help="gradients on the wire: none, bf16, fp16, int8, int4, sign, topk:0.01, topk:0.01+int8, randomk:0.1, "
        "powersgd:4, auto (default: none)",
    )
    parser.add_argument(
        "--sync",
        default="sync",
        metavar="MODE",
        help="sync, local:H, diloco:H[:RATE[:MOMENTUM]], hierarchical:H[:RATE[:MOMENTUM]], async, stale:STEPS "
        "(default: sync)",
    )
    parser.add_argument(
        "--held-out", type=float, default=0.0, metavar="PART", help="part of the text to evaluate on (default: 0)"
    )
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="largest bucket in MiB (default: 25)")
    parser.add_argument("--check", action="store_true", help="repeat the run in one process and compare")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png and summary.json")
    return parser.parse_args(arguments)


def make_config(options: argparse.Namespace) -> TrainingConfig:
    """Return everything that decides the numbers.  Raises ``UsageError`` for settings out of range.

    The rate is low enough, the warm-up long enough and epsilon large enough that training is stable: an unstable run
    amplifies the rounding of different orders of summation, a stable one keeps two runs together to 1e-7.
    """
    for name in ("steps", "batch", "seq", "dim", "layers", "heads", "lr", "bucket_mb"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')}: expected a positive number, got {value}")
    if options.seed < 0:
        raise UsageError(f"--seed: expected 0 or more, got {options.seed}")
    if not 0.0 <= options.held_out <= 0.5:
        raise UsageError(f"--held-out: expected a part in 0..0.5, got {options.held_out}")
    if parse_mode(options.sync).is_free and options.codec != "none":
        raise UsageError(f"--codec: expected none with --sync {options.sync}, got {options.codec}")
    if not 0.0 <= options.lr_floor <= 1.0:
        raise UsageError(f"--lr-floor: expected a part of the peak in 0..1, got {options.lr_floor}")
    warmup = min(40, options.steps // 4)
    return TrainingConfig(
        model=TransformerConfig(
            length=options.seq,
            features=options.dim,
            layers=options.layers,
            heads=options.heads,
            seed=options.seed,
            dtype=options.dtype,
        ),
        optimizer=AdamWConfig(beta1=options.beta1, beta2=options.beta2, epsilon=1e-5, clip_norm=1.0),
        schedule=WarmupCosine(peak=options.lr, steps=options.steps, warmup=warmup, floor=options.lr_floor),
        steps=options.steps,
        rows=options.batch,
    )


def read_texts(options: argparse.Namespace) -> Texts:
    """Read the text.  Raises ``UsageError`` when it cannot be read or is too short."""
    least = LEAST_WINDOWS * (options.seq + 1)
    if options.held_out:
        least = math.ceil(least / options.held_out)
    if options.text:
        corpus = read_corpus(options.text, least=least)
    else:
        corpus = read_corpus(standard_library_text(), least=least, most=LIBRARY_BYTES)
    return make_texts(corpus, rows=options.batch, length=options.seq, seed=options.seed, held_out=options.held_out)


async def train(options: argparse.Namespace, config: TrainingConfig, texts: Texts, reporter: Reporter) -> Run:
    """Train on all ranks together."""
    async with ap.init() as node:
        communicator = node.world
        await check_same_text(communicator, texts.training)
        model = LanguageModel(config)
        setup = make_trainer(
            parse_mode(options.sync),
            model,
            texts.training,
            node=node,
            compression=make_compression(options),
            bucketing=GradientBucketingConfig(bucket_size_mb=options.bucket_mb),
        )
        await communicator.barrier()
        losses: list[float] = []
        sent, start = node.bytes_sent, time.perf_counter()
        is_first = communicator.rank == 0
        with open_progress(description="train", total=config.steps, reporter=reporter, is_watched=is_first) as progress:
            async with aclosing(setup.trainer.run()) as reports:
                async for report in reports:
                    losses.append(report.loss)
                    show(progress, report, config, setup.statistics())
        sent, seconds = node.bytes_sent - sent, time.perf_counter() - start
        await setup.trainer.check_replicas()
        counts = await communicator.all_gather_object(sent)
        least = least_bytes(sum(parameter.grad.nbytes for parameter in model.model.parameters()), communicator)
        summary = summarize(losses, config, options, counts=counts, seconds=seconds, least=least)
        if options.codec != "none":
            summary = replace(summary, residual_norm=setup.statistics().residual_norm)
        if texts.held_out is not None and is_first:
            loss = await asyncio.to_thread(evaluate, model, texts.held_out)
            summary = replace(summary, held_out_loss=loss)
        return Run(losses=losses, summary=summary, is_first=is_first)


def make_compression(options: argparse.Namespace) -> GradientCompressionConfig:
    """Return the settings of the codec.  Raises ``UsageError`` for one that is not known."""
    return GradientCompressionConfig(codec=None if options.codec == "none" else options.codec)


async def check_same_text(communicator: Communicator, batches: Batches) -> None:
    """Raise ``UsageError`` that names the first rank whose text differs."""
    digests = await communicator.all_gather_object(hashlib.sha256(batches.corpus.data).hexdigest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UsageError(f"text: expected the same bytes on all ranks, but rank {rank} has others than rank 0")


def show(progress: Progress, report: StepReport, config: TrainingConfig, statistics: SyncStatistics) -> None:
    """Show a step."""
    steps = statistics.total_sync_operations
    fields = {
        "loss": f"{report.loss:.4f}",
        "bytes/s": f"{config.tokens / report.seconds:,.0f}",
        "comm": f"{statistics.average_sync_time_ms:.0f} ms",
        "exposed": f"{1e3 * statistics.total_exposed_time / max(1, steps):.0f} ms",
        "ratio": f"{statistics.compression_ratio_achieved:.2f}",
    }
    progress.show(report.step + 1, fields)


def summarize(
    losses: list[float],
    config: TrainingConfig,
    options: argparse.Namespace,
    *,
    counts: list[int],
    seconds: float,
    least: int,
) -> Summary:
    """Return the figures of the distributed part; ``least`` is what uncompressed gradients would send in a step."""
    ranks, sent = len(counts), sum(counts) // len(counts)
    return Summary(
        ranks=ranks,
        steps=config.steps,
        first_loss=losses[0],
        last_loss=losses[-1],
        bytes_sent_per_rank=sent,
        compression_ratio=compression_ratio(
            ranks=ranks,
            least_bytes=least,
            steps=config.steps,
            sent=sent,
            is_exact=options.codec == "none" and options.sync == "sync",
        ),
        codec=options.codec,
        sync=options.sync,
        seconds=seconds,
        tokens_per_second=config.tokens * config.steps / seconds,
    )


def repeat_alone(config: TrainingConfig, batches: Batches, *, reporter: Reporter) -> list[float]:
    """Repeat the run in this process alone, each batch whole, and return the losses."""
    model = LanguageModel(config)
    losses: list[float] = []
    with open_progress(description="check in one process", total=config.steps, reporter=reporter) as progress:
        for step in range(config.steps):
            total = model.accumulate(batches.windows(step), scale=1.0 / config.tokens)
            model.update(step)
            losses.append(total / config.tokens)
            progress.show(step + 1, {"loss": f"{losses[-1]:.4f}"})
    return losses


def make_expectation(options: argparse.Namespace, config: TrainingConfig) -> Expectation:
    """Return what the checked run has to come to."""
    shapes = [parameter.value.shape for parameter in LanguageModel(config).model.parameters()]
    return expect(options.codec, parse_mode(options.sync), shapes=shapes, steps=config.steps)


def write_results(out: Path, summary: Summary, curves: dict[str, list[float]], options: argparse.Namespace) -> None:
    """Write summary.json, and loss.png where matplotlib is."""
    content = asdict(summary) | {"settings": vars(options), "losses": curves}
    (out / "summary.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    try:
        plot_losses(curves, out / "loss.png", title=f"{summary.ranks} ranks, codec {options.codec}, {options.sync}")
    except UsageError as error:
        print(f"no loss.png: {error}", file=sys.stderr)


def make_folder(path: Path) -> None:
    """Make the folder unless it exists.  Raises ``UsageError``, now and not at the end, when it takes no files."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"out: {path} cannot be made a folder: {error.strerror or error}") from error
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"out: no file can be made in {path}: {error.strerror or error}") from error


def refuse(error: UsageError) -> SystemExit:
    """Say what is wrong; return the exception that ends this rank with code 2.

    All ranks find the same.  So that it is said once, others wait for the launcher to end them after the first rank of
    their host has spoken.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PATIENCE)
    print(f"train_lm: {error}", file=sys.stderr)
    return SystemExit(2)


def main() -> None:
    """Train, check, write, and print the figures."""
    try:
        options = parse_arguments()
        config = make_config(options)
        make_compression(options)
        texts = read_texts(options)
        place = LaunchEnvironment.from_mapping(os.environ)
        split_rows(config.rows, rank=0, size=1 if place is None else place.world_size)
        make_folder(options.out)
    except UsageError as error:
        raise refuse(error) from None
    reporter = Reporter.from_environment(os.environ)
    run = ap.run(train(options, config, texts, reporter))
    if not run.is_first:
        return
    summary, curves, failure = run.summary, {f"{run.summary.ranks} ranks": run.losses}, None
    if options.check:
        curves["one process"] = repeat_alone(config, texts.training, reporter=reporter)
        summary = compare(summary, run.losses, curves["one process"])
        failure = find_fault(summary, make_expectation(options, config))
    write_results(options.out, summary, curves, options)
    print(json.dumps(asdict(summary)), flush=True)
    if failure is not None:
        raise SystemExit(f"train_lm: the check failed: {failure}")


if __name__ == "__main__":
    main()
