"""All pieces of a checkpoint: which rank writes a shared piece, and which pieces contain a rank's request.  Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncpar.checkpoint.manifest import Manifest, PieceRecord
from asyncpar.checkpoint.piece import Wanted, label_of
from asyncpar.checkpoint.spans import CopyPlan, Spans, first_gap, intersect, reach_of, spans_of, subtract
from asyncpar.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceLocation:
    """A piece, the rank whose shard contains it, and the start of its values in the file."""

    rank: int
    offset: int
    record: PieceRecord

    @property
    def spans(self) -> Spans:
        return spans_of(self.record.part, self.record.flat)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """Values to copy from one piece into the array for the entry ``target`` of the request."""

    target: int
    place: PieceLocation
    moves: CopyPlan


class Catalog:
    """The pieces in ``manifests`` by tensor.  ``where`` names the checkpoint in messages."""

    def __init__(self, manifests: Sequence[Manifest], where: object) -> None:
        self._where = where
        self._places: dict[tuple[str, str], list[PieceLocation]] = {}
        for manifest in manifests:
            offset = manifest.header_bytes
            for record in manifest.pieces:
                place = PieceLocation(rank=manifest.rank, offset=offset, record=record)
                self._places.setdefault((record.name, record.kind), []).append(place)
                offset += record.nbytes

    def check(self) -> None:
        """Raise ``CheckpointError`` unless the pieces of each tensor have one shape and dtype and cover it."""
        for (name, kind), places in self._places.items():
            first = places[0]
            shape = first.record.slice.global_shape
            for place in places[1:]:
                _check_equal(self._where, first, place)
            gap = first_gap([place.spans for place in places], math.prod(shape))
            if gap is not None:
                raise CheckpointError(
                    f"{self._where}: {label_of(name, kind)} of shape {shape}: no rank has its values {gap[0]}..{gap[1]}"
                )

    def plan(self, wanted: Sequence[Wanted]) -> list[Reading]:
        """Return the readings for ``wanted``: all of it, and nothing twice.

        Raises ``CheckpointError`` naming a tensor that is missing or incomplete, or differs from the request.
        """
        return [reading for target, each in enumerate(wanted) for reading in self._readings(target, each)]

    def _readings(self, target: int, wanted: Wanted) -> Iterator[Reading]:
        places = self._places.get((wanted.name, wanted.kind))
        if places is None:
            raise CheckpointError(f"{self._where}: {wanted.label} is not in this checkpoint{self._similar(wanted)}")
        mine = spans_of(wanted.slice, wanted.flat)
        missing = mine
        for place in places:
            self._check_fits(place, wanted)
            if not missing.starts.size:
                return
            first, end = reach_of(place.record.part, place.record.flat)
            if end <= missing.starts[0] or missing.stops[-1] <= first:
                continue
            theirs = place.spans
            shared = intersect(missing, theirs)
            if shared.starts.size:
                missing = subtract(missing, theirs)
                yield Reading(target=target, place=place, moves=CopyPlan.between(theirs, mine, shared))
        if missing.starts.size:
            raise CheckpointError(
                f"{self._where}: {wanted.label}: no rank has saved its values {missing.starts[0]}..{missing.stops[0]}"
            )

    def _check_fits(self, place: PieceLocation, wanted: Wanted) -> None:
        record = place.record
        for what, saved, here in (
            ("shape", record.slice.global_shape, tuple(wanted.slice.global_shape)),
            ("dtype", record.dtype, wanted.dtype_name),
        ):
            if saved != here:
                raise CheckpointError(
                    f"{self._where}: {wanted.label}: {what}: the checkpoint has {saved} (saved by rank {place.rank}), "
                    f"and {here} is wanted here"
                )

    def _similar(self, wanted: Wanted) -> str:
        kinds = sorted(kind for name, kind in self._places if name == wanted.name)
        if kinds:
            return f"; of that tensor it has {', '.join(kinds)}"
        near = difflib.get_close_matches(wanted.name, {name for name, _ in self._places}, n=3)
        return f"; it has {', '.join(near)}" if near else f", which has {len(self._places)} others"


def _check_equal(where: object, first: PieceLocation, other: PieceLocation) -> None:
    for what, expected, got in (
        ("shape", first.record.slice.global_shape, other.record.slice.global_shape),
        ("dtype", first.record.dtype, other.record.dtype),
    ):
        if expected != got:
            raise CheckpointError(
                f"{where}: {first.record.label}: {what}: expected one on all ranks, but rank {first.rank} has "
                f"{expected} and rank {other.rank} has {got}"
            )


_IDENTITY_BYTES = 16
_ROW_BYTES = _IDENTITY_BYTES + 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Values that a rank holds: 16 bytes that identify the values of a tensor, and 32 that identify their content."""

    identity: bytes
    digest: bytes


def encode_holdings(holdings: Sequence[Holding]) -> bytes:
    """Return the encoding that ranks exchange: 48 bytes per piece."""
    return b"".join(holding.identity + holding.digest for holding in holdings)


def choose(labels: Sequence[str], everything: Sequence[bytes], rank: int) -> list[int]:
    """Return the indices of the pieces that ``rank`` writes: pieces that several ranks hold are distributed among them.

    ``everything`` has the encoded holdings of each rank, ``labels`` the names of ``rank``'s pieces in messages.  Raises
    ``CheckpointError`` naming tensor and ranks if other ranks hold different values for one of them.
    """
    holders: dict[bytes, dict[bytes, list[int]]] = {}
    for holder, rows in enumerate(everything):
        for holding in _decoded(rows):
            holders.setdefault(holding.identity, {}).setdefault(holding.digest, []).append(holder)
    turns: dict[tuple[int, ...], int] = {}
    writers: dict[bytes, int] = {}
    for identity, held in holders.items():
        ranks = tuple(next(iter(held.values())))
        turn = turns.get(ranks, 0)
        turns[ranks] = turn + 1
        writers[identity] = ranks[turn % len(ranks)]
    chosen = []
    for index, (label, holding) in enumerate(zip(labels, _decoded(everything[rank]), strict=True)):
        first, *others = holders[holding.identity].values()
        if others:
            raise CheckpointError(
                f"{label}: replicas have drifted: {_ranks(first)} and {_ranks(others[0])} hold different values of it; "
                "what each rank has for itself is to be marked: PerRank, or a name of its own"
            )
        if writers[holding.identity] == rank:
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
