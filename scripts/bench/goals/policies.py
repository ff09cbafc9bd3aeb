"""Train with one rank three times slower at random, and wait for it, or go on without it: losses and throughput.

    scripts/bench/run policies
    scripts/bench/run policies --steps 60 --modes wait,quorum:0.75,local:10

Ranks run in one process on virtual time, where computing a step takes a second, or ``--slower`` of them on one rank
that is drawn anew for every step; so times say what waiting costs, and nothing else, and every run of a seed is the
same.  What is trained is real: the language model of ``train_lm.py``, small, each rank on its rows of every batch.
Modes:

- ``wait``: ``all_reduce`` of all ranks in every step.
- ``quorum:F``, ``deadline:S``: ``all_reduce(until=Quorum(F))`` or ``Deadline(S)``; with ``/next`` behind it late parts
  are added to the next ones, else dropped.  A rank that is behind takes the results that it has missed without
  computing.
- ``local:H``: steps of its own on each rank, and the mean of all parameters every H steps.

The held-out loss is that of rank 0's model after all steps, over the same windows for all.  The last line on stdout is
one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
from numpy.typing import NDArray

import asyncpar as ap
from asyncpar.nn import TransformerConfig, WarmupCosine
from asyncpar.nn.optimizers import AdamW
from asyncpar.testing import local_world, run_virtual
from asyncpar.train import Batches, LanguageModel, TrainingConfig
from asyncpar.train.language_model import split_rows

MODES = "wait,quorum:0.75,quorum:0.75/next,deadline:1.5,deadline:1.5/next,local:10,local:20"
_LENGTH = 32
_HELD_OUT_STEPS = range(1_000_000, 1_000_008)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a mode comes to."""

    mode: str
    seconds: float
    steps_per_second: float
    held_out_loss: float
    parts: float
    """The fraction of all parts that were in a result."""


