"""One endpoint of all actors of a mesh."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

from asyncpar.errors import AsyncparError, UsageError
from asyncpar.meshes import calls
from asyncpar.meshes.crew import Crew
from asyncpar.meshes.errors import mesh_error
from asyncpar.meshes.shape import Coordinates, MeshShape
from asyncpar.meshes.values import MeshValues
from asyncpar.runtime.ref import Told

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class MeshEndpoint(Generic[P, R_co]):
    """Reaches all actors of a mesh at once."""

    __slots__ = ("_crew", "_name", "_refs", "_shape")

    def __init__(self, crew: Crew, shape: MeshShape, name: str) -> None:
        self._crew = crew
        self._shape = shape
        self._refs = [crew.actors[rank] for rank in shape.ranks]
        self._name = name

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> MeshValues[R_co]:
        """Ask all and return their values with their places, when all have answered.

        The arguments are encoded once.  Cancelling cancels all.

        Raises ``UsageError`` if the call is wrong, before anything is sent, and ``MeshError`` if some fail: a group of
        one exception for each of those, as an ask raises them, with the values of the others.
        """
        return await calls.collect(
            self._name, self._shape, self._asks(args, kwargs), self._crew.round(self._shape.ranks)
        )

    def as_completed(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[tuple[Coordinates, R_co], None]:
        """Ask all when iteration begins, and iterate over places and values as they arrive.

        Leaving the loop early cancels what has not arrived.  Raises as ``__call__`` does, failures at the end.
        """
        return calls.results(self._name, self._shape, self._asks(args, kwargs), self._crew.round(self._shape.ranks))

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[tuple[Coordinates, R_co], None]:
        """Let all stream, and iterate over places and items as they arrive, those of one actor in its order.

        Leaving the loop early ends all streams.  Failures come at the end, as ``MeshError``.
        """
        streams = {ref.rank: self._crew.tally.stream(ref, self._name, args, kwargs) for ref in self._refs}
        return calls.items(self._name, self._shape, streams, self._crew.round(self._shape.ranks))

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> Told:
        """Tell all; what this returns may be awaited, to be slowed down by the slowest, but need not.

        Raises ``UsageError`` if the call is wrong, and ``MeshError`` if some cannot be told; the others are.
        """
        encoded = self._crew.system.encode_once(self._refs[0], self._name, args, kwargs, is_told=True)
        told: dict[int, Told] = {}
        failures: dict[int, Exception] = {}
        for ref in self._refs:
            try:
                told[ref.rank] = self._crew.tally.tell(ref, self._name, encoded, kwargs)
            except AsyncparError as error:
                failures[ref.rank] = error
        if failures:
            raise mesh_error(f"tell {self._name}", self._shape, failures, {})
        return _ToldAll(f"tell {self._name}", self._shape, told)

    def _asks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Coroutine[Any, Any, R_co]]:
        encoded = self._crew.system.encode_once(self._refs[0], self._name, args, kwargs)
        asks: dict[int, Coroutine[Any, Any, R_co]] = {}
        try:
            for ref in self._refs:
                asks[ref.rank] = self._crew.tally.ask(ref, self._name, encoded, kwargs)
        except UsageError:
            for ask in asks.values():
                ask.close()
            raise
        return asks

    def __repr__(self) -> str:
        return f"<endpoint {self._name} of {len(self._refs)} actors>"


class _ToldAll(Told):
    """Messages on their way to all actors of a mesh."""

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
