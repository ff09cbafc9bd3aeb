"""Train a byte-level transformer on real text over several ranks, and check it against one process.

    asyncpar launch --nproc-per-node 4 scripts/examples/train_lm.py --check
    asyncpar launch --nproc-per-node 4 scripts/examples/train_lm.py --dp 2 --pp 2 --zero 1 --check
    asyncpar launch --nproc-per-node 4 scripts/examples/train_lm.py --codec int8 --sync diloco:20:0.7:0.7
    python scripts/examples/train_lm.py --steps 20

Without a launcher it trains alone.  The last two lines on stdout are a sentence and one JSON object with the figures
of the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import asyncpar as ap
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.rank_place import find_rank_place
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientBucketingConfig
from asyncpar.hybrid import Precision, TransformerModel
from asyncpar.observe import Progress
from asyncpar.pipeline import simulate
from asyncpar.train import (
    Batches,
    Expectation,
    HybridSession,
    HybridTrainer,
    LanguageModel,
    ReplicatedSession,
    Session,
    StepReport,
    Summary,
    Texts,
    TrainingConfig,
    compare,
    compression_ratio,
    expect,
    find_fault,
    is_hybrid,
    make_checkpoints,
    make_compression,
    make_config,
    make_layout,
    make_texts,
    make_trainer,
    parse_arguments,
    parse_mode,
    plot_losses,
    read_corpus,
    split_rows,
    standard_library_text,
)

LIBRARY_BYTES = 4 << 20
PATIENCE = 5.0
"""Seconds within which the launcher ends the other ranks after one has failed."""

HALF_TOLERANCE = 0.03
"""By which the last loss may differ where parameters and gradients are stored in half precision."""

LEAST_WINDOWS = 16
"""A text shorter than this many windows is too short to learn anything from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the distributed part hands over: its losses, its figures, and whether this rank tells about it."""

    losses: list[float]
    summary: Summary
    is_first: bool


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


async def train(options: argparse.Namespace, config: TrainingConfig, texts: Texts) -> Run:
    """Train on all ranks together."""
    async with ap.init() as node:
        communicator = node.world
        await check_same_text(communicator, texts.training)
        session = await make_session(options, config, texts, node)
        if options.check and session.has_new_schedule:
            await session.close()
            done = len(session.losses)
            raise UsageError(f"--check: the first {done} steps had another schedule, of other --steps; leave it out")
        await communicator.barrier()
        losses = list(session.losses)
        sent, start = node.bytes_sent, time.perf_counter()
        is_first = communicator.rank == 0
        with ap.progress("train", config.steps) as progress:
            async with aclosing(session.run()) as reports:
                async for report in reports:
                    losses.append(report.loss)
                    show(progress, report, config, session)
        sent, seconds = node.bytes_sent - sent, time.perf_counter() - start
        await session.check_replicas()
        counts = await communicator.all_gather_object(sent)
        summary = summarize(losses, config, options, counts=counts, seconds=seconds, session=session)
        if texts.held_out is not None:
            summary = replace(summary, held_out_loss=await session.evaluate(texts.held_out))
        report_text = ""
        if len(losses) > len(session.losses):
            report_text = await session.report(width=min(100, shutil.get_terminal_size().columns))
        if report_text and is_first:
            print(report_text, file=sys.stderr)
        await session.close()
        return Run(losses=losses, summary=summary, is_first=is_first)


async def make_session(options: argparse.Namespace, config: TrainingConfig, texts: Texts, node: ap.Node) -> Session:
    """Return the run that ``options`` ask for."""
    compression, bucketing = make_compression(options), GradientBucketingConfig(bucket_size_mb=options.bucket_mb)
    if not is_hybrid(options):
        model = LanguageModel(config)
        setup = make_trainer(
            parse_mode(options.sync), model, texts.training, node=node, compression=compression, bucketing=bucketing
        )
        return ReplicatedSession(setup, model, node.world, has_codec=options.codec != "none")
    layout = make_layout(options)
    trainer = await HybridTrainer.create(
        config,
        layout.make_config(config, world_size=node.world.size, compression=compression, bucketing=bucketing),
        texts.training,
        communicator=node.world,
        checkpoints=make_checkpoints(options),
    )
    return HybridSession(trainer, layout=layout.describe(node.world.size))


def check_layout(options: argparse.Namespace, config: TrainingConfig, *, world_size: int) -> None:
    """Raise ``UsageError``, before anything starts, for a run that cannot be spread over so many ranks."""
    layout = make_layout(options)
    split_rows(config.rows, rank=0, size=layout.replicas(world_size))
    if is_hybrid(options):
        compression, bucketing = make_compression(options), GradientBucketingConfig(bucket_size_mb=options.bucket_mb)
        made = layout.make_config(config, world_size=world_size, compression=compression, bucketing=bucketing)
        TransformerModel(config=config.model).check(made.parallelism)
        simulate(made.make_schedule())
        make_checkpoints(options)


async def check_same_text(communicator: Communicator, batches: Batches) -> None:
    """Raise ``UsageError`` that names the first rank whose text differs."""
    digests = await communicator.all_gather_object(hashlib.sha256(batches.corpus.data).hexdigest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UsageError(f"text: expected the same bytes on all ranks, but rank {rank} has others than rank 0")


def show(progress: Progress, report: StepReport, config: TrainingConfig, session: Session) -> None:
    """Show a step."""
    fields = {"loss": f"{report.loss:.4f}", "bytes/s": f"{config.tokens / report.seconds:,.0f}", **session.figures()}
    progress.show(report.step + 1, **fields)


def summarize(
    losses: list[float],
    config: TrainingConfig,
    options: argparse.Namespace,
    *,
    counts: list[int],
    seconds: float,
    session: Session,
) -> Summary:
    """Return the figures of the distributed part."""
    ranks, sent, done = len(counts), sum(counts) // len(counts), len(losses) - len(session.losses)
    ratio = None
    if session.least_bytes is not None:
        ratio = compression_ratio(
            ranks=ranks,
            least_bytes=session.least_bytes,
            steps=config.steps,
            sent=sent,
            is_exact=options.codec == "none" and options.sync == "sync",
        )
    return Summary(
        ranks=ranks,
        steps=config.steps,
        first_loss=losses[0],
        last_loss=losses[-1],
        bytes_sent_per_rank=sent,
        compression_ratio=ratio,
        codec=options.codec,
        sync=options.sync,
        layout=session.layout,
        residual_norm=session.residual_norm(),
        seconds=seconds,
        tokens_per_second=config.tokens * done / seconds,
    )


def repeat_alone(config: TrainingConfig, batches: Batches) -> list[float]:
    """Repeat the run in this process alone, each batch whole, and return the losses."""
    model = LanguageModel(config)
    losses: list[float] = []
    with ap.progress("check in one process", config.steps) as progress:
        for step in range(config.steps):
            total = model.accumulate(batches.windows(step), scale=1.0 / config.tokens)
            model.update(step)
            losses.append(total / config.tokens)
            progress.show(step + 1, loss=f"{losses[-1]:.4f}")
    return losses


def make_expectation(options: argparse.Namespace, config: TrainingConfig) -> Expectation:
    """Return what the checked run has to come to."""
    if make_layout(options).precision is not Precision.FULL:
        return Expectation(last_loss=HALF_TOLERANCE)
    shapes = [parameter.value.shape for parameter in LanguageModel(config).model.parameters()]
    return expect(options.codec, parse_mode(options.sync), shapes=shapes, steps=config.steps)


def write_results(out: Path, summary: Summary, curves: dict[str, list[float]], options: argparse.Namespace) -> None:
    """Write summary.json, and loss.png where matplotlib is."""
    content = asdict(summary) | {"settings": vars(options), "losses": curves}
    (out / "summary.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    print(f"wrote {out / 'summary.json'}", file=sys.stderr)
    try:
        plot_losses(
            curves,
            out / "loss.png",
            title=f"{summary.ranks} ranks, codec {options.codec}, {summary.layout or options.sync}",
        )
        print(f"wrote {out / 'loss.png'}", file=sys.stderr)
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
        place = LaunchEnvironment.from_mapping(os.environ) or find_rank_place(os.environ)
        check_layout(options, config, world_size=1 if place is None else place.world_size)
        make_folder(options.out)
    except UsageError as error:
        raise refuse(error) from None
    run = ap.run(train(options, config, texts))
    if not run.is_first:
        return
    summary, curves, failure = run.summary, {f"{run.summary.ranks} ranks": run.losses}, None
    if options.check:
        curves["one process"] = repeat_alone(config, texts.training)
        summary = compare(summary, run.losses, curves["one process"])
        failure = find_fault(summary, make_expectation(options, config))
    write_results(options.out, summary, curves, options)
    print(summary.describe())
    print(json.dumps(asdict(summary)), flush=True)
    if failure is not None:
        raise SystemExit(f"train_lm: the check failed: {failure}")


if __name__ == "__main__":
    main()
