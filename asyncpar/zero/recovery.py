"""Spreading of a failure on one replica to all, and recovery from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.agreement.exchanges import OwedCollective
from asyncpar.errors import PeerError
from asyncpar.zero.buckets import Means
from asyncpar.zero.errors import StepTorn
from asyncpar.zero.parameter_gatherer import ParameterGatherer
from asyncpar.zero.reducer import Reducer
from asyncpar.zero.step_state import EnginePhase, StepState
from asyncpar.zero.stepping import CommitVote, norm_exchange, value_gathers


class Names:
    """The names by which collectives meet.

    They begin with ``prefix``, equal on all replicas, and the number of past failures: after a failure some replicas
    may have used a name more often than others.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.incident = 0

    def key(self) -> str:
        """Return the current prefix of names."""
        return f"{self.prefix}/{self.incident}"


class Recovery:
    """Aborts, after a failure, the collectives that other ranks may be waiting for; then meets them."""

    gatherer: ParameterGatherer | None = None

    def __init__(self, means: Means, reducer: Reducer, state: StepState, names: Names) -> None:
        self._means = means
        self._reducer = reducer
        self._state = state
        self._names = names

    @asynccontextmanager
    async def all_or_none(self, what: str) -> AsyncIterator[None]:
        """Turn a failure in this block into one on all replicas."""
        try:
            yield
        except SettingsDiffer:  # all replicas raise it
            raise
        except BaseException as error:
            await self.break_off(f"{what}: {str(error) or type(error).__name__}")
            raise

    async def break_off(self, why: str) -> None:
        """Abort, on all ranks, every collective of the step that this rank has not begun; once.  Does not wait."""
        if self._state.phase is EnginePhase.BROKEN:
            return
        self._state.break_off(why)
        await self._reducer.abandon()
        if self.gatherer is not None:
            await self.gatherer.abandon()
        norm_exchange(self._means, 0.0).close()
        CommitVote(self._means, step=0, learning_rate=0.0, factor=0.0, is_finite=False).close()
        for gather in value_gathers(self._means, "spread"):
            gather.give_up()

    async def meet(self, step_count: int, attempt: int) -> None:
        """Wait for all replicas, and use new names from now on.

        Raises ``StepTorn`` on all of them unless they have taken equally many steps.
        """
        rows = await self._meeting(step_count, attempt).run()
        self._names.incident = int(rows[:, 0].max()) + 1
        steps = rows[:, 1].tolist()
        if min(steps) != max(steps):
            rank = self._means.communicator.ranks[steps.index(min(steps))]
            raise StepTorn(
                f"some replicas have taken step {max(steps)} and others, rank {rank} for one, have not; "
                f"restore a checkpoint",
                rank=rank,
            )

    def abort_meeting(self, attempt: int) -> None:
        """Abort the meeting on all ranks.  Does not wait."""
        self._meeting(0, attempt).close()

    def _meeting(self, step_count: int, attempt: int) -> OwedCollective[Any]:
        own = np.array([self._names.incident, step_count], np.int64)
        key = f"{self._names.prefix}/resume" + f"/{attempt}" * (attempt > 0)
        return OwedCollective(lambda: self._means.communicator.all_gather(own, key=key))


def torn(step: int, error: PeerError) -> StepTorn:
    """Return the error for a step that failed, by ``error``, after values had been updated."""
    return StepTorn(
        f"step {step} failed after values were updated, so replicas differ; resume() or restore a checkpoint: {error}",
        rank=error.rank,
        host=error.host,
        operation=error.operation,
        cause=error.cause,
    )
