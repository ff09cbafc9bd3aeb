"""One rank of an elastic job for ``chaos.py``: trains a vector of any size, and logs what it sums up and commits."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import hashlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import asyncpar as ap
from asyncpar.elasticity.rounds import ElasticRound
from asyncpar.elasticity.step import ElasticStep
from asyncpar.nn.optimizers import SGD, Adam, Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.nn.stage import Stage
from asyncpar.parallel.local.outer import OuterConfig

HOLD_SECONDS = 4.0
_DRAWN = 1 << 16
"""Values of the gradient's pattern that are drawn; then it comes again."""

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "codec": {"codec": "int8", "residual_codec": "bf16"},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "diloco": {"outer": OuterConfig()},
    "pipeline": {},  # two stages, which it makes
}
"""What is given to ``job.state`` beside the model."""


def parse_arguments() -> argparse.Namespace:
    """Return the settings of the run; all but ``--log`` must be equal on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--portions", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=1.0, help="of parameters")
    parser.add_argument("--adam", action="store_true", help="Adam, with two states per value; else plain SGD")
    parser.add_argument("--compute", type=float, default=0.01, help="seconds that a portion takes")
    parser.add_argument("--mode", choices=MODES, default="plain")
    parser.add_argument("--lineages", action="store_true", help="log the digest of every step that is committed")
    parser.add_argument("--log", type=Path, required=True, help="{pid} in it is the number of the process")
    return parser.parse_args()


class Model:
    """A vector whose gradient depends on itself and on the portion's random numbers."""

    def __init__(self, options: argparse.Namespace) -> None:
        count = int(options.megabytes * (1 << 20) / 4)
        rng = np.random.default_rng(1)
        self.weight = Parameter("weight", rng.standard_normal(count, dtype=np.float32))
        self.pattern = np.resize(rng.standard_normal(min(count, _DRAWN), dtype=np.float32), count)
        self.gradient = np.empty_like(self.pattern)
        rule = Adam() if options.adam else SGD(momentum=0.9)
        self.optimizer = Optimizer([self.weight], rule)

    def backward(self, rng: np.random.Generator) -> float:
        """Compute gradient and loss of one portion."""
        seen = self.weight.value[:1024].sum(dtype=np.float64)
        scale = np.float32(rng.standard_normal() + np.tanh(seen))
        np.multiply(self.pattern, scale, out=self.gradient)
        return float(scale * seen)


class HalfOfVector(Stage[Any]):
    """A stage with half of the values, which scales a few numbers by what it has."""

    def __init__(self, name: str, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.weight = Parameter(name, rng.standard_normal(count, dtype=np.float32))
        self.pattern = rng.standard_normal(count, dtype=np.float32)

    def forward(self, x: Any) -> tuple[Any, Any]:
        scale = np.float32(1.0 + 0.1 * np.tanh(self.weight.value[:1024].sum(dtype=np.float64)))
        return x * scale, (x, scale)

    def backward(self, saved: Any, dy: Any, on_gradient: Any = None, deferred: Any = None) -> Any:
        del on_gradient, deferred
        x, scale = saved
        self.weight.accumulate(self.pattern * np.float32((dy * x).sum(dtype=np.float64)))
        return dy * scale

    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,)


def squares(output: Any, target: Any) -> tuple[float, Any]:
    """Return a loss and its gradient."""
    error = output - target
    return float((error.astype(np.float64) ** 2).sum()), 2 * error


