"""Hosts in place of ranks: few bytes between hosts, many inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.exchanges import OwedCollective, digest_of
from asyncpar.collectives.call import cancel_reason
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.gradsync.plan import HasGradient, HasParameters
from asyncpar.gradsync.statistics import StepOutcome
from asyncpar.parallel.local.rounds import Synchronizer

HEADER_BYTES = 8
"""Size of the status before the means; it keeps float64 aligned."""

_FINE = 0
_SKIPPED = 1


class HostSynchronizer:
    """Makes gradients that are equal inside each host equal to their mean over hosts.

    The first rank of each host has ``between``, a synchronizer of these ranks, and passes the result to the others; so
    a host sends as much as one rank would.  Every host has the same weight, however many ranks it has.  For ``DiLoCo``:
    all ranks of a host hold the common point and the momentum, and the first one the residuals, too.  ``name``
    distinguishes synchronizers that share ``host``, and belongs to one of them during its lifetime.
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

        Raises the errors of ``between`` on the first rank of the host and ``PeerCancelled`` on the others, or
        ``UsageError`` on all of a host whose ranks differ in their gradients, and leaves gradients unchanged.
        """
        gradients = list(model_shards.parameters())
        packed: NDArray[np.uint8] | None = None
        means = OwedCollective(
            lambda: self._host.broadcast(_pack(gradients, status=_FINE) if packed is None else packed, key=self._name)
        )
        digests = OwedCollective(lambda: self._host.all_gather(_digest(gradients), key=f"{self._name}/digest"))
        with cancel_reason() as why:
            try:
                packed = await self._reduce(gradients)
                await means.run()
                self._check(await digests.run())
            except BaseException as error:
                why.take(error)
                means.close()
                digests.close()
                raise
        outcome = StepOutcome(is_skipped=packed[0] == _SKIPPED)
        if not outcome.is_skipped:
            _unpack(packed, gradients)
        return outcome

    def close(self) -> None:
        """Release the name for another synchronizer."""
        self._host.release(self._name, self)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the state of ``between``; empty on ranks that have none."""
        return {} if self._between is None else self._between.state()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue with the ``state`` of an earlier run of this rank."""
        if self._between is not None:
            self._between.restore(state)

    async def _reduce(self, gradients: list[HasGradient]) -> NDArray[np.uint8]:
        """Return the packed means over hosts on the first rank of the host, and memory for them on the others."""
        if self._between is None:
            return _pack(gradients, status=_FINE)
        copies = [_HostCopy(name=gradient.name, grad=gradient.grad.copy()) for gradient in gradients]
        outcome = await self._between.synchronize_gradients(_HostCopies(copies))
        return _pack(copies, status=_SKIPPED if outcome.is_skipped else _FINE)

    def _check(self, digests: NDArray[np.uint8]) -> None:
        """Check the means of all ranks of the host.  Raises ``UsageError`` unless they have the same gradients, too."""
        for rank, other in zip(self._host.ranks, digests, strict=True):
            if (other != digests[0]).any():
                first = self._host.ranks[0]
                raise UsageError(f"{self._name}: rank {rank} has other gradients, or other settings, than rank {first}")


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
    """Return the concatenated bytes of all gradients after a status, in new memory."""
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
    """Return eight bytes that differ if names, shapes or dtypes do."""
    lines = [f"{gradient.name} {gradient.grad.dtype}{gradient.grad.shape}" for gradient in gradients]
    return np.frombuffer(digest_of(lines), np.uint8)
