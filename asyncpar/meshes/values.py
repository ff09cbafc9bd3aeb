"""What all actors of a mesh returned, each with its place.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from asyncpar.meshes.shape import Coordinates, MeshShape, NoSuchPlace

R_co = TypeVar("R_co", covariant=True)


class MeshValues(Mapping[Coordinates, R_co]):
    """Coordinates to values, in mesh order.

    ``values[{"dp": 0, "tp": 1}]``, ``values.at(dp=0, tp=1)``, ``values.by_rank()[1]``, ``list(values.values())``.
    After failures it has only those that arrived.
    """

    __slots__ = ("_found", "shape")

    def __init__(self, shape: MeshShape, found: Mapping[int, R_co]) -> None:
        """Take the values in ``found`` by rank; ranks that are not of ``shape`` are left out."""
        self.shape = shape
        self._found = {rank: found[rank] for rank in shape.ranks if rank in found}

    def at(self, **place: int) -> R_co:
        """Return the value at a place.  Raises ``NoSuchPlace`` if the mesh has none, or no value arrived from there."""
        return self[place]

    def by_rank(self) -> dict[int, R_co]:
        """Return the values by rank of the world, in mesh order."""
        return dict(self._found)

    def slice(self, **chosen: int | slice) -> MeshValues[R_co]:
        """Return the values of a part of the mesh.  See ``MeshShape.slice``."""
        return MeshValues(self.shape.slice(chosen), self._found)

    def __getitem__(self, place: Mapping[str, int]) -> R_co:
        rank = self.shape.at(place)
        if rank not in self._found:
            raise NoSuchPlace(f"place: no value arrived from {Coordinates(place)} (rank {rank})")
        return self._found[rank]

    def __iter__(self) -> Iterator[Coordinates]:
        return (place for place, rank in zip(self.shape.places(), self.shape.ranks, strict=True) if rank in self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"MeshValues({{{', '.join(f'({place}): {value!r}' for place, value in self.items())}}})"
