"""Offers of reducers: each rank makes its own, and all know that they are equal before the first use."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.agreement.exchanges import ALL, find_difference
from asyncpar.collectives.algorithms.catalog import ARENA
from asyncpar.collectives.communicator import agreeing
from asyncpar.errors import AsyncparError, PeerCancelled, UsageError
from asyncpar.gradsync.tuning import TuningConfig
from asyncpar.torch.errors import as_torch
from asyncpar.torch.process_group import ProcessGroup
from asyncpar.torch.replicas.reducer import GradientReducer

NAME = "DistributedDataParallel"

_ERROR = "error"
_NAME = "name"
_MIB = 1 << 20
_BUCKET_MIB = 25
_CROWDED_BUCKET_MIB = 256
"""Bucket size for ranks that share memory and leave no core idle: reductions during backward take the core from it."""


class ReducerOffer:
    """The reducer that ``make`` creates on this rank, or the error that prevents it: ``exchange``, then ``take``.

    ``make`` also returns lines that must be equal on all ranks.
    """

    def __init__(self, make: Callable[[], tuple[GradientReducer, list[str]]]) -> None:
        self._reducer: GradientReducer | None = None
        self._failure: Exception | None = None
        self._ranks: Sequence[int] = ()
        self._offer: dict[str, list[str]] = {ALL: [], _ERROR: [], _NAME: [f"{NAME} {secrets.token_hex(8)}"]}
        self._offers: Sequence[dict[str, list[str]]] = ()
        try:
            self._reducer, self._offer[ALL] = make()
        except Exception as error:  # noqa: BLE001  # raised by ``take``, when the others know
            self._failure, self._offer[_ERROR] = error, [f"{type(error).__name__}: {error}"]

    def exchange(self, group: ProcessGroup, why: str = "") -> None:
        """Exchange the offers of all ranks; ``why`` is shown if others call something else instead."""
        try:
            self._offers = _exchange(group, self._offer, why)
        except BaseException:
            self._withdraw()
            raise
        self._ranks = group.communicator.ranks

    def take(self) -> GradientReducer:
        """Return the reducer, once all ranks have an equal one.

        Raises ``SettingsDiffer`` on all ranks, naming the first difference, and on the others the refusal of one rank.
        """
        try:
            self._check()
        except BaseException:
            self._withdraw()
            raise
        assert self._reducer is not None, "there is one, or an error"
        (self._reducer.name,) = self._offers[0][_NAME]
        return self._reducer

    def _check(self) -> None:
        if self._failure is not None:
            raise as_torch(self._failure, NAME)
        for rank, other in zip(self._ranks, self._offers, strict=True):
            if other[_ERROR]:
                raise as_torch(PeerCancelled(f"{NAME}: rank {rank} cannot take part: {other[_ERROR][0]}", rank=rank))
        difference = find_difference(self._offers, {ALL: (range(len(self._ranks)),)}, self._ranks)
        if difference is not None:
            raise as_torch(SettingsDiffer(str(difference)))

    def _withdraw(self) -> None:
        if self._reducer is not None:
            self._reducer.release()


def find_bucket_bytes(bucket_cap_mb: float | None, group: ProcessGroup, tuning: TuningConfig | None) -> int:
    """Return the largest size of a bucket in bytes.  Raises ``UsageError`` unless that is a positive number."""
    size = bucket_cap_mb
    if size is None:
        is_crowded = tuning is None and _are_crowded(group)
        size = _CROWDED_BUCKET_MIB if is_crowded else _BUCKET_MIB
    if not size * _MIB >= 1:
        raise UsageError(f"bucket_cap_mb: expected a positive number of MiB, got {bucket_cap_mb}")
    return int(size * _MIB)


def _are_crowded(group: ProcessGroup) -> bool:
    """Return whether the ranks share memory with less than two cores each.  Ranks of one host get the same answer."""
    communicator = group.communicator
    shares_memory = len(communicator.hosts) == 1 < communicator.size and ARENA in communicator.algorithms("all_reduce")
    return shares_memory and (os.cpu_count() or 1) < 2 * communicator.size


def _exchange(group: ProcessGroup, offer: dict[str, list[str]], why: str) -> Sequence[dict[str, list[str]]]:
    communicator = group.communicator
    found: list[dict[str, list[str]]] = []

    async def exchange() -> None:
        wanted = dict[str, list[str]]
        found.extend(await agreeing(communicator, why, lambda: communicator.all_gather_object(offer, wanted=wanted)))

    try:
        group.call(exchange, NAME)
    except AsyncparError as error:
        raise as_torch(error, NAME) from None
    return found
