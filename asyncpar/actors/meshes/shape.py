"""The shape of a mesh: its ranks, and the coordinates of each along named axes.  Pure."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, SupportsIndex, TypeAlias

from asyncpar.core.config.rank_order import RankOrder
from asyncpar.core.tables import html_table
from asyncpar.errors import UsageError

_MOST_ROWS: Final = 64
RANK_AXIS: Final = "rank"
"""The axis of a mesh over a whole world."""
MEMBER_AXIS: Final = "member"
"""The axis of a mesh over some ranks in a row; a place along it is not the number of a rank."""

Selection: TypeAlias = "int | slice"
"""Selection along an axis: one place (removes the axis) or a range of places (keeps it)."""


class NoSuchPlace(UsageError, KeyError):  # noqa: N818
    """The mesh has no such place; the message names the axis and its places."""

    __str__ = Exception.__str__


class Coordinates(Mapping[str, int]):
    """A place in a mesh: axis names to places along them.  Equal to any mapping with the same content; hashable."""

    __slots__ = ("_place",)

    def __init__(self, place: Mapping[str, int]) -> None:
        self._place = dict(place)

    def __getitem__(self, axis: str) -> int:
        return self._place[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __hash__(self) -> int:
        return hash(frozenset(self._place.items()))

    def __str__(self) -> str:
        return ", ".join(f"{axis}={at}" for axis, at in self._place.items())

    def __repr__(self) -> str:
        return f"Coordinates({self})"


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Named axes with their sizes, and a rank of the world at every place.

    ``ranks`` is in mesh order: row-major, the last axis runs fastest.  That is the meaning of ``RankMapping`` with its
    default order when the axes are named ``dp, tp, pp``.
    """

    dimensions: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for axis, size in self.dimensions:
            if not axis.isidentifier():
                raise UsageError(f"axes: expected names that are Python identifiers, got {axis!r}")
            if size < 1:
                raise UsageError(f"{axis}: expected a positive number of ranks, got {size}")
        if len(set(self.axes)) != len(self.axes):
            raise UsageError(f"axes: expected different names, got {', '.join(self.axes)}")
        if len(set(self.ranks)) != len(self.ranks) or len(self.ranks) != math.prod(self.sizes.values()):
            raise UsageError(f"ranks: expected a different rank for each place of {self}, got {list(self.ranks)}")

    @classmethod
    def line(cls, ranks: Iterable[int], axis: str = RANK_AXIS) -> MeshShape:
        """Return a mesh with one axis."""
        members = tuple(ranks)
        return cls(((axis, len(members)),), members)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, slowest first."""
        return tuple(axis for axis, _ in self.dimensions)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of places along each axis."""
        return dict(self.dimensions)

    def __len__(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        return "mesh of " + (" x ".join(f"{axis} {size}" for axis, size in self.dimensions) or "one place")

    # -- places ------------------------------------------------------------------------------------------------------

    def places(self) -> Iterator[Coordinates]:
        """Yield all coordinates in mesh order."""
        for place in itertools.product(*(range(size) for _, size in self.dimensions)):
            yield Coordinates(dict(zip(self.axes, place, strict=True)))

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of ``rank``."""
        if rank not in self.ranks:
            raise NoSuchPlace(f"rank: expected one of {_shown(self.ranks)}, got {rank}")
        place = self._order().coordinates(self.ranks.index(rank))
        return Coordinates({axis: place[axis] for axis in self.axes})

    def at(self, place: Mapping[str, int]) -> int:
        """Return the rank at ``place``, which names every axis."""
        self._check_axes(place)
        missing = [axis for axis in self.axes if axis not in place]
        if missing:
            raise NoSuchPlace(f"place: expected coordinates for {', '.join(self.axes)}; {missing[0]} is missing")
        checked = {axis: _checked_place(axis, at, self.sizes[axis]) for axis, at in place.items()}
        return self.ranks[self._order().rank_at(checked)]

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axis``, itself included, in order of that axis."""
        self._check_axes((axis,))
        place = self.coordinates(rank)
        return tuple(self.at({**place, axis: at}) for at in range(self.sizes[axis]))

    # -- other meshes ------------------------------------------------------------------------------------------------

    def reshape(self, sizes: Mapping[str, int]) -> MeshShape:
        """Return the same ranks, in the same order, along other axes; one size may be -1, and is inferred."""
        numbers = {axis: _checked_number(axis, size) for axis, size in sizes.items()}
        open_axes = [axis for axis, size in numbers.items() if size == -1]
        wrong = next((axis for axis, size in numbers.items() if size < 1 and size != -1), None)
        if wrong is not None:
            raise UsageError(f"{wrong}: expected a positive size or -1, got {numbers[wrong]}")
        if len(open_axes) > 1:
            raise UsageError(f"sizes: expected at most one -1, got it for {', '.join(open_axes)}")
        known = math.prod(size for size in numbers.values() if size != -1)
        left, rest = divmod(len(self), known)
        if rest or (not open_axes and left != 1):
            product = " * ".join(f"{axis} {size}" for axis, size in numbers.items()) or "1"
            raise UsageError(f"sizes: expected a product of {len(self)}, the number of ranks, got {product}")
        return MeshShape(tuple((axis, left if size == -1 else size) for axis, size in numbers.items()), self.ranks)

    def slice(self, chosen: Mapping[str, Selection]) -> MeshShape:
        """Return the part of the mesh at the ``chosen`` places: one place removes its axis, a range keeps it.

        Places along remaining axes are counted from 0 again.
        """
        self._check_axes(chosen)
        kept: list[tuple[str, int]] = []
        along: list[range] = []
        for axis, size in self.dimensions:
            selection = chosen.get(axis, slice(None))
            if isinstance(selection, slice):
                along.append(_checked_range(axis, selection, size))
                kept.append((axis, len(along[-1])))
            else:
                place = _checked_place(axis, selection, size)
                along.append(range(place, place + 1))
        ranks = tuple(self.at(dict(zip(self.axes, place, strict=True))) for place in itertools.product(*along))
        return MeshShape(tuple(kept), ranks)

    def select(self, ranks: Iterable[int]) -> MeshShape:
        """Return a mesh with one axis, ``member``, over some of the ranks, in the given order."""
        chosen = tuple(_checked_number("ranks", rank) for rank in ranks)
        for rank in chosen:
            if rank not in self.ranks:
                raise NoSuchPlace(f"ranks: expected ranks of {_shown(self.ranks)}, got {rank}")
        if not chosen or len(set(chosen)) != len(chosen):
            raise UsageError(f"ranks: expected at least one rank, each once, got {list(chosen)}")
        return MeshShape.line(chosen, MEMBER_AXIS)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _order(self) -> RankOrder:
        return RankOrder(axes=self.dimensions[::-1])

    def _check_axes(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.axes:
                raise NoSuchPlace(f"axis: expected one of {', '.join(self.axes) or 'none'}, got {name!r}")


def _checked_number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):  # numpy's integers are valid, too
        raise UsageError(f"{name}: expected an integer, got {value!r}")
    return operator.index(value)


def _checked_place(axis: str, value: object, size: int) -> int:
    place = _checked_number(axis, value)
    if not 0 <= place < size:
        raise NoSuchPlace(f"{axis}: expected a coordinate 0..{size - 1}, got {place}")
    return place


def _checked_range(axis: str, selection: slice, size: int) -> range:
    """Return the places that ``selection`` covers; unlike Python, refuse bounds that lie outside."""
    for bound in (selection.start, selection.stop):
        if bound is not None and not -size <= _checked_number(axis, bound) <= size:
            raise NoSuchPlace(f"{axis}: expected a range within 0..{size}, got {bound}")
    places = range(size)[selection]
    if not places:
        raise NoSuchPlace(f"{axis}: expected a range with at least one place of 0..{size - 1}, got {selection}")
    return places


def _shown(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")


def mesh_table(shape: MeshShape, members: str) -> str:
    """Return an HTML table of the place and the rank of each of the ``members``, of the first 64 of them."""
    found = zip(shape.places(), shape.ranks, strict=True)
    rows = [(str(place) or "the one place", str(rank)) for place, rank in itertools.islice(found, _MOST_ROWS)]
    more = [("and", f"{len(shape) - _MOST_ROWS} more")] if len(shape) > _MOST_ROWS else []
    return html_table([(f"{shape} of {members}", "rank"), *rows, *more])
