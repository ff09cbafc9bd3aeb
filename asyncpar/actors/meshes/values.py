"""Results of all actors of a mesh, each with its place, and errors of some of them together.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

from asyncpar.actors.meshes.shape import Coordinates, MeshShape, NoSuchPlace
from asyncpar.errors import AsyncparError, NodeClosed

R_co = TypeVar("R_co", covariant=True)


class MeshValues(Mapping[Coordinates, R_co]):
    """Coordinates to values, in mesh order.

    ``values[{"dp": 0, "tp": 1}]``, ``values.at(dp=0, tp=1)``, ``values.by_rank()[1]``, ``list(values.values())``.
    After failures it has only the values that arrived.
    """

    __slots__ = ("_found", "shape")

    def __init__(self, shape: MeshShape, found: Mapping[int, R_co]) -> None:
        """Take the values in ``found`` by rank; ranks outside of ``shape`` are left out."""
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


class MeshError(AsyncparError, ExceptionGroup[Exception]):
    """Some actors of a mesh failed: one exception for each, with a note of its place.

    ``values`` are the results of the others; they arrived before this was raised.
    """

    values: MeshValues[Any]

    def __new__(cls, message: str, exceptions: Sequence[Exception], values: MeshValues[Any]) -> Self:
        group = super().__new__(cls, message, exceptions)
        group.values = values
        return group

    def __init__(self, message: str, exceptions: Sequence[Exception], values: MeshValues[Any]) -> None:  # noqa: ARG002
        super().__init__(message, exceptions)

    def derive(self, exceptions: Sequence[Exception]) -> MeshError:  # type: ignore[override]
        """Keep type and values where ``except*`` and ``split`` divide the group."""
        return MeshError(self.message, exceptions, self.values)


def mesh_error(
    what: str, shape: MeshShape, failures: Mapping[int, Exception], found: Mapping[int, object]
) -> MeshError | NodeClosed:
    """Return the error for the ranks in ``failures``, in mesh order; each failure is noted with its place."""
    failed = [rank for rank in shape.ranks if rank in failures]
    own = [error for error in failures.values() if isinstance(error, NodeClosed)]
    if len(own) == len(shape):
        return NodeClosed.of(own[0].rank, what)
    for rank in failed:
        with suppress(AttributeError, TypeError):  # some exceptions take no notes
            failures[rank].add_note(f"from rank {rank} at {shape.coordinates(rank)} of a {shape}")
    message = f"{what} failed on {len(failed)} of {len(shape)} ranks"
    return MeshError(message, [failures[rank] for rank in failed], MeshValues(shape, found))
