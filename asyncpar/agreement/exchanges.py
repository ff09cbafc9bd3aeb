"""Comparison of ranks' intentions: by hashes, and line by line where hashes differ."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError

DIGEST_BYTES: Final = 8
_EPOCH_BYTES = 8

Lines: TypeAlias = Mapping[str, Sequence[str]]
"""Lines that describe a rank's intention, by the kind of group in which they must be equal."""

Partitions: TypeAlias = Mapping[str, Sequence[Sequence[int]]]
"""The groups of each kind, which need not contain all ranks."""

ALL: Final = "all"
"""The kind of the one group of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """``rank`` has the line ``got`` instead of ``expected``, that of ``first``, the first rank of their group."""

    first: int
    rank: int
    expected: str
    got: str

    def __str__(self) -> str:
        return (
            "parameters: expected the same names, shapes, dtypes, order and settings on all ranks, but where "
            f"rank {self.first} has {self.expected}, rank {self.rank} has {self.got}"
        )


class Comparison:
    """One comparison of ``lines`` in all groups of all ranks; without ``partitions`` all ranks are one group.

    Exchanges ``epoch``, if given, and a hash of eight bytes per kind of group under ``key``, and the lines themselves
    only if hashes differ, under ``rare``, a key that no other comparison uses.  ``digests`` are already known hashes of
    lines, by kind.
    """

    def __init__(
        self,
        communicator: Communicator,
        lines: Lines,
        partitions: Partitions | None = None,
        *,
        key: str,
        rare: str,
        epoch: int | None = None,
        digests: Mapping[str, bytes] | None = None,
    ) -> None:
        self._communicator = communicator
        self._partitions = {ALL: (range(communicator.size),)} if partitions is None else partitions
        self._lines = lines
        self._rare = rare
        known = digests or {}
        row = b"".join(known.get(kind) or digest_of(lines.get(kind, ())) for kind in self._partitions)
        head = b"" if epoch is None else epoch.to_bytes(_EPOCH_BYTES, "little")
        own = np.frombuffer(head + row, np.uint8)
        self._epoch = epoch or 0
        self._head = len(head)
        self._is_over = communicator.size == 1
        self._exchange: OwedCollective[NDArray[np.uint8]] = OwedCollective(
            lambda: communicator.all_gather(own, key=key)
        )
        self._gathering: OwedCollective[list[dict[str, list[str]]]] = OwedCollective(self._exchange_lines)

    async def run(self) -> int:
        """Return the latest epoch of all ranks, 0 without one.

        Raises ``SettingsDiffer``, on every rank, if ranks of a group differ, naming the first two that do and the first
        line in which they do.
        """
        if self._communicator.size == 1:
            return self._epoch
        gathered = await self._exchange.run()
        rows = gathered[:, self._head :]
        if not ((rows == rows[0]).all() or self._are_equal(rows)):
            lines = await self._gathering.run()
            difference = find_difference(lines, self._partitions, self._communicator.ranks)
            assert difference is not None, "hashes differ, so lines do"
            raise SettingsDiffer(str(difference))
        self._is_over = True
        return max(int.from_bytes(bytes(row), "little") for row in gathered[:, : self._head])

    def close(self) -> None:
        """Abort, on all ranks, the parts of the comparison that this rank has not begun.  Does not wait."""
        if not self._is_over:
            self._exchange.close()
            self._gathering.close()

    def _exchange_lines(self) -> Coroutine[Any, Any, list[dict[str, list[str]]]]:
        lines = {kind: list(self._lines.get(kind, ())) for kind in self._partitions}
        return self._communicator.all_gather_object(lines, key=f"{self._rare}/lines", wanted=dict[str, list[str]])

    def _are_equal(self, rows: NDArray[np.uint8]) -> bool:
        digests = rows.reshape(len(rows), -1, DIGEST_BYTES)
        return all(
            (digests[list(group), index] == digests[group[0], index]).all()
            for index, groups in enumerate(self._partitions.values())
            for group in groups
        )


async def compare(communicator: Communicator, lines: Sequence[str], *, key: str) -> None:
    """Raise ``SettingsDiffer``, naming the first difference, on every rank unless all ranks pass equal ``lines``."""
    await Comparison(communicator, {ALL: lines}, key=key, rare=f"{key}/differences").run()


def digest_of(lines: Sequence[str]) -> bytes:
    """Return eight bytes that differ if ``lines`` do."""
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).digest()[:DIGEST_BYTES]


def find_difference(gathered: Sequence[Lines], partitions: Partitions, names: Sequence[int]) -> Difference | None:
    """Return the first difference between the lines of two ranks of one group; None if there is none.

    ``names`` are the numbers of the ranks to use in the message.
    """
    for kind, groups in partitions.items():
        for group in groups:
            first = gathered[group[0]][kind]
            for rank in group[1:]:
                lines = gathered[rank][kind]
                for index in range(max(len(first), len(lines))):
                    expected, got = _line(first, index), _line(lines, index)
                    if expected != got:
                        return Difference(first=names[group[0]], rank=names[rank], expected=expected, got=got)
    return None


def _line(lines: Sequence[str], index: int) -> str:
    return lines[index] if index < len(lines) else "nothing more"


T = TypeVar("T")


class OwedCollective(Generic[T]):
    """One use of a key, which this rank makes exactly once: by ``run``, or by ``close`` if it fails before that.

    So after a step that failed on some ranks all have used a key equally often, and no rank waits for a collective that
    this one does not run.  ``begin`` calls the collective.
    """

    __slots__ = ("_begin", "has_begun")

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._begin = begin
        self.has_begun = False

    async def run(self) -> T:
        """Start the collective and return its result."""
        self.has_begun = True
        return await self._begin()

    def close(self) -> None:
        """Abort the collective on all ranks, unless it has begun.  Does not wait, and sends none of this rank's data.

        The other ranks raise ``PeerCancelled`` with this rank's reason from ``cancel_reason``.
        """
        if not self.has_begun:
            self.has_begun = True
            with suppress(AsyncparError, asyncio.CancelledError):  # of ranks that are gone, or the one thrown here
                self._begin().throw(asyncio.CancelledError())


class Ballot:
    """One vote on ``count`` questions; the answer to each is yes if any rank votes yes.

    Each rank calls ``cast`` or ``close``; the uses of ``key`` stay equal on all ranks either way.
    """

    def __init__(self, communicator: Communicator, *, count: int, key: str) -> None:
        self._votes = np.zeros(count, np.uint8)
        self._exchange: OwedCollective[Any] = OwedCollective(
            lambda: communicator.all_reduce(self._votes, "max", key=key)
        )

    async def cast(self, answers: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the combined answers of all ranks.  Raises ``PeerCancelled`` if a rank closes its ballot."""
        assert answers.shape == self._votes.shape, "one answer for each question"
        self._votes[:] = answers
        await self._exchange.run()
        return self._votes.astype(np.bool_)

    def close(self) -> None:
        """Abort the vote on all ranks, unless this rank has voted.  Does not wait."""
        self._exchange.close()
