"""Do all ranks synchronize the same gradients in the same way?"""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.errors import Disagreement
from asyncpar.agreement.owed import OwedCollective
from asyncpar.collectives.communicator import Communicator

_DIGEST_BYTES = 8
_EPOCH_BYTES = 8

Lines: TypeAlias = Mapping[str, Sequence[str]]
"""What a rank is about to do, by the kind of group in which it must be the same."""

Partitions: TypeAlias = Mapping[str, Sequence[Sequence[int]]]
"""The groups of each kind, which need not hold all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """``line``, or nothing, of ``rank`` differs from that of ``first``, the first of their group."""

    first: int
    rank: int
    expected: str
    got: str

    def __str__(self) -> str:
        return (
            "parameters: expected the same names, shapes, dtypes, order and settings on all ranks, but where "
            f"rank {self.first} has {self.expected}, rank {self.rank} has {self.got}"
        )


class Agreement:
    """One comparison of ``lines`` in all groups of all ranks.

    Exchanges ``epoch`` and a hash of eight bytes per rank and kind of group, and the lines themselves only when hashes
    differ, by a name that begins with ``rare``.  ``digests`` may stand for lines where they are known.
    """

    def __init__(
        self,
        communicator: Communicator,
        partitions: Partitions,
        lines: Lines,
        *,
        key: str,
        rare: str,
        epoch: int = 0,
        digests: Mapping[str, bytes] | None = None,
    ) -> None:
        self._communicator = communicator
        self._partitions = partitions
        self._lines = lines
        self._rare = rare
        known = digests or {}
        row = b"".join(known.get(kind) or digest_of(lines.get(kind, ())) for kind in partitions)
        own = np.frombuffer(epoch.to_bytes(_EPOCH_BYTES, "little") + row, np.uint8)
        self._epoch = epoch
        self._is_over = communicator.size == 1
        self._exchange: OwedCollective[NDArray[np.uint8]] = OwedCollective(
            lambda: communicator.all_gather(own, key=key)
        )
        self._everything: OwedCollective[list[dict[str, list[str]]]] = OwedCollective(self._exchange_lines)

    async def run(self) -> int:
        """Return the latest epoch of all ranks; raise ``Disagreement``, on every rank, unless groups are of one mind.

        The message names the first two ranks of a group that differ, and the first line in which they do.
        """
        if self._communicator.size == 1:
            return self._epoch
        gathered = await self._exchange.run()
        rows = gathered[:, _EPOCH_BYTES:]
        if not ((rows == rows[0]).all() or self._is_unanimous(rows)):
            everything = await self._everything.run()
            difference = find_difference(everything, self._partitions, self._communicator.ranks)
            assert difference is not None, "hashes differ, so lines do"
            raise Disagreement(str(difference))
        self._is_over = True
        return max(int.from_bytes(bytes(row), "little") for row in gathered[:, :_EPOCH_BYTES])

    async def give_up(self) -> None:
        """Tell the others that this rank does not take the step.  Waits for nobody."""
        for obligation in self.obligations:
            await obligation.begin_and_cancel()

    @property
    def obligations(self) -> Iterator[OwedCollective[Any]]:
        """What this rank owes the others, as far as it can know."""
        if not self._is_over:
            yield self._exchange
            yield self._everything

    def _exchange_lines(self) -> Coroutine[Any, Any, list[dict[str, list[str]]]]:
        lines = {kind: list(self._lines.get(kind, ())) for kind in self._partitions}
        return self._communicator.all_gather_object(lines, key=f"{self._rare}/lines", wanted=dict[str, list[str]])

    def _is_unanimous(self, rows: NDArray[np.uint8]) -> bool:
        digests = rows.reshape(len(rows), -1, _DIGEST_BYTES)
        return all(
            (digests[list(group), index] == digests[group[0], index]).all()
            for index, groups in enumerate(self._partitions.values())
            for group in groups
        )


def digest_of(lines: Sequence[str]) -> bytes:
    """Return eight bytes that differ when ``lines`` do."""
    return hashlib.sha256("\n".join(lines).encode()).digest()[:_DIGEST_BYTES]


def find_difference(everything: Sequence[Lines], partitions: Partitions, names: Sequence[int]) -> Difference | None:
    """Return the first difference between the lines of two ranks of one group, None if there is none.

    Ranks are called by ``names``.
    """
    for kind, groups in partitions.items():
        for group in groups:
            first = everything[group[0]][kind]
            for rank in group[1:]:
                lines = everything[rank][kind]
                for index in range(max(len(first), len(lines))):
                    expected, got = _line(first, index), _line(lines, index)
                    if expected != got:
                        return Difference(first=names[group[0]], rank=names[rank], expected=expected, got=got)
    return None


def _line(lines: Sequence[str], index: int) -> str:
    return lines[index] if index < len(lines) else "nothing more"
