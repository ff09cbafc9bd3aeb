"""Which rank writes a piece that several hold.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpar.errors import CheckpointError

_IDENTITY_BYTES = 16
_ROW_BYTES = _IDENTITY_BYTES + 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Values that a rank holds: 16 bytes that say which values of which tensor, and 32 that say what they are."""

    identity: bytes
    digest: bytes


def encode_holdings(holdings: Sequence[Holding]) -> bytes:
    """Return what ranks exchange: 48 bytes per piece."""
    return b"".join(holding.identity + holding.digest for holding in holdings)


def choose(labels: Sequence[str], everything: Sequence[bytes], rank: int) -> list[int]:
    """Return the places of those pieces of ``rank`` that no lower rank holds.

    ``everything`` is what each rank has encoded, ``labels`` what messages call the pieces of ``rank``.  Raises
    ``CheckpointError`` naming tensor and ranks if other ranks hold different values for one of them.
    """
    holders: dict[bytes, dict[bytes, list[int]]] = {}
    for holder, rows in enumerate(everything):
        for holding in _decoded(rows):
            holders.setdefault(holding.identity, {}).setdefault(holding.digest, []).append(holder)
    chosen = []
    for index, (label, holding) in enumerate(zip(labels, _decoded(everything[rank]), strict=True)):
        first, *others = holders[holding.identity].values()
        if others:
            raise CheckpointError(
                f"{label}: replicas have drifted: {_ranks(first)} and {_ranks(others[0])} hold different values of it"
            )
        if first[0] == rank:
            chosen.append(index)
    return chosen


def _decoded(rows: bytes) -> list[Holding]:
    if len(rows) % _ROW_BYTES:
        raise CheckpointError(
            f"a rank has sent {len(rows)} bytes about its pieces, which is no multiple of {_ROW_BYTES}"
        )
    starts = range(0, len(rows), _ROW_BYTES)
    return [
        Holding(
            identity=rows[start : start + _IDENTITY_BYTES], digest=rows[start + _IDENTITY_BYTES : start + _ROW_BYTES]
        )
        for start in starts
    ]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
