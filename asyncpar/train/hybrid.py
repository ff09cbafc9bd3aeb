"""The training loop of a language model in three dimensions, with checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from asyncpar.checkpoint import latest
from asyncpar.checkpoint.plain import first_difference
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.hybrid import HybridConfig, StepResult, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.hybrid.monitor import render_report
from asyncpar.train.language_model import Batches, TrainingConfig, Windows, split_rows
from asyncpar.train.replica import StepReport
from asyncpar.train.texts import EVALUATION_BATCHES


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The folder of checkpoints, and the steps between them; one follows the last step.  The last ``keep`` stay."""

    folder: Path
    every: int = 50
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise UsageError(f"checkpoint: expected every and keep of at least 1, got {self.every}, {self.keep}")


class HybridTrainer:
    """Trains over all ranks of a world; each replica has its rows of every batch, in micro-batches.

    With ``checkpoints`` it continues from the latest in their folder, of a run with equal settings in any layout:
    ``losses`` has those of the finished steps.  The run may be longer than that of the checkpoint; its steps have the
    learning rates of the longer schedule from there on.
    """

    def __init__(
        self,
        training: TrainingConfig,
        batches: Batches,
        coordinator: ThreeDParallelismCoordinator,
        checkpoints: Checkpoints | None,
    ) -> None:
        self._training = training
        self._batches = batches
        self._coordinator = coordinator
        self._checkpoints = checkpoints
        mapping, replicas = coordinator.groups.mapping, coordinator.config.parallelism.dp_size
        self._rows = split_rows(batches.rows, rank=mapping.dp_rank, size=replicas)
        self.losses: list[float] = []
        self.has_new_schedule = False
        """Whether the first steps, those of a checkpoint, were made with another schedule."""
        self.last: StepResult | None = None

    @classmethod
    async def create(
        cls,
        training: TrainingConfig,
        config: HybridConfig,
        batches: Batches,
        *,
        communicator: Communicator,
        checkpoints: Checkpoints | None,
    ) -> Self:
        """Build this rank's part, and load a checkpoint if there is one.  All ranks call it."""
        model = TransformerModel(config=training.model)
        coordinator = await ThreeDParallelismCoordinator.create(config, model, communicator)
        trainer = cls(training, batches, coordinator, checkpoints)
        try:
            await trainer._resume()
        except BaseException:
            await coordinator.close()
            raise
        return trainer

    async def run(self) -> AsyncGenerator[StepReport, None]:
        """Yield a report after each remaining step."""
        coordinator, training = self._coordinator, self._training
        while coordinator.steps < training.steps:
            step = coordinator.steps
            windows = self._windows(self._batches.windows(step, self._rows))
            result = await coordinator.train_step(
                _inputs(windows), _targets(windows), learning_rate=training.schedule(step)
            )
            self.last = result
            self.losses.append(result.loss)
            await self._save()
            yield StepReport(step=step, loss=result.loss, seconds=result.seconds)

    async def check_replicas(self) -> None:
        """Raise ``AsyncparError`` unless everything replicated is equal to the last bit."""
        if self._coordinator.config.zero.stage.shards_states:
            return  # replicated values are gathered from their owner after every step
        digests = await self._coordinator.groups.dp.all_gather_object(self._digest())
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise AsyncparError(f"parameters of replicas {different} differ from those of replica 0 after training")

    async def evaluate(self, batches: Batches, *, count: int = EVALUATION_BATCHES) -> float:
        """Return the mean loss over the first ``count`` batches; all ranks call it."""
        mapping, replicas = self._coordinator.groups.mapping, self._coordinator.config.parallelism.dp_size
        rows = split_rows(batches.rows, rank=mapping.dp_rank, size=replicas)
        losses = []
        for index in range(count):
            windows = self._windows(batches.windows(index, rows))
            losses.append(await self._coordinator.evaluate(_inputs(windows), _targets(windows)))
        return sum(losses) / len(losses)

    async def report(self, *, width: int) -> str:
        """Return the distribution of all ranks' time, as text for people; all ranks call it."""
        return render_report(await self._coordinator.get_performance_stats(), width=width)

    async def close(self) -> None:
        """Free everything."""
        await self._coordinator.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _windows(self, windows: Windows) -> Sequence[Windows]:
        return np.array_split(windows, self._coordinator.config.micro_batches)

    async def _save(self) -> None:
        checkpoints, done = self._checkpoints, self._coordinator.steps
        if checkpoints is not None and (done % checkpoints.every == 0 or done == self._training.steps):
            training = self._training
            extra = {"losses": self.losses, "training": training.lasting(), "schedule": str(training.schedule)}
            await self._coordinator.save(checkpoints.folder, extra=extra, keep=checkpoints.keep)

    async def _resume(self) -> None:
        if self._checkpoints is None:
            return
        folder = self._checkpoints.folder
        found = folder.exists() and latest(folder) is not None
        everyone = await self._coordinator.groups.world.all_gather_object(found, key="train/found", wanted=bool)
        if not any(everyone):
            return
        if not all(everyone):
            raise UsageError(
                f"checkpoint: expected {self._checkpoints.folder} to be one folder for all ranks, but rank "
                f"{everyone.index(False)} finds no checkpoint in it and rank {everyone.index(True)} does"
            )
        extra: dict[str, Any] = await self._coordinator.load(self._checkpoints.folder)
        sides = "the checkpoint", "this run"
        difference = first_difference(extra["training"], self._training.lasting(), "training", sides)
        if difference is not None:
            raise UsageError(
                f"checkpoint: {self._checkpoints.folder} is of a run with other settings: {difference}; set it as it "
                "was, or choose another folder"
            )
        self.losses = [float(loss) for loss in extra["losses"]]
        self.has_new_schedule = extra["schedule"] != str(self._training.schedule)

    def _digest(self) -> str:
        hasher = hashlib.sha256()
        for piece in self._coordinator.pieces():
            hasher.update(piece.array.tobytes())
        return hasher.hexdigest()


def _inputs(windows: Sequence[Windows]) -> list[Windows]:
    return [part[:, :-1] for part in windows]


def _targets(windows: Sequence[Windows]) -> list[Windows]:
    return [part[:, 1:] for part in windows]
