"""Parts of a state in transit between ranks: all that move at once go in one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.elasticity.lineage import ArrayShape
from asyncpar.elasticity.placement import PartMove
from asyncpar.errors import ProtocolError

Array: TypeAlias = NDArray[Any]
Place: TypeAlias = "tuple[str, int]"
"""A kind and a part."""


@dataclass(frozen=True, kw_only=True)
class PartKind:
    """One array that is kept of each part, under one name: flat, of ``lengths[part]`` values.

    ``initial(part)`` is its value before the first step, equal on all ranks; if it ``is_uniform``, parts of one
    length have the same.
    """

    name: str
    dtype: np.dtype[Any]
    lengths: tuple[int, ...]
    initial: Callable[[int], Array]
    is_uniform: bool = False

    @property
    def shape(self) -> ArrayShape:
        """The shape of all parts, one after another."""
        total = sum(self.lengths)
        return ArrayShape(self.name, str(self.dtype), (total,), total * self.dtype.itemsize)


async def transfer(
    communicator: Communicator,
    moves: Sequence[PartMove],
    places: Iterable[Place],
    kinds: Mapping[str, PartKind],
    content: Callable[[Place], Array],
) -> dict[Place, Array]:
    """Send and receive ``places`` according to ``moves``, equal on all ranks, and return the received arrays.

    ``content`` returns the arrays that this rank sends.  Raises ``PeerError`` as operations do.
    """
    by_part: dict[int, list[Place]] = {}
    for place in sorted(places):
        by_part.setdefault(place[1], []).append(place)
    leaving: list[Array] = []
    counts, coming = [0] * communicator.size, dict[int, list[Place]]()
    for move in sorted(moves, key=lambda move: move.dest):
        if move.source == communicator.rank:
            arrays = [content(place).view(np.uint8) for place in by_part.get(move.part, ())]
            counts[move.dest] += sum(array.size for array in arrays)
            leaving += arrays
        if move.dest == communicator.rank:
            coming.setdefault(move.source, []).extend(by_part.get(move.part, ()))
    sent = np.empty(0, np.uint8)
    if leaving:
        sent = await off_loop(lambda: np.concatenate(leaving), nbytes=sum(counts))
    received, _ = await communicator.all_to_all_v(sent, counts)
    return _unpacked(received, [place for source in sorted(coming) for place in coming[source]], kinds)


def _unpacked(content: Array, places: Sequence[Place], kinds: Mapping[str, PartKind]) -> dict[Place, Array]:
    found, start = dict[Place, Array](), 0
    for name, part in places:
        kind = kinds[name]
        stop = start + kind.lengths[part] * kind.dtype.itemsize
        if stop > content.size:
            break
        found[name, part] = content[start:stop].copy().view(kind.dtype)
        start = stop
    if start != content.size or len(found) != len(places):
        raise ProtocolError(f"parts: expected {len(places)} arrays, got {content.size} bytes that do not fit")
    return found
