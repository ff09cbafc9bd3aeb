"""A training run with any trainer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import least_bytes
from asyncpar.train.hybrid import HybridTrainer
from asyncpar.train.language_model import Batches, LanguageModel
from asyncpar.train.replica import StepReport
from asyncpar.train.setup import Setup
from asyncpar.train.texts import evaluate


class Session(ABC):
    """The interface of a training run.  All ranks call the coroutines together."""

    layout: str = ""
    """Description of the layout over ranks, if that is not data parallelism alone."""

    losses: Sequence[float] = ()
    """The losses of the steps of an earlier run."""

    has_new_schedule: bool = False
    """Whether that run had another schedule of learning rates, for example because it was shorter."""

    @abstractmethod
    def run(self) -> AsyncGenerator[StepReport, None]:
        """Yield a report after each step."""

    @abstractmethod
    async def check_replicas(self) -> None:
        """Raise ``AsyncparError`` unless everything replicated is equal to the last bit."""

    @abstractmethod
    async def evaluate(self, batches: Batches) -> float:
        """Return the mean loss on held-out text."""

    @abstractmethod
    def figures(self) -> Mapping[str, str]:
        """Return the costs of the last steps, for people."""

    @property
    @abstractmethod
    def least_bytes(self) -> int | None:
        """Bytes that a rank would send per step for uncompressed gradients; None if steps send more than gradients."""

    def residual_norm(self) -> float | None:
        """Return the norm of the residuals of error feedback; None without it."""
        return None

    async def report(self, *, width: int) -> str:  # noqa: ARG002
        """Return the distribution of time, as text for people; empty if there is nothing to report."""
        return ""

    async def close(self) -> None:  # noqa: B027
        """Free the resources of the run."""


class ReplicatedSession(Session):
    """A run in which every rank has the whole ``model``."""

    def __init__(self, setup: Setup, model: LanguageModel, communicator: Communicator, *, has_codec: bool) -> None:
        self._setup = setup
        self._model = model
        self._communicator = communicator
        self._has_codec = has_codec

    def run(self) -> AsyncGenerator[StepReport, None]:
        return self._setup.trainer.run()

    async def check_replicas(self) -> None:
        await self._setup.trainer.check_replicas()

    async def evaluate(self, batches: Batches) -> float:
        """Compute the mean loss on rank 0, as all ranks have the same model."""
        loss = 0.0
        if self._communicator.rank == 0:
            loss = await asyncio.to_thread(evaluate, self._model, batches)
        shared: float = await self._communicator.broadcast_object(loss, key="train/held_out", wanted=float)
        return shared

    async def report(self, *, width: int) -> str:  # noqa: ARG002
        """Return the findings of tuning; empty without tuning."""
        return "" if self._setup.synchronizer is None else self._setup.synchronizer.tuning_table()

    def figures(self) -> Mapping[str, str]:
        statistics = self._setup.statistics()
        steps = statistics.total_sync_operations
        return {
            "comm": f"{statistics.average_sync_time_ms:.0f} ms",
            "exposed": f"{1e3 * statistics.total_exposed_time / max(1, steps):.0f} ms",
            "ratio": f"{statistics.compression_ratio_achieved:.2f}",
        }

    @property
    def least_bytes(self) -> int:
        size = sum(parameter.grad.nbytes for parameter in self._model.model.parameters())
        return least_bytes(size, self._communicator)

    def residual_norm(self) -> float | None:
        return self._setup.statistics().residual_norm if self._has_codec else None


class HybridSession(Session):
    """A run in which ranks have parts of the model."""

    least_bytes = None

    def __init__(self, trainer: HybridTrainer, *, layout: str) -> None:
        self._trainer = trainer
        self.layout = layout
        self.losses = tuple(trainer.losses)
        self.has_new_schedule = trainer.has_new_schedule

    def run(self) -> AsyncGenerator[StepReport, None]:
        return self._trainer.run()

    async def check_replicas(self) -> None:
        await self._trainer.check_replicas()

    async def evaluate(self, batches: Batches) -> float:
        return await self._trainer.evaluate(batches)

    def figures(self) -> Mapping[str, str]:
        last = self._trainer.last
        if last is None:
            return {}
        figures = {"norm": f"{last.gradient_norm:.3g}", "wait": f"{1e3 * last.pipeline.seconds_waiting:.0f} ms"}
        return {**figures, "skipped": last.why} if last.is_skipped else figures

    async def report(self, *, width: int) -> str:
        return await self._trainer.report(width=width)

    async def close(self) -> None:
        await self._trainer.close()
