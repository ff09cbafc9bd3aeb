"""References to all actors of a mesh."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, cast

from asyncpar.actors.meshes import calls
from asyncpar.actors.meshes.calls import CallCounter, Notices
from asyncpar.actors.meshes.shape import Coordinates, MeshShape, mesh_table
from asyncpar.actors.meshes.values import MeshValues, mesh_error
from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.ending import Down
from asyncpar.actors.runtime.failure import sendable
from asyncpar.actors.runtime.message import Abandon
from asyncpar.actors.runtime.ref import ActorRef, Endpoint, NoSuchEndpoint, Told
from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.errors import AsyncparError, UsageError

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")
R = TypeVar("R")


class MeshRef(Generic[A]):
    """The actors that one ``spawn`` started on the ranks of a mesh.  Every other public attribute is an endpoint.

    ``await trainers.step(batch)`` asks all, ``await trainers.all(Trainer.step)(batch)`` does so with types known to
    type checkers, ``trainers.step.tell(batch)`` tells all; ``async for place, value in
    trainers.step.as_completed(batch)`` takes results as they arrive, and ``.stream`` items.  ``trainers.slice(dp=0)``
    is a part of the mesh; ``trainers.at(dp=0, tp=1)`` and ``trainers.choose()`` are references to one actor.
    """

    def __init__(self, members: MeshActors, shape: MeshShape) -> None:
        self.shape = shape
        self._members = members
        self._turn = 0

    # -- members -----------------------------------------------------------------------------------------------------

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
        """The references to all actors, in mesh order.  They may be sent to others, for example as a list."""
        return tuple(cast(A, ref) for ref in self._refs())

    def __len__(self) -> int:
        return len(self.shape)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of the actor on ``rank``."""
        return self.shape.coordinates(rank)

    # -- parts -------------------------------------------------------------------------------------------------------

    def at(self, **place: int) -> A:
        """Return the reference to the actor at a place, which names every axis."""
        return cast(A, self._members.actors[self.shape.at(place)])

    def choose(self) -> A:
        """Return the reference to an actor with the fewest asks of this mesh in flight; ties rotate."""
        ranks = self.shape.ranks
        turns = [ranks[(self._turn + step) % len(ranks)] for step in range(len(ranks))]
        chosen = min(turns, key=self._members.counter.waiting)
        self._turn = (ranks.index(chosen) + 1) % len(ranks)
        return cast(A, self._members.actors[chosen])

    def slice(self, **chosen: int | slice) -> MeshRef[A]:
        """Return a part of the mesh: one place removes its axis, a range keeps it, counted from 0 again.

        Its actors keep their groups: those of the mesh that they were spawned on.
        """
        return self._part(self.shape.slice(chosen))

    def select(self, ranks: Iterable[int]) -> MeshRef[A]:
        """Return the part of the mesh on some of its ranks, in the given order, along one axis, ``member``."""
        return self._part(self.shape.select(ranks))

    # -- calls -------------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> MeshEndpoint[..., Any]:
        if name.startswith("_"):
            raise NoSuchEndpoint(f"{name}: private names of actors cannot be called from outside")
        return self._endpoint(name)

    def all(self, endpoint: Endpoint[P, R]) -> MeshEndpoint[P, R]:
        """Return ``endpoint``, given as on the class (``Trainer.step``), of all actors, with its types.

        It also reaches endpoints whose names mean something else here.
        """
        function = cast(object, endpoint)
        if not inspect.isfunction(function):  # it is one at run time
            raise UsageError(f"endpoint: expected one as the class has it (Trainer.step), got {function!r}")
        return cast(MeshEndpoint[P, R], self._endpoint(function.__name__))

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop all actors, once they have handled waiting messages.  Raises ``MeshError`` if some cannot be stopped."""
        stops = {ref.rank: self._members.system.stop(ref) for ref in self._refs()}
        await calls.collect("stop", self.shape, stops, self._members.round(self.shape.ranks))

    async def kill(self) -> None:
        """Kill all actors, with their children.  Raises ``MeshError`` if some cannot be killed."""
        kills = {ref.rank: self._members.system.kill(ref) for ref in self._refs()}
        await calls.collect("kill", self.shape, kills, self._members.round(self.shape.ranks))

    def watch(self) -> MeshWatch:
        """Watch all actors: ``async for place, down in trainers.watch()`` gives exactly one ``Down`` for each."""
        return MeshWatch(self._members.system, self.shape, self._refs())

    # -- internals ---------------------------------------------------------------------------------------------------

    def _refs(self) -> list[ActorRef[Any]]:
        return [self._members.actors[rank] for rank in self.shape.ranks]

    def _endpoint(self, name: str) -> MeshEndpoint[..., Any]:
        getattr(self._refs()[0], name)  # refuses a name that is no endpoint of their class
        return MeshEndpoint(self._members, self.shape, name)

    def _part(self, shape: MeshShape) -> MeshRef[A]:
        return MeshRef(self._members, shape)

    def __repr__(self) -> str:
        ref = self._members.actors[self.shape.ranks[0]]
        return f"<{self.shape} of {ref.class_name} {ref.name!r}>"

    def _repr_html_(self) -> str:
        """Return the same for notebooks, with the place of each actor."""
        ref = self._members.actors[self.shape.ranks[0]]
        return mesh_table(self.shape, f"{ref.class_name} {ref.name!r}")


R_co = TypeVar("R_co", covariant=True)


class MeshEndpoint(Generic[P, R_co]):
    """Reaches all actors of a mesh at once."""

    __slots__ = ("_members", "_name", "_refs", "_shape")

    def __init__(self, members: MeshActors, shape: MeshShape, name: str) -> None:
        self._members = members
        self._shape = shape
        self._refs = [members.actors[rank] for rank in shape.ranks]
        self._name = name

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> MeshValues[R_co]:
        """Ask all and return their values with their places, when all have answered.

        The arguments are encoded once.  Cancelling cancels all.

        Raises ``UsageError`` if the call is wrong, before anything is sent, and ``MeshError`` if some fail: a group of
        one exception for each of those, as from an ask, with the values of the others.
        """
        return await calls.collect(
            self._name, self._shape, self._asks(args, kwargs), self._members.round(self._shape.ranks)
        )

    def as_completed(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[tuple[Coordinates, R_co], None]:
        """Ask all when iteration begins, and iterate over places and values as they arrive.

        Leaving the loop early cancels the calls that have not arrived.  Raises like ``__call__``, failures at the end.
        """
        return calls.results(self._name, self._shape, self._asks(args, kwargs), self._members.round(self._shape.ranks))

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[tuple[Coordinates, R_co], None]:
        """Stream from all, and iterate over places and items as they arrive, those of one actor in its order.

        Leaving the loop early ends all streams.  Failures come at the end, as ``MeshError``.
        """
        streams = {ref.rank: self._members.counter.stream(ref, self._name, args, kwargs) for ref in self._refs}
        return calls.items(self._name, self._shape, streams, self._members.round(self._shape.ranks))

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> Told:
        """Tell all; the returned object may be awaited, to be slowed down by the slowest, but need not.

        Raises ``UsageError`` if the call is wrong, and ``MeshError`` if some cannot be told; the others are.
        """
        encoded = self._members.system.encode_once(self._refs[0], self._name, args, kwargs, is_told=True)
        told: dict[int, Told] = {}
        failures: dict[int, Exception] = {}
        for ref in self._refs:
            try:
                told[ref.rank] = self._members.counter.tell(ref, self._name, encoded, kwargs)
            except AsyncparError as error:
                failures[ref.rank] = error
        if failures:
            raise mesh_error(f"tell {self._name}", self._shape, failures, {})
        return _ToldAll(f"tell {self._name}", self._shape, told)

    def _asks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Coroutine[Any, Any, R_co]]:
        encoded = self._members.system.encode_once(self._refs[0], self._name, args, kwargs)
        asks: dict[int, Coroutine[Any, Any, R_co]] = {}
        try:
            for ref in self._refs:
                asks[ref.rank] = self._members.counter.ask(ref, self._name, encoded, kwargs)
        except UsageError:
            for ask in asks.values():
                ask.close()
            raise
        return asks

    def __repr__(self) -> str:
        return f"<endpoint {self._name} of {len(self._refs)} actors>"


class _ToldAll(Told):
    """Messages in transit to all actors of a mesh."""

    __slots__ = ("_shape", "_told", "_what")

    def __init__(self, what: str, shape: MeshShape, told: Mapping[int, Told]) -> None:
        self._what = what
        self._shape = shape
        self._told = told

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        failures: dict[int, Exception] = {}
        for rank, told in self._told.items():
            try:
                await told
            except AsyncparError as error:
                failures[rank] = error
        if failures:
            raise mesh_error(self._what, self._shape, failures, {})


class MeshWatch(AsyncIterator[tuple[Coordinates, Down]]):
    """Places and ``Down``s of a mesh's actors as they end, exactly one each; it ends when all have ended."""

    def __init__(self, system: ActorSystem, shape: MeshShape, refs: Iterable[ActorRef[object]]) -> None:
        self._shape = shape
        self._downs: asyncio.Queue[Down | None] = asyncio.Queue()
        """Holds None after the last one."""
        self._left = len(shape)
        self._watches = [system.watch(ref, self._downs.put_nowait) for ref in refs]

    def cancel(self) -> None:
        """End the watch.  Actors that have already ended are still reported."""
        for watch in self._watches:
            watch.cancel()
        if self._left:
            self._left = self._downs.qsize()
            self._downs.put_nowait(None)

    async def __anext__(self) -> tuple[Coordinates, Down]:
        if not self._left:
            raise StopAsyncIteration
        down = await self._downs.get()
        if down is None:
            self._downs.put_nowait(None)  # for other waiting tasks
            raise StopAsyncIteration
        self._left -= 1
        if not self._left:
            self._downs.put_nowait(None)
        return self._shape.coordinates(down.ref.rank), down


class MeshActors:
    """The actors of one mesh, shared by the references to all its parts.

    ``actors`` are by rank; their messages go through ``counter``.
    """

    def __init__(
        self, system: ActorSystem, mesh: str, actors: Mapping[int, ActorRef[Any]], counter: CallCounter
    ) -> None:
        self.system = system
        self.actors = actors
        self.counter = counter
        self._mesh = mesh
        self._attempt = 0

    def round(self, ranks: Iterable[int]) -> Notices:
        """Begin a round of calls to the actors on ``ranks``."""
        called = list(ranks)
        return Notices(self.system.rank, called, lambda failed, text: self._give_up(called, failed, text))

    def _give_up(self, ranks: list[int], failed: int, text: str) -> None:
        """Restart all groups with any of ``ranks``, everywhere."""
        self._attempt += 1
        for rank in self.actors:
            self.system.abandon(rank, Abandon(self._mesh, self._attempt, ranks, failed, sendable(text)))
