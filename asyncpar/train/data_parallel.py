"""The data-parallel training loop of one rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.train.batches import Batches
from asyncpar.train.language_model import LanguageModel
from asyncpar.train.replica import Replica, StepReport


class DataParallelTrainer:
    """Trains replicas of a language model, each on its rows of every batch.

    Gradients are synchronized in every step, as the backward pass finishes them.
    """

    def __init__(
        self,
        model: LanguageModel,
        batches: Batches,
        *,
        communicator: Communicator,
        synchronizer: GradientSynchronizer,
    ) -> None:
        self._replica = Replica(model, batches, communicator)
        self._communicator = communicator
        self._synchronizer = synchronizer

    async def run(self) -> AsyncGenerator[StepReport, None]:
        """Yield a report after each step."""
        loop = asyncio.get_running_loop()
        with self._replica.at_work():
            for step in range(self._replica.steps):
                start = loop.time()
                loss = await self._step(step)
                yield StepReport(step=step, loss=loss, seconds=loop.time() - start)

    async def check_replicas(self) -> None:
        """Raise ``AsyncparError`` unless the parameters of all ranks are equal to the last bit."""
        await self._replica.check_equal()

    async def _step(self, step: int) -> float:
        replica = self._replica
        async with self._synchronizer.step(replica.parameters) as synchronization:
            losses = np.array([await replica.compute(step, synchronization.ready)], np.float64)
            await self._communicator.all_reduce(losses, key="loss")
        await replica.update(step)
        return float(losses[0]) / replica.batches.tokens
