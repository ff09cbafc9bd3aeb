"""Calls to all actors of a mesh: all values together, or each as it arrives.

``notices`` is for those that still work when others have failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Final, Generic, TypeVar

from asyncpar.errors import AsyncparError
from asyncpar.meshes.arrivals import Arrivals
from asyncpar.meshes.errors import mesh_error
from asyncpar.meshes.notices import Notices
from asyncpar.meshes.shape import Coordinates, MeshShape
from asyncpar.meshes.values import MeshValues

R = TypeVar("R")

_END: Final = object()


class _Outcomes(Generic[R]):
    """How the calls of one round came out."""

    def __init__(self, notices: Notices) -> None:
        self.found: dict[int, R] = {}
        self.failures: dict[int, Exception] = {}
        self._notices = notices

    async def follow(self, rank: int, call: Coroutine[Any, Any, R]) -> None:
        """Run ``call`` and note how it came out."""
        try:
            self.found[rank] = await call
        except Exception as error:  # noqa: BLE001  # of an actor on this rank it may be what ``on_stop`` raised
            self.failures[rank] = error
        self._notices.answered(rank, self.failures.get(rank))

    def values(self, what: str, shape: MeshShape) -> MeshValues[R]:
        """Return the values if all calls have succeeded; else raise ``MeshError``."""
        if self.failures:
            raise mesh_error(what, shape, self.failures, self.found)
        return MeshValues(shape, self.found)


async def collect(
    what: str, shape: MeshShape, calls: Mapping[int, Coroutine[Any, Any, R]], notices: Notices
) -> MeshValues[R]:
    """Run the ``calls``, one for each rank, at once, and return their values when all have ended.

    If some fail, the others go on; then raises ``MeshError``.  Cancelling this cancels all.
    """
    with notices:
        outcomes = _Outcomes[R](notices)
        async with asyncio.TaskGroup() as tasks:
            for rank, call in calls.items():
                tasks.create_task(outcomes.follow(rank, call))
    return outcomes.values(what, shape)


async def results(
    what: str, shape: MeshShape, calls: Mapping[int, Coroutine[Any, Any, R]], notices: Notices
) -> AsyncGenerator[tuple[Coordinates, R], None]:
    """Yield the value of each call with its place, first come first; then raise ``MeshError`` if some have failed."""
    with notices:
        outcomes = _Outcomes[R](notices)
        async with Arrivals[None]() as arrivals:
            for rank, call in calls.items():
                arrivals.begin(rank, outcomes.follow(rank, call))
            while arrivals:
                rank, task = await arrivals.take()
                task.result()
                if rank in outcomes.found:
                    yield shape.coordinates(rank), outcomes.found[rank]
    outcomes.values(what, shape)


async def items(
    what: str, shape: MeshShape, streams: Mapping[int, AsyncGenerator[R, None]], notices: Notices
) -> AsyncGenerator[tuple[Coordinates, R], None]:
    """Yield the items of all ``streams`` with their places, first come first, those of one stream in its order.

    A stream that fails does not end the others; when all have ended, raises ``MeshError``.  In the end all are closed.
    """
    failures: dict[int, Exception] = {}
    with notices:
        try:
            async with Arrivals[Any]() as arrivals:
                for rank, stream in streams.items():
                    arrivals.begin(rank, _next_of(stream))
                while arrivals:
                    rank, task = await arrivals.take()
                    try:
                        item = task.result()
                    except AsyncparError as error:
                        failures[rank], item = error, _END
                    if item is _END:
                        notices.answered(rank, failures.get(rank))
                    else:
                        yield shape.coordinates(rank), item
                        arrivals.begin(rank, _next_of(streams[rank]))
        finally:
            for stream in streams.values():
                await stream.aclose()
    if failures:
        raise mesh_error(what, shape, failures, {})


async def _next_of(stream: AsyncGenerator[R, None]) -> R | object:
    return await anext(stream, _END)
