"""What went wrong on some ranks of a mesh, together.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from asyncpar.errors import AsyncparError
from asyncpar.meshes.shape import MeshShape
from asyncpar.meshes.values import MeshValues


class MeshError(AsyncparError, ExceptionGroup[Exception]):
    """Some actors of a mesh failed: one exception for each, with a note that says where.

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
        """Keep kind and values where ``except*`` and ``split`` take the group apart."""
        return MeshError(self.message, exceptions, self.values)


def mesh_error(
    what: str, shape: MeshShape, failures: Mapping[int, Exception], found: Mapping[int, object]
) -> MeshError:
    """Return the error for the ranks in ``failures``, in mesh order; each failure is noted with its place."""
    failed = [rank for rank in shape.ranks if rank in failures]
    for rank in failed:
        with suppress(AttributeError, TypeError):  # some exceptions take no notes
            failures[rank].add_note(f"from rank {rank} at {shape.coordinates(rank)} of a {shape}")
    message = f"{what} failed on {len(failed)} of {len(shape)} ranks"
    return MeshError(message, [failures[rank] for rank in failed], MeshValues(shape, found))
