"""Hosts in the place of ranks: few bytes between hosts, many inside."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError, PeerCancelled, UsageError
from asyncpar.gradsync.plan import HasGradient, HasParameters
from asyncpar.gradsync.statistics import StepOutcome
from asyncpar.parallel.local.rounds import Synchronizer

HEADER_BYTES = 8
"""Means travel behind a status; this much keeps float64 aligned."""

DIGEST_BYTES = 8

_FINE = 0
_SKIPPED = 1


class HostSynchronizer:
    """Makes gradients that are equal inside each host equal to their mean over hosts.

    The first rank of each host has ``between``, a synchronizer of these ranks, and tells the others; so a host sends as
    much as one rank would.  Every host counts the same, however many ranks it has.  For ``DiLoCo``: all ranks of a host
    hold the common point and the momentum, and the first one the residuals, too.  ``name`` tells apart those that share
    ``host``, and belongs to one of them as long as it lives.
    """

    def __init__(self, host: Communicator, between: Synchronizer | None, *, name: str = "hosts") -> None:
        if (between is None) is (host.rank == 0):
            expected = "a synchronizer on the first rank of the host" if host.rank == 0 else "None on other ranks"
            raise UsageError(f"between: expected {expected}, got {between!r} on rank {host.rank} of the host")
        self._host = host
        self._between = between
        self._name = name
        host.claim(name, self)

    async def synchronize_gradients(self, model_shards: HasParameters) -> StepOutcome:
        """Replace every gradient by its mean over hosts, and return the outcome.

        Raises what ``between`` raises on the first rank of the host, ``PeerCancelled`` on the others, ``UsageError`` on
        all of a host whose ranks differ in their gradients, and leaves gradients as they were.
        """
        gradients = list(model_shards.parameters())
        has_broadcast = False
        try:
            packed = await self._reduce(gradients)
            has_broadcast = True
            await self._host.broadcast(packed, key=self._name)
        except BaseException:
            await self._give_up(gradients, has_broadcast=has_broadcast)
            raise
        await self._agree(_digest(gradients))
        outcome = StepOutcome(is_skipped=packed[0] == _SKIPPED)
        if not outcome.is_skipped:
            _unpack(packed, gradients)
        return outcome

    def close(self) -> None:
        """Give the name back, for another synchronizer."""
        self._host.release(self._name, self)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return that of ``between``; empty on ranks that have none."""
        return {} if self._between is None else self._between.state()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on with the ``state`` of an earlier run of this rank."""
        if self._between is not None:
            self._between.restore(state)

    async def _reduce(self, gradients: list[HasGradient]) -> NDArray[np.uint8]:
        """Return the packed means over hosts, on the first rank of the host; memory for them on the others."""
        if self._between is None:
            return _pack(gradients, status=_FINE)
        copies = [_HostCopy(name=gradient.name, grad=gradient.grad.copy()) for gradient in gradients]
        outcome = await self._between.synchronize_gradients(_HostCopies(copies))
        return _pack(copies, status=_SKIPPED if outcome.is_skipped else _FINE)

    async def _agree(self, digest: NDArray[np.uint8]) -> None:
        """Raise ``PeerCancelled`` unless all ranks of the host hold the means, so that all take them or none does."""
        digests = await self._host.all_gather(digest, key=f"{self._name}/digest")
        for rank, other in zip(self._host.ranks, digests, strict=True):
            if not other.any():
                raise PeerCancelled(f"rank {rank} gave up {self._name} on this host", rank=rank)
            if (other != digests[0]).any():
                first = self._host.ranks[0]
                raise UsageError(f"{self._name}: rank {rank} has other gradients, or other settings, than rank {first}")

    async def _give_up(self, gradients: list[HasGradient], *, has_broadcast: bool) -> None:
        """Abort, on all ranks of this host, the collectives that this rank has not begun.  Does not wait.

        What has not begun is begun and cancelled, which aborts it everywhere; so the uses of a key agree between ranks.
        Should that be over before it is aborted, a digest of zeros says the same.
        """
        if not has_broadcast:
            with suppress(TimeoutError, AsyncparError):
                async with asyncio.timeout(0):
                    await self._host.broadcast(_pack(gradients, status=_FINE), key=self._name)
        with suppress(TimeoutError, AsyncparError):
            async with asyncio.timeout(0):
                await self._agree(np.zeros_like(_digest(())))


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostCopy:
    name: str
    grad: NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class _HostCopies:
    copies: Sequence[_HostCopy]

    def parameters(self) -> Iterable[HasGradient]:
        return self.copies


def _pack(gradients: Sequence[HasGradient], *, status: int) -> NDArray[np.uint8]:
    """Return the bytes of all gradients, one after another behind a status, in new memory."""
    head = np.zeros(HEADER_BYTES, np.uint8)
    head[0] = status
    parts = [np.ascontiguousarray(gradient.grad).reshape(-1).view(np.uint8) for gradient in gradients]
    return np.concatenate([head, *parts])


def _unpack(packed: NDArray[np.uint8], gradients: Sequence[HasGradient]) -> None:
    start = HEADER_BYTES
    for gradient in gradients:
        part = packed[start : start + gradient.grad.nbytes]
        gradient.grad[...] = part.view(gradient.grad.dtype).reshape(gradient.grad.shape)
        start += part.size


def _digest(gradients: Sequence[HasGradient]) -> NDArray[np.uint8]:
    """Return eight bytes, not all of them zero, that differ when names, shapes or dtypes do."""
    lines = (f"{gradient.name} {gradient.grad.dtype}{gradient.grad.shape}" for gradient in gradients)
    digest = np.frombuffer(hashlib.sha256("\n".join(lines).encode()).digest()[:DIGEST_BYTES], np.uint8).copy()
    digest[0] |= 1
    return digest
