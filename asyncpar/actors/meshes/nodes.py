"""The ranks of a world, or some of them, as a mesh on which actors can be started."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from asyncpar.actors.meshes import calls
from asyncpar.actors.meshes.calls import CallCounter
from asyncpar.actors.meshes.mesh_ref import MeshActors, MeshRef
from asyncpar.actors.meshes.shape import Coordinates, MeshShape, mesh_table
from asyncpar.actors.meshes.values import MeshError, MeshValues
from asyncpar.actors.runtime.actor import Actor, as_reference
from asyncpar.actors.runtime.lifecycle import check_actor_class
from asyncpar.actors.runtime.message import MeshPlace
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.actors.runtime.registry import check_name
from asyncpar.actors.runtime.system import ActorSystem

A = TypeVar("A", bound=Actor)


class Nodes:
    """Ranks along named axes.  ``node.nodes`` has all ranks of the world, along one axis: ``rank``.

    Nothing is sent until actors are spawned, and only the rank that spawns them needs to know the mesh.
    """

    def __init__(self, system: ActorSystem, shape: MeshShape, *, number: Callable[[], int]) -> None:
        """``number`` gives this rank's meshes their numbers."""
        self.shape = shape
        self._system = system
        self._number = number

    @classmethod
    def of_world(cls, system: ActorSystem, size: int) -> Nodes:
        """Return the mesh of all ranks.  Create it once per ``system``."""
        return cls(system, MeshShape.line(range(size)), number=itertools.count(1).__next__)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, slowest first."""
        return self.shape.axes

    @property
    def sizes(self) -> dict[str, int]:
        """The number of places along each axis."""
        return self.shape.sizes

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in mesh order."""
        return self.shape.ranks

    def __len__(self) -> int:
        return len(self.shape)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of ``rank``."""
        return self.shape.coordinates(rank)

    def at(self, **place: int) -> int:
        """Return the rank at a place, which names every axis."""
        return self.shape.at(place)

    def reshape(self, **sizes: int) -> Nodes:
        """Return the same ranks, in their order, along other axes: ``nodes.reshape(dp=-1, tp=2)``.

        The last axis runs fastest, as in ``RankMapping``'s default order; one size may be -1, and is inferred.
        """
        return self._over(self.shape.reshape(sizes))

    def slice(self, **chosen: int | slice) -> Nodes:
        """Return a part of the mesh: one place removes its axis, a range keeps it, counted from 0 again."""
        return self._over(self.shape.slice(chosen))

    def select(self, ranks: Iterable[int]) -> Nodes:
        """Return a mesh of some of the ranks, in the given order, along one axis, ``member``."""
        return self._over(self.shape.select(ranks))

    async def spawn(self, actor: type[A], *args: Any, name: str | None = None, **kwargs: Any) -> MeshRef[A]:
        """Start an actor on every rank, all or none, and return when the last ``on_start`` has ended.

        Constructors get copies of the arguments, even on this rank.  All get the same ``name``, or a new one.  Each
        rank must know the class: nothing is imported there.

        Raises ``UsageError`` if the arguments cannot be sent or do not match, and ``MeshError`` if some actors do not
        start; those that did are then stopped.
        """
        check_actor_class(actor)
        number = self._number()
        own_name = f"{actor.__name__}-{self._system.rank}.{number}" if name is None else check_name(name)
        place = MeshPlace(
            mesh=f"{own_name}@{self._system.rank}.{number}",
            axes=self.shape.axes,
            sizes=tuple(self.shape.sizes.values()),
            ranks=self.shape.ranks,
        )
        counter = CallCounter(self._system)
        actors = {rank: ActorRef(counter, name=own_name, rank=rank, actor_class=actor) for rank in self.ranks}
        members = MeshActors(self._system, place.mesh, actors, counter)
        await self._start_all(
            members,
            {rank: self._system.spawn_on(rank, actor, args, kwargs, name=own_name, place=place) for rank in self.ranks},
        )
        return MeshRef(members, self.shape)

    async def _start_all(self, members: MeshActors, spawns: Mapping[int, Coroutine[Any, Any, object]]) -> None:
        """Run all ``spawns``; if not all succeed, stop the actors that were started."""
        started: list[ActorRef[Any]] = []

        async def start(spawn: Coroutine[Any, Any, object]) -> None:
            started.append(as_reference(await spawn))

        starts = {rank: start(spawn) for rank, spawn in spawns.items()}
        try:
            await calls.collect("spawn", self.shape, starts, members.round(self.ranks))
        except asyncio.CancelledError:
            for ref in started:
                self._system.stop_soon(ref)
            raise
        except MeshError as failure:
            failure.values = MeshValues(self.shape, {})
            stops = {ref.rank: self._system.stop(ref) for ref in started}
            try:
                await calls.collect("stop", self.shape, stops, members.round(stops))
            except MeshError as error:
                failure.add_note(f"and then {error}: {'; '.join(map(str, error.exceptions))}")
            raise

    def _over(self, shape: MeshShape) -> Nodes:
        return Nodes(self._system, shape, number=self._number)

    def __repr__(self) -> str:
        return f"<{self.shape} of nodes>"

    def _repr_html_(self) -> str:
        """Return the same for notebooks, with the place of each node."""
        return mesh_table(self.shape, "nodes")
