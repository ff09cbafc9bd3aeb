"""The communicators that the actors of a mesh use among themselves."""

from __future__ import annotations

import math

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.message import MeshPlace
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.rank_order import RankOrder
from asyncpar.errors import UsageError


class Groups:
    """Makes the groups of this rank's actors, all of them subgroups of its ``world``, which is set later.

    A group is identified by its mesh and axis, so that meshes over the same ranks have separate groups, whatever the
    order in which their actors request them.  Groups last as long as the world; an actor that replaces an ended one
    gets its group.

    Ranks match operations of a group by their number in the order of calls.  After a mesh call that failed on some
    ranks these numbers may differ, so an operation would be matched with an earlier one of another rank; therefore
    such a call ends the groups of its ranks.  New groups have the number of the ``attempt`` in their names; the caller
    of the mesh assigns it, and all ranks get it in the same order.
    """

    def __init__(self) -> None:
        self.world: Communicator | None = None
        self._groups: dict[str, dict[str | None, Communicator]] = {}
        self._attempts: dict[str, dict[int, int]] = {}

    def find(self, ref: ActorRef[object], place: MeshPlace | None, axis: str | None) -> Communicator:
        """Return the communicator of the actor ``ref``, whose place is ``place``.  See ``Actor.group``."""
        if place is None:
            raise UsageError(f"group: {ref!r} is not on a mesh; nodes.spawn(...) starts actors that are")
        groups = self._groups.setdefault(place.mesh, {})
        found = groups.get(axis)
        if found is None:
            found = groups[axis] = self._make(ref, place, axis)
        return found

    def abandon(self, abandon: message.Abandon) -> None:
        """End the groups of the ranks of a mesh call that failed."""
        attempts = self._attempts.setdefault(abandon.mesh, {})
        attempts.update(dict.fromkeys(abandon.ranks, abandon.attempt))
        groups = self._groups.get(abandon.mesh, {})
        for axis, group in list(groups.items()):
            if not set(abandon.ranks).isdisjoint(group.ranks):
                del groups[axis]
                group.give_up(abandon.failed, f"{abandon.text}; ask for the group again")

    def _make(self, ref: ActorRef[object], place: MeshPlace, axis: str | None) -> Communicator:
        if self.world is None:
            raise UsageError(f"group: {ref!r} lives in a system without collectives")
        ranks = ranks_along(place, axis, ref.rank)
        attempts = self._attempts.get(place.mesh, {})
        attempt = max(attempts.get(rank, 0) for rank in ranks)
        name = f"{axis or 'all'} of mesh {place.mesh}"
        group = self.world.subgroup(ranks, name=name, key=f"{place.mesh}/{axis or ''}/{attempt}")
        assert group is not None, "ranks along an axis include this one"
        return group


def ranks_along(place: MeshPlace, axis: str | None, rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` only along ``axis``, in order of that axis; all for None.

    Raises ``UsageError`` if the mesh has no such axis, or does not include ``rank``.
    """
    sizes = dict(zip(place.axes, place.sizes, strict=False))
    if rank not in place.ranks or math.prod(sizes.values()) != len(place.ranks) or min(place.sizes, default=1) < 1:
        raise UsageError(f"group: rank {rank} has no place on mesh {place.mesh} of {sizes} with ranks {place.ranks}")
    if axis is None:
        return place.ranks
    if axis not in sizes:
        axes = ", ".join(map(repr, sizes)) or "none"
        raise UsageError(f"group: expected an axis of mesh {place.mesh}: {axes}, or nothing for all; got {axis!r}")
    order = RankOrder(axes=tuple(sizes.items())[::-1])
    return tuple(place.ranks[at] for at in order.group(axis, place.ranks.index(rank)))
