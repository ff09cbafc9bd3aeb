"""Do all ranks synchronize the same gradients in the same way?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from asyncpar.codecs import Bytes
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.gradsync.obligation import Obligation


class Disagreement(UsageError):  # noqa: N818
    """Ranks of ``group`` differ in their parameters or settings; raised on every one of them."""

    def __init__(self, message: str, *, group: str) -> None:
        super().__init__(message)
        self.group = group


class Agreement:
    """One comparison of ``lines``, which describe what this rank is about to do, with those of all ranks.

    Exchanges a hash of eight bytes per rank, and the lines themselves only when hashes differ.  ``digest`` may stand
    for the lines where it is known.
    """

    def __init__(
        self, communicator: Communicator, lines: Sequence[str], *, group: str, key: str, digest: str | None = None
    ) -> None:
        self._group = group
        self._communicator = communicator
        self._lines = lines
        self._key = key
        own = np.frombuffer(digest_of(lines if digest is None else (digest,)), np.uint8)
        self.exchange: Obligation[Bytes] = Obligation(lambda: communicator.all_gather(own, key=key))

    async def run(self) -> None:
        """Raise ``Disagreement`` unless all ranks pass equal lines.

        The message names the first rank that differs from rank 0, and the first line in which it does.
        """
        hashes = await self.exchange.run()
        if (hashes == hashes[0]).all():
            return
        everything = await self._communicator.all_gather_object(list(self._lines), key=f"{self._key}/lines")
        message = find_difference(everything, self._communicator.ranks)
        assert message is not None, "hashes differ, so lines do"
        raise Disagreement(message, group=self._group)


def digest_of(lines: Sequence[str]) -> bytes:
    """Return eight bytes that differ when ``lines`` do."""
    return hashlib.sha256("\n".join(lines).encode()).digest()[:8]


def find_difference(everything: Sequence[Sequence[str]], ranks: Sequence[int]) -> str | None:
    """Describe how the first of ``ranks`` that differs from the very first one differs; None if none does."""
    first = everything[0]
    for rank, lines in zip(ranks, everything, strict=True):
        if list(lines) == list(first):
            continue
        for index in range(max(len(first), len(lines))):
            expected = first[index] if index < len(first) else "nothing more"
            got = lines[index] if index < len(lines) else "nothing more"
            if expected != got:
                return (
                    "parameters: expected the same names, shapes, dtypes, order and settings on all ranks, but where "
                    f"rank {ranks[0]} has {expected}, rank {rank} has {got}"
                )
    return None
