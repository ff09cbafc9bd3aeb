"""The data-parallel training loop of one rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.nn import OnGradient
from asyncpar.train.batches import Batches, split_rows
from asyncpar.train.language_model import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step came to.  ``loss`` is the mean over the whole batch, equal on all ranks."""

    step: int
    loss: float
    seconds: float


class DataParallelTrainer:
    """Trains replicas of a language model, each on its rows of every batch.

    Compute runs in one worker thread, so that the loop moves data meanwhile; gradients are synchronized as the backward
    pass finishes them.
    """

    def __init__(
        self,
        model: LanguageModel,
        batches: Batches,
        *,
        communicator: Communicator,
        synchronizer: GradientSynchronizer,
    ) -> None:
        if batches.rows != model.config.rows or batches.length != model.config.model.length:
            raise UsageError("batches: expected the batch and the window length of the model's configuration")
        self._model = model
        self._batches = batches
        self._communicator = communicator
        self._synchronizer = synchronizer
        self._rows = split_rows(batches.rows, rank=communicator.rank, size=communicator.size)
        self._scale = communicator.size / batches.tokens

    async def run(self) -> AsyncGenerator[StepReport, None]:
        """Yield a report after each step."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="compute") as worker:
            for step in range(self._model.config.steps):
                start = loop.time()
                loss = await self._step(step, worker)
                yield StepReport(step=step, loss=loss, seconds=loop.time() - start)

    async def check_replicas(self) -> None:
        """Raise ``AsyncparError`` unless the parameters of all ranks are equal to the last bit."""
        digests = await self._communicator.all_gather_object(self._model.digest())
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise AsyncparError(f"parameters of ranks {different} differ from those of rank 0 after training")

    async def _step(self, step: int, worker: ThreadPoolExecutor) -> float:
        loop = asyncio.get_running_loop()
        async with self._synchronizer.step(self._model.model.parameters()) as synchronization:
            total = await loop.run_in_executor(worker, self._compute, step, synchronization.ready)
            losses = np.array([total], np.float64)
            await self._communicator.all_reduce(losses, key="loss")
        await loop.run_in_executor(worker, self._model.update, step)
        return float(losses[0]) / self._batches.tokens

    def _compute(self, step: int, on_gradient: OnGradient) -> float:
        """Compute this rank's gradients, scaled so that their *mean* over ranks is that of the whole batch's mean."""
        windows = self._batches.windows(step, self._rows)
        return self._model.accumulate(windows, scale=self._scale, on_gradient=on_gradient)
