"""The step: replicas compare their intended steps, owners update their values, and all ranks receive them."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.exchanges import OwedCollective
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.errors import AsyncparError, NonFiniteValue, UsageError
from asyncpar.nn.optimizers import combined
from asyncpar.zero.buckets import BucketGather, Means
from asyncpar.zero.partition import RowBucket, without_frozen
from asyncpar.zero.share import ParameterShare
from asyncpar.zero.tasks import ended, first_failure, stopped


def norm_exchange(means: Means, own: float) -> OwedCollective[Any]:
    """Return the exchange of every replica's part of the squared norm, ``own`` on this one: a row of one float64."""
    row = np.array([own])
    return _exchange(means, "norm", lambda: row)


async def global_norm(means: Means, own: float) -> float:
    """Return the norm of all replicas' gradients: the same bits on every replica."""
    rows = await norm_exchange(means, own).run()
    return math.sqrt(combined(rows[:, 0].tolist()))


class CommitVote:
    """An exchange in which replicas announce the step that they are about to take.

    They send its number, rate and scale, and a checksum of frozen parameters, negative if gradients are not finite.  If
    these differ, or gradients are not finite on some rank, a second exchange finds out which, and on which rank.
    """

    def __init__(self, means: Means, *, step: int, learning_rate: float, factor: float, is_finite: bool) -> None:
        self._means = means
        self._frozen = [share.is_frozen for share in means.shares]
        frozen = 1.0 + zlib.crc32(bytes(self._frozen))
        self._own = np.array([step, learning_rate, factor, frozen if is_finite else -frozen], np.float64)
        self._exchange = _exchange(means, "step", lambda: self._own)
        self._search = _exchange(means, "culprits", self._own_faults)

    async def run(self) -> AsyncparError | None:
        """Return the error, equal on every replica: another step, other frozen parameters, or non-finite gradients."""
        rows = await self._exchange.run()
        ranks = self._means.communicator.ranks
        for place, what in enumerate(("number of steps taken", "learning rate", "scale")):
            values = rows[:, place].tolist()
            for rank, value in zip(ranks, values, strict=True):
                if not math.isfinite(value) or (value < 0.0 and what == "learning rate"):
                    return UsageError(f"step: expected a finite {what} >= 0, but rank {rank} has {value}")
                if value != values[0]:
                    first = f"rank {ranks[0]} has {values[0]}"
                    return UsageError(f"step: expected one {what} on all replicas, but {first}, rank {rank} {value}")
        is_alike = bool((np.abs(rows[:, 3]) == abs(rows[0, 3])).all())
        if is_alike and (rows[:, 3] > 0.0).all():
            return None
        faults = await self._search.run()
        if not is_alike:
            return self._describe_frozen(faults[:, 2].tolist())
        found = self._describe(faults)
        return NonFiniteValue(f"gradients: expected finite numbers at step {int(self._own[0])}, but {found}")

    def close(self) -> None:
        """Abort the exchanges on all ranks, unless they have begun.  Does not wait."""
        self._exchange.close()
        self._search.close()

    def _own_faults(self) -> NDArray[np.bool_]:
        """Return, for each parameter, three marks.

        The marks: this rank's gradient was not finite; its reduced part is not finite; the parameter is frozen.
        """
        return np.array([self._means.spoiled(), self._means.overflowed(), self._frozen], np.bool_)

    def _describe_frozen(self, marks: Sequence[Sequence[bool]]) -> UsageError:
        """Return the error naming the first rank whose frozen parameters differ from those of the first one."""
        ranks, first = self._means.communicator.ranks, marks[0]
        rank, own = next((rank, own) for rank, own in zip(ranks, marks, strict=True) if own != first)
        name, is_first = next(
            (share.parameter.name, one)
            for share, one, other in zip(self._means.shares, first, own, strict=True)
            if one != other
        )
        known = f"{name} is {'frozen' if is_first else 'trained'} on rank {ranks[0]}"
        return UsageError(
            f"requires_grad: expected the same parameters to be frozen on all replicas, but {known}, "
            f"and {'trained' if is_first else 'frozen'} on rank {rank}"
        )

    def _describe(self, faults: NDArray[Any]) -> str:
        """Describe which ranks have non-finite gradients of which parameters; if none has, which sums overflowed."""
        marks: list[list[bool]] = faults[:, 0].tolist()
        spoiled = [self._means.names_of(row) for row in marks]
        brought = [
            f"rank {rank} has NaN or infinity in {', '.join(names)}"
            for rank, names in zip(self._means.communicator.ranks, spoiled, strict=True)
            if names
        ]
        overflowed: list[bool] = np.any(faults[:, 1], axis=0).tolist()
        return "; ".join(brought) or f"the sum over ranks overflowed in {', '.join(self._means.names_of(overflowed))}"


