"""Do all ranks synchronize the same gradients in the same way?"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from asyncpar.codecs import Bytes
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError, UsageError


class Disagreement(UsageError):  # noqa: N818
    """Ranks differ in their parameters or settings; raised on every rank."""


class Agreement:
    """One comparison of ``lines``, which describe what this rank is about to do, with those of all ranks.

    Exchanges a hash of eight bytes per rank, and the lines themselves only when hashes differ.  As with a bucket's
    flow, whether it is run or given up, it has begun its first collective exactly once.
    """

    def __init__(self, communicator: Communicator, lines: Sequence[str], *, key: str) -> None:
        self._communicator = communicator
        self._lines = lines
        self._key = key
        self._has_begun = False

    async def run(self) -> None:
        """Raise ``Disagreement`` unless all ranks pass equal lines.

        The message names the first rank that differs from rank 0, and the first line in which it does.
        """
        hashes = await self._exchange(np.frombuffer(digest_of(self._lines), np.uint8))
        if (hashes == hashes[0]).all():
            return
        everything = await self._communicator.all_gather_object(list(self._lines), key=f"{self._key}/lines")
        message = find_difference(everything)
        assert message is not None, "hashes differ, so lines do"
        raise Disagreement(message)

    async def give_up(self) -> None:
        """Tell the other ranks that this one will not take part.  Waits for nobody."""
        if not self._has_begun:
            with suppress(TimeoutError, AsyncparError):
                async with asyncio.timeout(0):
                    await self._exchange(np.zeros(len(digest_of(())), np.uint8))

    async def _exchange(self, digest: Bytes) -> Bytes:
        self._has_begun = True
        return await self._communicator.all_gather(digest, key=self._key)


def digest_of(lines: Sequence[str]) -> bytes:
    """Return eight bytes that differ when ``lines`` do."""
    return hashlib.sha256("\n".join(lines).encode()).digest()[:8]


def find_difference(everything: Sequence[Sequence[str]]) -> str | None:
    """Describe how the first rank that differs from rank 0 differs; None if none does."""
    first = everything[0]
    for rank, lines in enumerate(everything):
        if list(lines) == list(first):
            continue
        for index in range(max(len(first), len(lines))):
            expected = first[index] if index < len(first) else "nothing more"
            got = lines[index] if index < len(lines) else "nothing more"
            if expected != got:
                return (
                    "parameters: expected the same names, shapes, dtypes, order and settings on all ranks, but where "
                    f"rank 0 has {expected}, rank {rank} has {got}"
                )
    return None
