"""References to the actors of an elastic job, which find them in every world; and meshes that know their holes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast

from asyncpar import errors
from asyncpar.actors.meshes.calls import CallCounter
from asyncpar.actors.meshes.mesh_ref import MeshActors, MeshRef
from asyncpar.actors.meshes.shape import MEMBER_AXIS, MeshShape
from asyncpar.actors.meshes.values import MeshError
from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.message import MeshPlace
from asyncpar.actors.runtime.ref import ActorRef, Endpoint, NoSuchEndpoint, Told
from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.elasticity.actor_places import ActorPlacement
from asyncpar.elasticity.interruption import program_errors
from asyncpar.errors import (
    ActorDown,
    PeerCancelled,
    PeerLost,
    RemoteError,
    StaleGeneration,
    UsageError,
    WorldChanged,
    WorldRevoked,
)
from asyncpar.net.wire.array import type_name
from asyncpar.node import Node

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")
R = TypeVar("R")

_WORLD_ERRORS: Final = frozenset(
    type_name(kind)
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, PeerLost | PeerCancelled | WorldRevoked | WorldChanged | StaleGeneration)
    and not issubclass(kind, ActorDown)
)
"""Errors with which an actor fails because its world is over, by the names that its caller receives."""


class JobActors:
    """The actors of the current world, as references find them."""

    def __init__(
        self, changed: Callable[[BaseException], WorldChanged], is_over: Callable[[BaseException], bool]
    ) -> None:
        self.placements: dict[str, ActorPlacement] = {}
        self.changed = changed
        self._is_over = is_over
        self._system: ActorSystem | None = None
        self._opened = asyncio.Event()
        self._has_ended = False

    def open(self, system: ActorSystem) -> None:
        """Release calls: all actors of the world have started."""
        self._system = system
        self._opened.set()

    def close(self) -> None:
        """Hold back calls: the world is over."""
        self._system = None
        self._opened.clear()

    def end(self) -> None:
        """Fail all further calls: this process is no longer in any world."""
        self.close()
        self._has_ended = True
        self._opened.set()

    async def wait_open(self) -> None:
        """Return when there is a world, or this process has left the job."""
        await self._opened.wait()

    async def resolve(self, name: str, actor_class: type[Any]) -> ActorRef[Any]:
        """Return the actor in the current world; wait for one if there is none.

        Raises ``ActorDown`` if the actor is a hole, ``WorldChanged`` if the job has ended here.
        """
        await self._opened.wait()
        return self.find(name, actor_class)

    def find(self, name: str, actor_class: type[Any]) -> ActorRef[Any]:
        """Return the actor in the current world.  Raises as ``resolve``, and ``WorldChanged`` between two worlds."""
        if self._system is None:
            raise self.no_world(f"actor {name!r}")
        rank = self.placements[name].rank
        if self.placements[name].has_given_up:
            raise ActorDown(f"actor {name!r}: it has failed too often, and is not started again")
        if rank is None:
            raise ActorDown(f"actor {name!r}: no rank is left for it in this world; it is a hole")
        return cast("ActorRef[Any]", self._system.ref(name, rank, actor_class=actor_class))

    def judge(self, system: ActorSystem | None, error: BaseException) -> BaseException:
        """Return the error to raise for a call that failed with ``error``: ``WorldChanged`` at the end of the world."""
        if isinstance(error, WorldChanged | UsageError):
            return error
        own = None if self._system is not system else program_errors(error, self.is_end_of_world)
        return self.changed(error) if own is None else own

    def is_end_of_world(self, error: BaseException) -> bool:
        """Decide whether ``error``, of this rank or another, results from the end of the world."""
        is_remote = isinstance(error, RemoteError) and error.type_name in _WORLD_ERRORS
        return is_remote or self._is_over(error)

    def no_world(self, what: str) -> WorldChanged:
        """Return the error for a use of ``what`` between two worlds."""
        text = "this process has left the job" if self._has_ended else "the next world has not begun"
        return self.changed(PeerLost(f"{what}: {text}", cause=text))

    @property
    def system(self) -> ActorSystem | None:
        """The actor system of the current world."""
        return self._system


class ElasticRef:
    """Names an actor of the job; every other public attribute is an endpoint, as with an ``ActorRef``.

    A call goes to the actor where it lives now; between two worlds it waits.  When the world ends before the answer has
    arrived, the call raises ``WorldChanged``, even if the actor lives on: a call that waits in the mailbox then is
    refused at once, a running one has half a second to answer.  It was handled once or not at all; repeat it if that is
    harmless.
    """

    __slots__ = ("_actors", "actor_class", "name")

    def __init__(self, actors: JobActors, name: str, actor_class: type[Any]) -> None:
        self._actors = actors
        self.name = name
        self.actor_class = actor_class

    @property
    def rank(self) -> int | None:
        """The rank where the actor lives in the current world; None if it is a hole, or there is no world."""
        placement = self._actors.placements.get(self.name)
        return None if placement is None or self._actors.system is None else placement.rank

    def __getattr__(self, name: str) -> ElasticEndpoint[..., Any]:
        if name.startswith("_") or name not in self.actor_class.endpoints:
            known = ", ".join(sorted(self.actor_class.endpoints)) or "none"
            raise NoSuchEndpoint(
                f"{name}: {self.actor_class.__qualname__} has no endpoint of this name; it has {known}"
            )
        return ElasticEndpoint(self._actors, self, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ElasticRef) and (self.name, self._actors) == (other.name, other._actors)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.actor_class.__qualname__} {self.name!r} of the job>"


class ElasticEndpoint(Endpoint[P, R]):
    """One endpoint of an actor of the job."""

    __slots__ = ("_actors", "_target")

    def __init__(self, actors: JobActors, target: ElasticRef, name: str) -> None:
        self._actors = actors
        self._target = target
        self._name = name

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Ask.  Raises as ``ActorRef`` does, ``WorldChanged`` when the world ends first, ``ActorDown`` for a hole."""
        ref = await self._actors.resolve(self._target.name, self._target.actor_class)
        system = self._actors.system
        try:
            return cast(R, await getattr(ref, self._name)(*args, **kwargs))
        except Exception as error:  # judged: is it the end of the world?
            judged = self._actors.judge(system, error)
            if judged is error:
                raise
            raise judged from _cause(judged, error)

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> Told:
        """Send the call now.  Raises ``WorldChanged`` between two worlds, ``ActorDown`` for a hole.

        A message that is in transit when the world ends is not sent again.
        """
        ref = self._actors.find(self._target.name, self._target.actor_class)
        return cast(Told, getattr(ref, self._name).tell(*args, **kwargs))

    async def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[R, None]:
        """Iterate over the items of the endpoint.  Raises as an ask does."""
        ref = await self._actors.resolve(self._target.name, self._target.actor_class)
        system = self._actors.system
        try:
            async with aclosing(getattr(ref, self._name).stream(*args, **kwargs)) as items:
                async for item in items:
                    yield item
        except Exception as error:  # judged: is it the end of the world?
            judged = self._actors.judge(system, error)
            if judged is error:
                raise
            raise judged from _cause(judged, error)

    def __repr__(self) -> str:
        return f"<endpoint {self._name} of {self._target!r}>"