def _exchange(means: Means, what: str, own: Callable[[], NDArray[Any]]) -> OwedCollective[Any]:
    key = f"{means.key()}/{what}"
    return OwedCollective(lambda: means.communicator.all_gather(own(), key=key))


class OwnedUpdate:
    """The part of a step after which there is no way back.

    ``window`` is the number of buckets in progress at a time.
    """

    def __init__(self, means: Means, *, window: int, **settings: Any) -> None:
        self._means = means
        self._settings = settings
        self._window = asyncio.Semaphore(window)
        self._buckets = [bucket for bucket in without_frozen(means.partition, means.frozen) if bucket.slots]
        self._gathers = value_gathers(means, "spread", self._buckets)
        self._targets = [share.flat_value for share in means.shares] if self._gathers else []
        self._is_updated = [asyncio.Event() for _ in means.partition.buckets]

    async def run(self) -> None:
        """Update this rank's values, and exchange them.

        However it ends, this rank has updated all its values; if it raises, it may lack values that others own.
        """
        updating = asyncio.create_task(self._update())
        spreading = [asyncio.create_task(self._spread(index)) for index in range(len(self._gathers))]
        try:
            await first_failure([updating, *spreading])
        finally:
            await stopped(spreading)
            for gather in self._gathers:
                gather.give_up()
            await ended(updating)

    async def run_alone(self) -> None:
        """Update this rank's values, even if it is cancelled, and exchange nothing."""
        updating = asyncio.create_task(self._update())
        try:
            await first_failure([updating])
        finally:
            await ended(updating)

    @property
    def is_local(self) -> bool:
        """Whether the step is over once this rank has updated its values."""
        return not self._gathers

    async def _update(self) -> None:
        done: set[int] = set()
        for bucket in self._means.partition.buckets:
            shares = [self._means.shares[index] for index in bucket.parameters if index not in done]
            done.update(bucket.parameters)
            nbytes = 4 * sum(share.value.nbytes for share in shares)
            await off_loop(partial(_update_all, shares, self._settings), nbytes=nbytes)
            self._is_updated[bucket.index].set()

    async def _spread(self, index: int) -> None:
        bucket = self._buckets[index]
        await self._is_updated[bucket.index if bucket.origin is None else bucket.origin].wait()
        async with self._window:
            await self._gathers[index].run(self._targets, has_own=True)


def value_gathers(means: Means, what: str, buckets: Sequence[RowBucket] | None = None) -> list[BucketGather]:
    """Return the gathers that give all ranks all values, or those in ``buckets``.

    There are none if all ranks have them, or each keeps its own.
    """
    stage = means.config.stage
    if means.partition.size == 1 or not stage.shards_states or stage.shards_parameters:
        return []
    key = f"{means.key()}/{what}"
    chosen = means.partition.buckets if buckets is None else buckets
    return [BucketGather(bucket, means, means.partition, means.shares, key=key) for bucket in chosen]


async def gather_values(means: Means) -> None:
    """Give every replica the values of all owners."""
    for gather in value_gathers(means, "values"):
        await gather.run([share.flat_value for share in means.shares], has_own=True)


def _update_all(shares: Sequence[ParameterShare], settings: dict[str, Any]) -> None:
    for share in shares:
        share.update(**settings)
