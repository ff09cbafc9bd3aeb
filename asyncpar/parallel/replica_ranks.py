"""Replicas on several ranks: those of one process are one replica of the group of its runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from asyncpar.backends import CommunicationGroup, CommunicationRuntime
from asyncpar.collectives.communicator import refuse_elastic
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.parallel.config import DDP_GROUP
from asyncpar.parallel.module import Trainable
from asyncpar.parallel.replicas import make_equal


class ReplicaRanks:
    """Averages the gradients of ``parameters`` over the ranks of ``runtime``, weighted by their numbers of rows.

    The ranks are those of its group ``ddp_main``, or of its default group.  ``name`` belongs to one live object at a
    time.
    """

    def __init__(self, parameters: Sequence[Trainable], runtime: CommunicationRuntime, *, name: str) -> None:
        self._runtime = runtime
        self._parameters = tuple(parameters)
        self._claimed = self._name = name
        self._turn = asyncio.Lock()
        self._synchronizer: GradientSynchronizer | None = None

    @property
    def group(self) -> CommunicationGroup:
        """All ranks.  Raises ``NoGroup`` while no backend is open."""
        return self._runtime.get_group(DDP_GROUP if DDP_GROUP in self._runtime.groups else None)

    async def prepare(self) -> None:
        """Check that all ranks have the same parameters, and take the values of rank 0; once, on all ranks."""
        async with self._turn:
            if self._synchronizer is not None:
                return
            communicator = self.group.communicator
            refuse_elastic(communicator, "DataParallel with a runtime", "replicas")
            communicator.claim(self._claimed, self)
            try:
                word = await make_equal(self._parameters, (), communicator, key=f"{self._name}/start")
            except BaseException:
                communicator.release(self._claimed, self)
                raise
            self._name = f"{self._name}/{word}"
            self._synchronizer = GradientSynchronizer.data_parallel(communicator, name=f"{self._name}/gradients")

    def close(self) -> None:
        """Release the name."""
        if self._synchronizer is not None:
            self._synchronizer.close()
            self._synchronizer = None
            self.group.communicator.release(self._claimed, self)

    async def share(self, rows: int, *, is_incomplete: bool) -> float | None:
        """Return the factor for this rank's mean that makes the mean over ranks that over all rows.

        Return None if no rank has any rows.  Raises ``UsageError``, on every rank, if gradients are incomplete on some.
        """
        await self.prepare()
        communicator = self.group.communicator
        mine = np.array([rows, is_incomplete], np.int64)
        counts = await communicator.all_gather(mine, key=f"{self._name}/rows")
        broken = np.flatnonzero(counts[:, 1])
        if broken.size:
            raise UsageError(
                f"sync_gradients: a replica of rank {broken[0]} failed in its backward pass; call zero_grad on all "
                "ranks and begin anew"
            )
        total = int(counts[:, 0].sum())
        return rows * communicator.size / total if total else None

    async def average(self) -> None:
        """Replace the gradients by their mean over ranks."""
        assert self._synchronizer is not None, "share comes first"
        async with self._synchronizer.step(self._parameters):
            pass