def _cause(judged: BaseException, error: BaseException) -> BaseException | None:
    """Return the cause of ``judged``: the ``error`` that it replaces, unless it is a part of it."""
    return error if isinstance(judged, WorldChanged) else judged.__cause__


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAnswers(Generic[R]):
    """Answers of the actors of a mesh by place, and the places that were holes at the time."""

    values: Mapping[int, R]
    holes: tuple[int, ...]


class ElasticMesh(Generic[A]):
    """Actors of the job at numbered places, on different ranks.  Made by ``job.actors.declare_mesh``.

    ``holes`` are the places without an actor in the current world; ``now`` is the mesh of the others.
    """

    def __init__(self, actors: JobActors, name: str, actor_class: type[A], places: int) -> None:
        self.name = name
        self.places = places
        self.holes: tuple[int, ...] = tuple(range(places))
        self._actors = actors
        self._actor_class = actor_class
        self._mesh: MeshRef[A] | None = None
        self._filled: tuple[int, ...] = ()

    def name_of(self, place: int) -> str:
        """Return the name of the actor at ``place``."""
        return f"{self.name}[{place}]"

    @property
    def now(self) -> MeshRef[A]:
        """The actors of the current world, along the axis ``member``, in the order of their places: see ``filled``.

        Raises ``WorldChanged`` between two worlds, ``ActorDown`` if all places are holes.
        """
        if self._actors.system is None:
            raise self._actors.no_world(f"mesh {self.name!r}")
        if self._mesh is None:
            raise ActorDown(f"mesh {self.name!r}: all its places are holes")
        return self._mesh

    @property
    def filled(self) -> tuple[int, ...]:
        """The places that have an actor in the current world."""
        return self._filled

    async def ask(self, endpoint: Endpoint[P, R], *args: P.args, **kwargs: P.kwargs) -> MeshAnswers[R]:
        """Ask all actors that are present: ``await trainers.ask(Trainer.step, batch)``.

        Waits for a world if there is none.  Raises ``WorldChanged`` when the world ends first, and ``MeshError`` if
        some fail by themselves.
        """
        await self._actors.wait_open()
        mesh, filled, holes, system = self.now, self._filled, self.holes, self._actors.system
        try:
            values = await mesh.all(endpoint)(*args, **kwargs)
        except MeshError as error:
            judged = self._actors.judge(system, error)
            if judged is error:
                raise
            raise judged from _cause(judged, error)
        return MeshAnswers(values=dict(zip(filled, values.values(), strict=True)), holes=holes)

    # -- for the job ---------------------------------------------------------------------------------------------------

    def place_in(self, placements: Mapping[str, ActorPlacement], node: Node) -> MeshPlace:
        """Return the mesh of a world, as its actors see it."""
        ranks = tuple(rank for _, rank in self._located(placements))
        return MeshPlace(
            mesh=f"{self.name}@{node.membership.generation}", axes=(MEMBER_AXIS,), sizes=(len(ranks),), ranks=ranks
        )

    def arrange(self, placements: Mapping[str, ActorPlacement], node: Node) -> None:
        """Adopt the places of a new world."""
        located = self._located(placements)
        self._filled = tuple(place for place, _ in located)
        self.holes = tuple(place for place in range(self.places) if place not in self._filled)
        self._mesh = None
        if located:
            system = node.actor_system
            counter = CallCounter(system)
            refs = {
                rank: ActorRef(counter, name=self.name_of(place), rank=rank, actor_class=self._actor_class)
                for place, rank in located
            }
            members = MeshActors(system, self.place_in(placements, node).mesh, refs, counter)
            self._mesh = MeshRef(members, MeshShape.line(tuple(rank for _, rank in located), MEMBER_AXIS))

    def _located(self, placements: Mapping[str, ActorPlacement]) -> list[tuple[int, int]]:
        found = [(place, placements[self.name_of(place)].rank) for place in range(self.places)]
        return [(place, rank) for place, rank in found if rank is not None]

    def __repr__(self) -> str:
        return f"<mesh {self.name!r} of {self.places} places, holes {list(self.holes)}>"
