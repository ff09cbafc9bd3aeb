"""Records that ranks exchange before an operation on devices is launched, and the resulting plan.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from asyncpar.collectives.algorithms.catalog import HIERARCHICAL, NCCL, STAGED
from asyncpar.collectives.arrays import Array
from asyncpar.device.fabric import NO_ROUTE, UNIQUE_ID_BYTES
from asyncpar.errors import UsageError

_REASON_BYTES: Final = 192
_WORDS: Final = 8
RECORD_WORDS: Final = _WORDS + _REASON_BYTES // 8
_ID_WORDS: Final = UNIQUE_ID_BYTES // 8
ORDER_WORDS: Final = 2 + _ID_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The record of one rank at one operation.

    ``reason`` explains why it has no NCCL, empty if it has; without ``has_route``, why NCCL does not reach other hosts.
    ``is_proved`` means that it does.  ``place`` identifies its device, ``may_share`` is whether other ranks may use
    that, too.  ``epoch`` is the first one that this rank accepts, ``parent`` the epoch of the communicator that a new
    one can be made from, -1 for none.  ``counts`` are those that the operation exchanges.
    """

    reason: str = ""
    version: int = 0
    place: int = 0
    index: int = 0
    may_share: bool = False
    has_route: bool = True
    is_proved: bool = False
    epoch: int = 0
    parent: int = -1
    counts: tuple[int, ...] = ()

    def encode(self) -> Array:
        """Return the record as a row of integers."""
        row = np.zeros(RECORD_WORDS + len(self.counts), np.int64)
        text = self.reason.encode()[: _REASON_BYTES - 1]
        route = self.has_route + self.is_proved
        row[:6] = (self.version, self.place, self.index, self.may_share, route, self.epoch)
        row[6:_WORDS] = (self.parent, bool(text))
        row[_WORDS:RECORD_WORDS].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
        row[RECORD_WORDS:] = self.counts
        return row

    @classmethod
    def decode(cls, row: Array) -> RankRecord:
        """Decode a record from ``encode``."""
        version, place, index, may_share, route, epoch, parent, _ = (int(word) for word in row[:_WORDS])
        text = row[_WORDS:RECORD_WORDS].tobytes().rstrip(b"\0").decode(errors="replace")
        return cls(
            reason=text,
            version=version,
            place=place,
            index=index,
            may_share=bool(may_share),
            has_route=route > 0,
            is_proved=route > 1,
            epoch=epoch,
            parent=parent,
            counts=tuple(int(count) for count in row[RECORD_WORDS:]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """The place of an operation: the ``number``-th of communicator ``epoch``, which is made from ``unique_id``.

    ``number`` -1 means that it has none, as it does not go by NCCL.
    """

    epoch: int
    number: int
    unique_id: bytes
    records: tuple[RankRecord, ...]

    def encode(self) -> Array:
        """Return the order as ``ORDER_WORDS`` integers, without the records."""
        words = np.zeros(ORDER_WORDS, np.int64)
        words[:2] = self.epoch, self.number
        words[2:].view(np.uint8)[: len(self.unique_id)] = np.frombuffer(self.unique_id, np.uint8)
        return words

    @classmethod
    def decode(cls, words: Array, records: tuple[RankRecord, ...]) -> LaunchOrder:
        """Decode an order from ``encode``, for ``records``."""
        unique_id = words[2:ORDER_WORDS].tobytes()
        return cls(epoch=int(words[0]), number=int(words[1]), unique_id=unique_id, records=records)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The way of an operation: ``algorithm``, and the reason why it is not NCCL, as text for a log.

    ``is_by_choice`` means that a caller wants it.  ``possible`` are the ways that were possible, best first; none if
    they were not determined.
    """

    algorithm: str
    reason: str = ""
    is_by_choice: bool = False
    possible: tuple[str, ...] = ()


Best = Callable[[Sequence[str]], str]
"""Chooses one of the ways that are possible, the same on all ranks."""


def first_of(possible: Sequence[str]) -> str:
    """Return the first of the possible ways, which is the best if nothing was measured."""
    return possible[0]


def choose_way(
    records: Sequence[RankRecord],
    ranks: Sequence[int],
    wanted: str | None,
    *,
    is_spread: bool = False,
    can_go_by_host: bool = False,
    best: Best = first_of,
) -> Way:
    """Return the way of an operation, which follows from the records, equal on all ranks, and from ``best``.

    ``ranks`` are their numbers in the world, ``wanted`` the algorithm that the caller or a pin names; ``is_spread``
    means that they are on several hosts.  Raises ``UsageError`` naming rank and remedy if NCCL is wanted but
    impossible, or if ranks are incompatible.
    """
    if wanted == STAGED:
        return Way(algorithm=STAGED)
    for record, rank in zip(records, ranks, strict=True):
        if record.reason and record.has_route:
            text = f"rank {rank} has no NCCL: {record.reason}"
            if wanted is not None:
                raise UsageError(f"algorithm: {text}; mend that, or leave the algorithm to asyncpar")
            return Way(algorithm=STAGED, reason=text, possible=(STAGED,))
    _check_versions(records, ranks)
    _check_places(records, ranks)
    possible = (NCCL, HIERARCHICAL, STAGED) if is_spread and can_go_by_host else (NCCL, STAGED)
    if not is_spread:
        return Way(algorithm=NCCL if wanted else best(possible), possible=possible)
    if wanted == HIERARCHICAL:
        return Way(algorithm=HIERARCHICAL)
    cut_off = next((place for place, record in enumerate(records) if not record.has_route), None)
    if cut_off is None:
        return Way(algorithm=wanted or best(possible), possible=possible)
    reason = records[cut_off].reason or f"NCCL of rank {ranks[cut_off]} does not reach other hosts ({NO_ROUTE})"
    return way_without_route(reason, wanted, can_go_by_host=can_go_by_host, best=best)


def way_without_route(reason: str, wanted: str | None, *, can_go_by_host: bool, best: Best = first_of) -> Way:
    """Return the way of an operation where NCCL works on each host, but not between them.

    Raises ``UsageError`` if NCCL is wanted.
    """
    if wanted == NCCL:
        raise UsageError(f"algorithm: {reason}; mend that, or leave the algorithm to asyncpar")
    possible = (HIERARCHICAL, STAGED) if can_go_by_host else (STAGED,)
    return Way(algorithm=best(possible), reason=reason, possible=possible)


def _check_versions(records: Sequence[RankRecord], ranks: Sequence[int]) -> None:
    for record, rank in zip(records, ranks, strict=True):
        if record.version != records[0].version:
            one, other = version_text(records[0].version), version_text(record.version)
            raise UsageError(
                f"NCCL: rank {ranks[0]} has version {one} and rank {rank} has {other}; install the same on all ranks"
            )


def _check_places(records: Sequence[RankRecord], ranks: Sequence[int]) -> None:
    seen: dict[int, int] = {}
    for record, rank in zip(records, ranks, strict=True):
        other = seen.setdefault(record.place, rank)
        if other != rank and not all(one.may_share for one in records if one.place == record.place):
            raise UsageError(
                f"device: ranks {other} and {rank} use the same GPU (cuda:{record.index} on rank {rank}); give each "
                "rank a GPU of its own, or set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks, with NCCL 2.30 or later"
            )


def version_text(version: int) -> str:
    """Format a version of NCCL: 23004 is 2.30.4."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def next_order(
    records: Sequence[RankRecord], before: LaunchOrder | None, *, by_nccl: bool, unique_id: Callable[[], bytes] | None
) -> LaunchOrder:
    """Return the order of the next operation, which the first rank of a group decides; ``before`` was the last by NCCL.

    A new epoch begins when a rank does not accept the previous one any more, or uses another device.  ``unique_id`` is
    called for it.
    """
    kept = tuple(records)
    if not by_nccl:
        return LaunchOrder(epoch=0, number=-1, unique_id=b"", records=kept)
    accepted = max(record.epoch for record in records)
    if before is not None and accepted <= before.epoch:
        if [record.place for record in before.records] == [record.place for record in records]:
            return LaunchOrder(epoch=before.epoch, number=before.number + 1, unique_id=before.unique_id, records=kept)
        accepted = before.epoch + 1
    assert unique_id is not None
    return LaunchOrder(epoch=accepted, number=0, unique_id=unique_id(), records=kept)