class Worker:
    """One rank of a run."""

    def __init__(self, node: ap.Node, options: argparse.Namespace, corpus: NDArray[np.uint8]) -> None:
        self.world = node.world
        self.options = options
        config = TrainingConfig(
            model=TransformerConfig(length=_LENGTH, features=options.dim, layers=2, heads=2, seed=0),
            rule=AdamW(beta1=0.4, beta2=0.999, epsilon=1e-5),
            schedule=WarmupCosine(peak=2.5e-3, steps=options.steps, warmup=min(40, options.steps // 4), floor=0.01),
            steps=options.steps,
            rows=options.batch,
        )
        self.model = LanguageModel(config)
        self.batches = Batches(corpus, rows=options.batch, length=_LENGTH, seed=1)
        self._rows = split_rows(options.batch, rank=self.world.rank, size=self.world.size)
        self._draws = np.random.default_rng(options.seed).integers(0, self.world.size, options.steps)
        self.contributed = 0

    async def compute(self, step: int) -> None:
        """Compute the gradients of this rank's rows; that takes its time."""
        scale = self.world.size / self.batches.tokens
        self.model.accumulate(self.batches.windows(step, self._rows), scale=scale)
        await asyncio.sleep(self.options.slower if self._draws[step] == self.world.rank else 1.0)

    async def run(self, mode: str) -> None:
        """Train."""
        kind, _, rest = mode.partition(":")
        argument, _, late = rest.partition("/")
        if kind == "local":
            await self._train_apart(int(argument))
        elif kind == "wait":
            await self._train(None, "drop")
        else:
            until = ap.Quorum(float(argument)) if kind == "quorum" else ap.Deadline(float(argument))
            await self._train(until, late or "drop")

    async def _train(self, until: Any, late: Any) -> None:
        parameters = self.model.model.parameters()
        behind = 0
        for step in range(self.options.steps):
            if behind == 0:
                await self.compute(step)
                flat = np.concatenate([parameter.grad.reshape(-1) for parameter in parameters])
            else:
                flat = np.zeros(sum(parameter.size for parameter in parameters), np.float32)
            if until is None:
                await self.world.all_reduce(flat, "mean")
                self.contributed += 1
            else:
                result = await self.world.all_reduce(flat, "mean", until=until, late=late)
                behind, self.contributed = result.behind, self.contributed + (not result.was_late)
            start = 0
            for parameter in parameters:
                parameter.grad[...] = flat[start : start + parameter.size].reshape(parameter.shape)
                start += parameter.size
            self.model.update(step)

    async def _train_apart(self, every: int) -> None:
        parameters = self.model.model.parameters()
        for step in range(self.options.steps):
            await self.compute(step)
            self.model.update(step)
            self.contributed += 1
            if (step + 1) % every == 0 or step + 1 == self.options.steps:
                await self.world.all_reduce_many([parameter.value for parameter in parameters], "mean")

    def held_out_loss(self) -> float:
        """Return the mean loss over windows that no step has."""
        return float(np.mean([self.model.evaluate(self.batches.windows(step)) for step in _HELD_OUT_STEPS]))


def parse_arguments() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--slower", type=float, default=3.0, help="seconds of a step of the slow rank (default: 3)")
    parser.add_argument("--modes", default=MODES, help=f"(default: {MODES})")
    parser.add_argument("--dim", type=int, default=32, help="features of the model (default: 32)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a batch (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures into this file, too")
    return parser.parse_args()


def measure(mode: str, options: argparse.Namespace, corpus: NDArray[np.uint8]) -> Outcome:
    """Train once, on virtual time.  Raises ``SystemExit`` where ranks end with different parameters."""

    async def main() -> Outcome:
        async with local_world(options.ranks) as nodes:
            workers = [Worker(node, options, corpus) for node in nodes]
            loop = asyncio.get_running_loop()
            begun = loop.time()
            await asyncio.gather(*(worker.run(mode) for worker in workers))
            seconds = loop.time() - begun
            if len({worker.model.digest() for worker in workers}) != 1:
                raise SystemExit(f"policies: {mode}: parameters of ranks differ")
            parts = sum(worker.contributed for worker in workers) / (options.ranks * options.steps)
            return Outcome(mode, seconds, options.steps / seconds, workers[0].held_out_loss(), parts)

    return run_virtual(main())


def verdict(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Return by mode how many times as quick as ``wait`` it is, its loss to that of ``wait``, and the parts used."""
    base = next((one for one in outcomes if one.mode == "wait"), outcomes[0])
    return {
        one.mode: {
            "speedup": round(base.seconds / one.seconds, 3),
            "loss": round(one.held_out_loss / base.held_out_loss, 4),
            "parts": round(one.parts, 4),
        }
        for one in outcomes
    }


def show(outcomes: Sequence[Outcome]) -> str:
    """Return a table, in which ``wait`` is what others are compared with, if it is there."""
    base = next((one.seconds for one in outcomes if one.mode == "wait"), outcomes[0].seconds)
    lines = [
        "| mode | seconds | steps/s | speed-up | held-out loss | parts used |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| `{one.mode}` | {one.seconds:.0f} | {one.steps_per_second:.3f} | {base / one.seconds:.2f} | "
        f"{one.held_out_loss:.4f} | {one.parts:.1%} |"
        for one in outcomes
    ]
    return "\n".join(lines)


def main() -> None:
    """Train in every mode and show what came out."""
    options = parse_arguments()
    text = "".join(path.read_text() for path in sorted((Path(__file__).resolve().parents[3] / "docs").glob("*.md")))
    corpus = np.frombuffer(text.encode(), np.uint8)
    outcomes: list[Outcome] = []
    for mode in options.modes.split(","):
        outcomes.append(measure(mode, options, corpus))
        sys.stderr.write(f"{outcomes[-1]}\n")
    sys.stdout.write(
        f"{options.ranks} ranks, {options.steps} steps, one rank of each step {options.slower:g} times slower:\n\n"
        f"{show(outcomes)}\n"
    )
    sys.stdout.write(f"{json.dumps(verdict(outcomes))}\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
