"""The computation of one rank: its rows of every batch, in a worker thread, while the loop moves data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.nn import OnGradient, Parameter
from asyncpar.train.language_model import Batches, LanguageModel, split_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of a step.  ``loss`` is the mean over the whole batch, equal on all ranks."""

    step: int
    loss: float
    seconds: float


class BatchShare:
    """A rank's model and its share of the batches.

    Gradients are scaled so that their *mean* over all ranks is the gradient of the whole batch's mean loss, even if
    ranks have different numbers of rows.
    """

    def __init__(self, model: LanguageModel, batches: Batches, communicator: Communicator) -> None:
        if batches.rows != model.config.rows or batches.length != model.config.model.length:
            raise UsageError("batches: expected the batch and the window length of the model's configuration")
        self.model = model
        self.batches = batches
        self._communicator = communicator
        self._rows = split_rows(batches.rows, rank=communicator.rank, size=communicator.size)
        self._scale = communicator.size / batches.tokens
        self.worker = WorkerThread(f"compute of rank {communicator.rank}")

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.model.config.steps

    @property
    def parameters(self) -> Sequence[Parameter]:
        return self.model.model.parameters()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Close the worker thread at the end of the block."""
        try:
            yield
        finally:
            self.worker.close()

    async def compute(self, step: int, on_gradient: OnGradient | None = None) -> float:
        """Compute the gradients of ``step``; return the summed loss over this rank's rows."""
        return await self.worker.run(self._compute, step, on_gradient)

    async def update(self, step: int) -> None:
        """Update the parameters with their gradients."""
        await self.worker.run(self.model.update, step)

    async def check_equal(self) -> None:
        """Raise ``AsyncparError`` unless the parameters of all ranks are equal to the last bit."""
        digests = await self._communicator.all_gather_object(self.model.digest())
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise AsyncparError(f"parameters of ranks {different} differ from those of rank 0 after training")

    def _compute(self, step: int, on_gradient: OnGradient | None) -> float:
        windows = self.batches.windows(step, self._rows)
        return self.model.accumulate(windows, scale=self._scale, on_gradient=on_gradient)
