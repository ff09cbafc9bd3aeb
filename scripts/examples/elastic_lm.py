"""Train the byte-level transformer of ``train_lm.py`` elastically: ranks may go and come, and no bit is different.

    python scripts/examples/elastic_lm.py --steps 40                 # alone
    python scripts/examples/elastic_lm.py --steps 120 --kill         # four ranks; one is killed, and comes again

With ``--kill`` this program launches the ranks (``asyncpar launch --elastic ranks``) and kills one in the middle, for
which the launcher starts another one.  It repeats the run undisturbed in one process, compares every byte of the
parameters and every loss, and draws the losses with the events into loss.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import asyncpar as ap
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.core.config.environment import ELASTIC_PIPE
from asyncpar.elasticity.step import ElasticStep
from asyncpar.errors import UsageError
from asyncpar.train import (
    Batches,
    LanguageModel,
    TrainingConfig,
    make_config,
    make_texts,
    parse_arguments,
    plot_losses,
    read_corpus,
    split_rows,
    standard_library_text,
)

LIBRARY_BYTES = 1 << 20
POLL = 0.05
MARK = "ELASTIC_LM_LOG"
"""The variable that tells a rank where to write how far it is, and what it has come to."""

WITHOUT_EFFECT = [
    "codec",
    "sync",
    "held_out",
    "dp",
    "tp",
    "pp",
    "schedule",
    "chunks",
    "zero",
    "micro_batches",
    "recompute",
    "precision",
    "bucket_mb",
    "tune",
    "check",
    "checkpoint",
    "checkpoint_every",
]
"""Options of ``train_lm.py`` that elastic ranks of this program have no use for."""


@dataclass
class Result:
    """What a run comes to."""

    losses: list[float] = field(default_factory=list)
    digest: str = ""
    changes: dict[int, str] = field(default_factory=dict)
    is_drained: bool = False
    """Did it come when all was over, or was asked to leave?"""


async def train(config: TrainingConfig, batches: Batches, portions: int, log: Path | None) -> Result:
    """Train in whatever world there is, and return what this rank saw."""
    language, result, thread = LanguageModel(config), Result(), WorkerThread("compute")
    task = "train" if ELASTIC_PIPE in os.environ else "train in one process"
    async with ap.elastic(portions=portions) as job:
        state = job.state(language.optimizer.parameters, language.optimizer, losses=[])
        with ap.progress(task, config.steps) as progress:
            async for step in job.steps(state, until=config.steps):
                async with step:
                    for portion in step.portions:
                        await thread.run(compute, language, batches, step, portion, portions)
                    gradients = await step.reduce()
                    rate = config.schedule(step.number)
                    await step.update(language.optimizer, gradients, learning_rate=rate, clip_norm=config.clip_norm)
                    state["losses"].append(step.loss / config.tokens)
                if step.is_committed:
                    progress.show(step.number + 1, loss=f"{step.loss / config.tokens:.4f}")
                    if log is not None:
                        log.with_suffix(".step").write_text(str(step.number))
                if step.change is not None:
                    result.changes[step.number] = str(step.change)
                    print(f"step {step.number}: {step.change}", file=sys.stderr)
        result.losses, result.digest = list(state["losses"]), language.digest()
        result.is_drained = job.is_drained
    thread.close()
    return result


def compute(language: LanguageModel, batches: Batches, step: ElasticStep, portion: int, portions: int) -> None:
    """Add the gradients of one portion: some rows of the batch."""
    rows = split_rows(batches.rows, rank=portion, size=portions)
    loss = language.accumulate(batches.windows(step.number, rows), scale=1.0 / batches.tokens)
    step.add(portion, {parameter.name: parameter.grad for parameter in language.optimizer.parameters}, loss=loss)


def run_rank(options: argparse.Namespace, portions: int) -> Result:
    """Run one rank, and write its result where ``MARK`` says."""
    config, log = make_config(options), os.environ.get(MARK)
    corpus = read_corpus(options.text or standard_library_text(), least=4096, most=LIBRARY_BYTES)
    texts = make_texts(corpus, rows=options.batch, length=options.seq, seed=options.seed, held_out=0.0)
    place = None if log is None else Path(log) / f"{os.getpid()}.json"
    result = ap.run(train(config, texts.training, portions, place))
    if place is not None:
        place.write_text(json.dumps(asdict(result)))
    return result


def read_result(path: Path) -> Result:
    """Read what a rank has come to."""
    found = json.loads(path.read_text())
    return Result(**{**found, "changes": {int(step): change for step, change in found["changes"].items()}})


class KilledRun:
    """Some ranks, of which one is killed in the middle, and one that comes for it."""

    def __init__(self, arguments: list[str], steps: int, ranks: int, folder: Path) -> None:
        self.ranks = ranks
        self._arguments = [str(Path(__file__).resolve()), *arguments]
        self._steps = steps
        self._folder = folder

    async def run(self) -> Result:
        """Return what the ranks come to, which must all have come to the same."""
        self._begin()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        options = ["--elastic", "ranks", "--nproc-per-node", str(self.ranks), "--max-restarts", "1"]
        launch = [sys.executable, "-m", "asyncpar", "launch", *options, "--rdzv-endpoint", f"127.0.0.1:{port}"]
        launcher = await asyncio.create_subprocess_exec(*launch, *self._arguments, env=self._environment)
        try:
            await self._reach(launcher, self._steps // 3)
            os.kill(self._pids[0], signal.SIGKILL)
            if await launcher.wait():
                raise SystemExit("elastic_lm: the ranks have failed")
        finally:
            if launcher.returncode is None:
                launcher.terminate()  # which ends its ranks, too
                await launcher.wait()
        results = [result for result in self._results if not result.is_drained]
        if len(results) < self.ranks:
            print("elastic_lm: the newcomer came when all was over; take more --steps", file=sys.stderr)
        if len({(tuple(result.losses), result.digest) for result in results}) != 1:
            raise SystemExit("elastic_lm: the ranks have not come to the same")
        return max(results, key=lambda result: len(result.changes))  # that of one that was there from the beginning

    async def run_undisturbed(self) -> Result:
        """Return what one process comes to, whose BLAS has as many threads as those of the ranks: bits depend on it."""
        self._begin()
        alone = await asyncio.create_subprocess_exec(sys.executable, *self._arguments, env=self._environment)
        if await alone.wait():
            raise SystemExit("elastic_lm: the undisturbed run has failed")
        (result,) = self._results
        return result

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, MARK: str(self._folder), "OMP_NUM_THREADS": "1"}

    def _begin(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    @property
    def _results(self) -> list[Result]:
        """The results of the ranks that have come to their end."""
        return [read_result(path) for path in sorted(self._folder.glob("*.json"))]

    @property
    def _pids(self) -> list[int]:
        """The ranks that have committed a step."""
        return sorted(int(path.stem) for path in self._folder.glob("*.step"))

    async def _reach(self, launcher: asyncio.subprocess.Process, step: int) -> None:
        """Return when all ranks have committed steps, and one of them has come to ``step``."""
        while len(self._pids) < self.ranks or not any(
            int(path.read_text() or -1) >= step for path in self._folder.glob("*.step")
        ):
            if launcher.returncode is not None:
                raise SystemExit("elastic_lm: the ranks have ended before one was killed; take more --steps")
            await asyncio.sleep(POLL)


def show_killed_run(options: argparse.Namespace, run: KilledRun) -> None:
    """Run with and without a kill, compare, and draw."""
    killed = asyncio.run(run.run())
    undisturbed = asyncio.run(run.run_undisturbed())
    is_equal = (killed.losses, killed.digest) == (undisturbed.losses, undisturbed.digest)
    title = f"one is killed, one comes: {'the same bytes' if is_equal else 'OTHER BYTES'}"
    curves = {"under faults": killed.losses, "undisturbed": undisturbed.losses}
    try:
        plot_losses(curves, options.out / "loss.png", title=title, events=killed.changes)
    except UsageError as error:
        print(f"no loss.png: {error}", file=sys.stderr)
    figures = {
        "steps": options.steps,
        "last_loss": killed.losses[-1],
        "parameters": killed.digest,
        "changes": killed.changes,
        "same_bytes": is_equal,
    }
    if is_equal:
        print(
            f"{run.ranks} ranks, one of them killed and replaced, and one undisturbed process agree: "
            f"all {len(killed.losses)} losses and every byte of the parameters are the same"
        )
    print(json.dumps(figures), flush=True)
    if not is_equal:
        raise SystemExit("elastic_lm: the run under faults has come to other bytes than the undisturbed one")


def parse_options() -> argparse.Namespace:
    """Return the options.  Raises ``UsageError`` for one that has no effect here."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--kill", action="store_true", help="launch ranks, kill one, and compare with an undisturbed run")
    own.add_argument("--portions", type=int, default=8, help="parts of a batch that ranks share out (default: 8)")
    own.add_argument("--ranks", type=int, default=4, help="with --kill: number at the start, 2 or more (default: 4)")
    description = "Train a byte-level transformer on text with ranks that may come and go."
    options = parse_arguments(description=description, parents=[own])
    defaults = parse_arguments([], parents=[own])
    for name in WITHOUT_EFFECT:
        if getattr(options, name) != getattr(defaults, name):
            raise UsageError(f"--{name.replace('_', '-')}: has no effect on elastic ranks here; leave it out")
    if options.kill and options.ranks < 2:
        raise UsageError(f"--ranks: expected 2 or more, of which one is killed, got {options.ranks}")
    options.kill = options.kill and MARK not in os.environ  # its own ranks have the same arguments
    return options


def main() -> None:
    """Train, or show that a kill changes nothing."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts/demo has no handler while modules are imported
    try:
        options = parse_options()
        if options.kill:
            show_killed_run(options, KilledRun(sys.argv[1:], options.steps, options.ranks, options.out / "elastic"))
            return
        result = run_rank(options, options.portions)
    except UsageError as error:
        print(f"elastic_lm: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    last_loss = result.losses[-1] if result.losses else None
    print(json.dumps({"steps": options.steps, "last_loss": last_loss, "parameters": result.digest}))


if __name__ == "__main__":
    main()
