"""The step: owners update their values, and everyone gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from asyncpar.core.concurrency.offload import off_loop
from asyncpar.zero.gathering import BucketGather
from asyncpar.zero.reduction import Means
from asyncpar.zero.share import ParameterShare
from asyncpar.zero.tasks import ended, first_failure, stopped


class OwnedUpdate:
    """The part of a step after which there is no way back.

    ``window`` is how many buckets are under way at a time.
    """

    def __init__(self, means: Means, *, window: int, **settings: Any) -> None:
        self._means = means
        self._settings = settings
        self._window = asyncio.Semaphore(window)
        self._gathers = value_gathers(means, "spread")
        self._targets = [share.flat_value for share in means.shares] if self._gathers else []
        self._is_updated = [asyncio.Event() for _ in means.partition.buckets]

    async def run(self) -> None:
        """Update what this rank owns, and exchange values.

        However it ends, this rank has updated all it owns; if it raises, it may lack values that others own.
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
        """Update what this rank owns, even if it is cancelled, and exchange nothing."""
        updating = asyncio.create_task(self._update())
        try:
            await first_failure([updating])
        finally:
            await ended(updating)

    @property
    def is_local(self) -> bool:
        """Is it over when this rank has updated what it owns?"""
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
        await self._is_updated[index].wait()
        async with self._window:
            await self._gathers[index].run(self._targets, has_own=True)


def value_gathers(means: Means, what: str) -> list[BucketGather]:
    """Return what brings everyone the values of all parameters: nothing where everyone has them, or keeps its own."""
    stage = means.config.stage
    if means.partition.size == 1 or not stage.shards_states or stage.shards_parameters:
        return []
    key = f"{means.key()}/{what}"
    return [BucketGather(bucket, means, means.partition, means.shares, key=key) for bucket in means.partition.buckets]


async def gather_values(means: Means) -> None:
    """Give every replica the values of all owners."""
    for gather in value_gathers(means, "values"):
        await gather.run([share.flat_value for share in means.shares], has_own=True)


def _update_all(shares: Sequence[ParameterShare], settings: dict[str, Any]) -> None:
    for share in shares:
        share.update(**settings)
