"""The training loop of ranks that do not wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.parallel import SynchronizationMode
from asyncpar.parallel.gossip import UpdateGossip
from asyncpar.train.batches import Batches
from asyncpar.train.language_model import LanguageModel
from asyncpar.train.replica import Replica, StepReport


class FreeTrainer:
    """Trains replicas that exchange what their optimizers change, each weighted by 1 / ranks, as ``mode`` says.

    At the end all ranks have all updates, and equal parameters.
    """

    def __init__(
        self, model: LanguageModel, batches: Batches, *, communicator: Communicator, mode: SynchronizationMode
    ) -> None:
        self._replica = Replica(model, batches, communicator)
        self._communicator = communicator
        self._mode = mode

    async def run(self) -> AsyncGenerator[StepReport, None]:
        """Yield all reports at the end: before that, to ask the others for their losses would be to wait for them."""
        loop, replica = asyncio.get_running_loop(), self._replica
        losses, seconds = np.zeros(replica.steps), np.zeros(replica.steps)
        with replica.at_work():
            async with self._exchanging() as gossip:
                for step in range(replica.steps):
                    start = loop.time()
                    await gossip.begin_step(replica.worker)
                    losses[step] = await replica.compute(step)
                    await gossip.update(partial(replica.model.update, step), replica.worker)
                    seconds[step] = loop.time() - start
                await gossip.settle(replica.worker)
        await self._communicator.all_reduce(losses, key="losses")
        for step in range(replica.steps):
            loss = float(losses[step]) / replica.batches.tokens
            yield StepReport(step=step, loss=loss, seconds=float(seconds[step]))

    async def check_replicas(self) -> None:
        """Raise ``AsyncparError`` unless the parameters of all ranks are equal to the last bit."""
        await self._replica.check_equal()

    @asynccontextmanager
    async def _exchanging(self) -> AsyncIterator[UpdateGossip]:
        """Exchange updates in the block; an error in it tells the other ranks that this one is out."""
        gossip = UpdateGossip(self._replica.parameters, self._communicator, self._mode, key="updates")
        await gossip.start()
        has_ended = False
        try:
            yield gossip
            has_ended = True
        finally:
            await gossip.close(failed=not has_ended)