class Log:
    """One JSON object per line; a line is written at once, so a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self.write("started", age=time.time() - psutil.Process().create_time())

    def write(self, kind: str, **content: Any) -> None:
        """Write a line."""
        self._file.write(json.dumps({"kind": kind, "time": time.monotonic(), **content}).encode() + b"\n")


async def train_rounds(options: argparse.Namespace, log: Log) -> None:
    """Train in rounds of four inner steps, with a quorum of all portions, and log the result."""
    model = Model(options)
    losses: list[float] = []
    async with ap.elastic(portions=options.portions, seed=3) as job:
        state = job.state([model.weight], model.optimizer, **MODES[options.mode])
        log.write("ready")
        async for current in job.rounds(state, steps=4, until=options.steps):
            async with current:
                for portion in current.portions:
                    with current.worker(portion) as worker:
                        for step in range(current.steps):
                            worker.loss += model.backward(current.rng(portion, step))
                            model.weight.grad = model.gradient
                            worker.optimizer.step(1e-3)
                            await asyncio.sleep(options.compute / current.steps)
            if current.is_committed:
                losses.append(current.loss)
                log_round(log, current, await lineage_of(state, options))
            if current.change is not None:
                generation, change = current.change.generation, str(current.change)
                log.write("change", step=current.number, generation=generation, change=change)
        if not job.is_drained:
            digest = hashlib.sha256(model.weight.value.tobytes()).hexdigest()
            lineage = await state.lineage()
            last = [losses[-1].hex()] if losses else []
            log.write("result", parameters=digest, lineage=lineage.digest.hex(), losses=last)


async def train_pipeline(options: argparse.Namespace, log: Log) -> None:
    """Train a pipeline of two stages, and log the result."""
    count = int(options.megabytes * (1 << 20) / 8)
    stages = [HalfOfVector("first", count, 1), HalfOfVector("second", count, 2)]
    parameters = [stage.weight for stage in stages]
    optimizer, digest = Optimizer(parameters, Adam() if options.adam else SGD(momentum=0.9)), ""
    async with ap.elastic(portions=options.portions, seed=3) as job:
        state = job.state(parameters, optimizer, pipeline=stages, losses=[])
        log.write("ready")
        async for step in job.steps(state, until=options.steps):
            async with step, begun(step.number, step.began_in, step.is_replay, log):

                def sample(portion: int, number: int = step.number) -> Any:
                    return np.random.default_rng([number, portion]).standard_normal(8, dtype=np.float32)

                await asyncio.sleep(options.compute * len(step.portions))
                if not step.is_replay:
                    is_first = job.rank % min(2, job.size) == 0  # each portion goes through two ranks
                    portions = [step.portions.start, step.portions.stop] if is_first else [0, 0]
                    log.write("summed", step=step.number, generation=step.began_in, portions=portions)
                gradients = await step.run_pipeline(sample, lambda portion: sample(portion) ** 2, squares, op="mean")
                await step.update(optimizer, gradients, learning_rate=1e-3)
                state["losses"].append(step.loss)
                if step.number == options.steps - 1 and not step.is_replay:
                    await step.gather()
                    digest = hashlib.sha256(b"".join(one.value.tobytes() for one in parameters)).hexdigest()
            if step.is_committed:
                log_commit(log, step, await lineage_of(state, options))
            if step.change is not None:
                log.write("change", step=step.number, generation=step.change.generation, change=str(step.change))
        if not job.is_drained:
            lineage = await state.lineage()
            losses = [value.hex() for value in state["losses"]]
            log.write("result", parameters=digest, lineage=lineage.digest.hex(), losses=losses)


async def lineage_of(state: Any, options: argparse.Namespace) -> dict[str, str]:
    """Return the digest of what is committed, if it is to be logged."""
    return {"lineage": (await state.lineage()).digest.hex()} if options.lineages else {}


@asynccontextmanager
async def begun(number: int, generation: int, is_replay: bool, log: Log) -> AsyncIterator[None]:
    """Note that a step is begun, and that it is interrupted by an error or cancelled."""
    if not is_replay:
        log.write("begun", step=number, generation=generation)
    try:
        yield
    except BaseException as error:
        log.write("interrupted", step=number, generation=generation, error=type(error).__name__)
        raise


def log_round(log: Log, current: ElasticRound, lineage: dict[str, str]) -> None:
    """Note a round that is committed, and how many portions were in it: which, a rank may not live to tell."""
    number, generation, is_replay = current.number, current.generation, current.is_replay
    contributed = current.contributed
    log.write("committed", step=number, generation=generation, replay=is_replay, contributed=contributed, **lineage)


def log_commit(log: Log, step: ElasticStep, lineage: dict[str, str]) -> None:
    """Note a step that is committed."""
    log.write("committed", step=step.number, generation=step.began_in, replay=step.is_replay, **lineage)


async def train(options: argparse.Namespace, log: Log) -> None:
    """Train, and log the result."""
    model, is_whole = Model(options), options.mode != "zero3"
    digest = ""
    async with ap.elastic(portions=options.portions, seed=3) as job:
        state = job.state([model.weight], model.optimizer, losses=[], **MODES[options.mode])
        log.write("ready")
        async for step in job.steps(state, until=options.steps):
            async with step, begun(step.number, step.began_in, step.is_replay, log):
                if not is_whole:
                    await step.gather()
                await one_step(step, model, state, options, log)
                if not is_whole and step.number == options.steps - 1 and not step.is_replay:
                    await step.gather()
                    digest = hashlib.sha256(model.weight.value.tobytes()).hexdigest()
            if step.is_committed:
                log_commit(log, step, await lineage_of(state, options))
            if step.change is not None:
                log.write("change", step=step.number, generation=step.change.generation, change=str(step.change))
        if not job.is_drained:
            if is_whole:
                digest = hashlib.sha256(model.weight.value.tobytes()).hexdigest()
            lineage = await state.lineage()
            losses = [value.hex() for value in state["losses"]]
            log.write("result", parameters=digest, lineage=lineage.digest.hex(), losses=losses)


async def one_step(step: ElasticStep, model: Model, state: Any, options: argparse.Namespace, log: Log) -> None:
    """Do one step."""
    for portion in step.portions:
        loss = model.backward(step.rng(portion))
        step.add(portion, [model.gradient], loss=loss)
        await asyncio.sleep(options.compute)
    if not step.is_replay:
        log.write(
            "summed", step=step.number, generation=step.began_in, portions=[step.portions.start, step.portions.stop]
        )
    gradients = await step.reduce("mean")
    await step.update(model.optimizer, gradients, learning_rate=1e-3)
    state["losses"].append(step.loss)
    if options.lineages:  # which are of all losses: keep the state small in runs of many steps
        del state["losses"][:-100]


def hold_interpreter(*_: object) -> None:
    """Let no other thread of this process run Python for a while, as an extension does that forgets the GIL."""
    ctypes.PyDLL(None).usleep(int(HOLD_SECONDS * 1e6))  # PyDLL, not CDLL: it keeps the GIL


def main() -> None:
    """Run one rank.  SIGUSR1 lets it hold the GIL for ``HOLD_SECONDS``."""
    options = parse_arguments()
    signal.signal(signal.SIGUSR1, hold_interpreter)
    work = {"diloco": train_rounds, "pipeline": train_pipeline}.get(options.mode, train)
    ap.run(work(options, Log(Path(str(options.log).replace("{pid}", str(os.getpid()))))))


if __name__ == "__main__":
    main()
