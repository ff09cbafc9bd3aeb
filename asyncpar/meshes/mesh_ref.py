"""What callers hold of the actors of a mesh, all together."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Generic, ParamSpec, TypeVar, cast

from asyncpar.errors import UsageError
from asyncpar.meshes import calls
from asyncpar.meshes.crew import Crew
from asyncpar.meshes.mesh_endpoint import MeshEndpoint
from asyncpar.meshes.mesh_watch import MeshWatch
from asyncpar.meshes.shape import Coordinates, MeshShape
from asyncpar.runtime.actor import Actor
from asyncpar.runtime.ref import ActorRef, Endpoint, NoSuchEndpoint

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")
R = TypeVar("R")


class MeshRef(Generic[A]):
    """The actors that one ``spawn`` started on the ranks of a mesh.  Every other public attribute is an endpoint.

    ``await trainers.step(batch)`` asks all, ``await trainers.all(Trainer.step)(batch)`` does so with types known to
    type checkers, ``trainers.step.tell(batch)`` tells all; ``async for place, value in
    trainers.step.as_completed(batch)`` takes results as they arrive, and ``.stream`` items.  ``trainers.slice(dp=0)``
    is a part of the mesh, ``trainers.at(dp=0, tp=1)`` and ``trainers.choose()`` are references to one actor.
    """

    def __init__(self, crew: Crew, shape: MeshShape) -> None:
        self.shape = shape
        self._crew = crew
        self._turn = 0

    # -- who ---------------------------------------------------------------------------------------------------------

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

    @property
    def refs(self) -> tuple[A, ...]:
        """The references to all actors, in mesh order.  They may be sent to others, as a list, say."""
        return tuple(cast(A, ref) for ref in self._refs())

    def __len__(self) -> int:
        return len(self.shape)

    def coordinates(self, rank: int) -> Coordinates:
        """Return where the actor on ``rank`` is."""
        return self.shape.coordinates(rank)

    # -- parts -------------------------------------------------------------------------------------------------------

    def at(self, **place: int) -> A:
        """Return the reference to the actor at a place, which names every axis."""
        return cast(A, self._crew.actors[self.shape.at(place)])

    def choose(self) -> A:
        """Return the reference to an actor with the fewest asks of this mesh in flight; equals take turns."""
        ranks = self.shape.ranks
        turns = [ranks[(self._turn + step) % len(ranks)] for step in range(len(ranks))]
        chosen = min(turns, key=self._crew.tally.waiting)
        self._turn = (ranks.index(chosen) + 1) % len(ranks)
        return cast(A, self._crew.actors[chosen])

    def slice(self, **chosen: int | slice) -> MeshRef[A]:
        """Return a part of the mesh: an axis given one place goes, one given a range stays, counted from 0 again.

        Its actors keep their groups: those of the mesh that they were spawned on.
        """
        return self._part(self.shape.slice(chosen))

    def select(self, ranks: Iterable[int]) -> MeshRef[A]:
        """Return the part of the mesh on some of its ranks, in the order given, along one axis: ``member``."""
        return self._part(self.shape.select(ranks))

    # -- calls -------------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> MeshEndpoint[..., Any]:
        if name.startswith("_"):
            raise NoSuchEndpoint(f"{name}: private names of actors cannot be called from outside")
        return self._endpoint(name)

    def all(self, endpoint: Endpoint[P, R]) -> MeshEndpoint[P, R]:
        """Return ``endpoint``, given as the class has it (``Trainer.step``), of all actors, with its types.

        It reaches endpoints whose names mean something else here, too.
        """
        function = cast(object, endpoint)
        if not inspect.isfunction(function):  # which is what it is at run time
            raise UsageError(f"endpoint: expected one as the class has it (Trainer.step), got {function!r}")
        return cast(MeshEndpoint[P, R], self._endpoint(function.__name__))

    # -- lives -------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop all actors, once they have handled what waits.  Raises ``MeshError`` if some cannot be stopped."""
        stops = {ref.rank: self._crew.system.stop(ref) for ref in self._refs()}
        await calls.collect("stop", self.shape, stops, self._crew.round(self.shape.ranks))

    async def kill(self) -> None:
        """Kill all actors, with their children.  Raises ``MeshError`` if some cannot be killed."""
        kills = {ref.rank: self._crew.system.kill(ref) for ref in self._refs()}
        await calls.collect("kill", self.shape, kills, self._crew.round(self.shape.ranks))

    def watch(self) -> MeshWatch:
        """Watch all actors: ``async for place, down in trainers.watch()`` gives exactly one ``Down`` for each."""
        return MeshWatch(self._crew.system, self.shape, self._refs())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _refs(self) -> list[ActorRef[Any]]:
        return [self._crew.actors[rank] for rank in self.shape.ranks]

    def _endpoint(self, name: str) -> MeshEndpoint[..., Any]:
        getattr(self._refs()[0], name)  # refuses what is no endpoint of their class
        return MeshEndpoint(self._crew, self.shape, name)

    def _part(self, shape: MeshShape) -> MeshRef[A]:
        return MeshRef(self._crew, shape)

    def __repr__(self) -> str:
        ref = self._crew.actors[self.shape.ranks[0]]
        return f"<{self.shape} of {ref.class_name} {ref.name!r}>"
