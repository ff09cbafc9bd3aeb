"""Where in a mesh an actor stands."""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One actor of a mesh.

    ``mesh`` names the mesh, equal for all its actors and for no other mesh of the world.  ``ranks`` are in row-major
    order of the ``axes`` of the given ``sizes``.
    """

    mesh: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
