"""The training loops of one rank: data parallel, local steps between synchronizations, and asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.parallel import SynchronizationMode
from asyncpar.parallel.gossip import UpdateGossip
from asyncpar.parallel.local import DiLoCo
from asyncpar.train.language_model import Batches, LanguageModel
from asyncpar.train.replica import BatchShare, StepReport


class DataParallelTrainer:
    """Trains replicas of a language model, each on its rows of every batch.

    Gradients are synchronized in every step, as the backward pass finishes them.  Without ``clip_norm`` the optimizer
    applies the known ones while the rest is in flight, with the same results.
    """

    def __init__(
        self,
        model: LanguageModel,
        batches: Batches,
        *,
        communicator: Communicator,
        synchronizer: GradientSynchronizer,
    ) -> None:
        self._replica = BatchShare(model, batches, communicator)
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
        update = replica.model.begin_update(step)
        async with self._synchronizer.step(replica.parameters, update=update) as synchronization:
            losses = np.array([await replica.compute(step, synchronization.ready)], np.float64)
            await self._communicator.all_reduce(losses, key="loss")
        if update is None:
            await replica.update(step)
        return float(losses[0]) / replica.batches.tokens


class LocalTrainer:
    """Trains replicas by ``rounds``: local SGD or DiLoCo over the model's parameters, each with its own AdamW.

    With ``inside`` the ranks that it joins, those of a host, synchronize their gradients in every step, so that hosts,
    instead of ranks, train on their own between rounds.  Between rounds nothing is sent to others, not even losses.
    """

    def __init__(
        self,
        model: LanguageModel,
        batches: Batches,
        *,
        communicator: Communicator,
        rounds: DiLoCo,
        inside: GradientSynchronizer | None = None,
    ) -> None:
        self._replica = BatchShare(model, batches, communicator)
        self._communicator = communicator
        self._rounds = rounds
        self._inside = inside

    async def run(self) -> AsyncGenerator[StepReport, None]:
        """Yield the reports of a round's steps after each round; the last step ends the last round."""
        loop = asyncio.get_running_loop()
        losses: list[float] = []
        seconds: list[float] = []
        with self._replica.at_work():
            for step in range(self._replica.steps):
                start = loop.time()
                losses.append(await self._step(step))
                is_over = await self._rounds.step()
                if step + 1 == self._replica.steps:
                    is_over = await self._rounds.finish() or is_over
                seconds.append(loop.time() - start)
                if is_over:
                    for report in await self._report(step, losses, seconds):
                        yield report
                    losses, seconds = [], []

    async def check_replicas(self) -> None:
        """Raise ``AsyncparError`` unless the parameters of all ranks are equal to the last bit."""
        await self._replica.check_equal()

    async def _step(self, step: int) -> float:
        """Make a step of this rank, or of its host; return this rank's part of the batch's summed loss."""
        if self._inside is None:
            loss = await self._replica.compute(step)
        else:
            async with self._inside.step(self._replica.parameters) as synchronization:
                loss = await self._replica.compute(step, synchronization.ready)
        await self._replica.update(step)
        return loss

    async def _report(self, last: int, losses: list[float], seconds: list[float]) -> list[StepReport]:
        """Return the reports of the steps up to ``last``."""
        sums = np.array(losses, np.float64)
        await self._communicator.all_reduce(sums, key="losses")
        first = last + 1 - len(losses)
        return [
            StepReport(step=first + index, loss=float(total) / self._replica.batches.tokens, seconds=seconds[index])
            for index, total in enumerate(sums)
        ]


class FreeTrainer:
    """Trains replicas that exchange the changes made by their optimizers, each weighted by 1 / ranks, in ``mode``.

    At the end all ranks have all updates, and equal parameters.
    """

    def __init__(
        self, model: LanguageModel, batches: Batches, *, communicator: Communicator, mode: SynchronizationMode
    ) -> None:
        self._replica = BatchShare(model, batches, communicator)
        self._communicator = communicator
        self._mode = mode

    async def run(self) -> AsyncGenerator[StepReport, None]:
        """Yield all reports at the end: requesting the losses of others before that would mean waiting for them."""
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
        """Exchange updates in the block; after an error in it the other ranks continue without this one."""
        gossip = UpdateGossip(self._replica.parameters, self._communicator, self._mode, key="updates")
        await gossip.start()
        has_ended = False
        try:
            yield gossip
            has_ended = True
        finally:
            await gossip.close(failed=not has_ended)
