"""Watching all actors of a mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from asyncpar.meshes.shape import Coordinates, MeshShape
from asyncpar.runtime.down import Down
from asyncpar.runtime.ref import ActorRef
from asyncpar.runtime.system import ActorSystem


class MeshWatch(AsyncIterator[tuple[Coordinates, Down]]):
    """Places and ``Down``s of a mesh's actors as they end, exactly one each; over when all have ended."""

    def __init__(self, system: ActorSystem, shape: MeshShape, refs: Iterable[ActorRef[object]]) -> None:
        self._shape = shape
        self._downs: asyncio.Queue[Down | None] = asyncio.Queue()
        """Holds None after the last one, for those who wait."""
        self._left = len(shape)
        self._watches = [system.watch(ref, self._downs.put_nowait) for ref in refs]

    def cancel(self) -> None:
        """Watch no longer.  What has ended already is still reported."""
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
            self._downs.put_nowait(None)  # for others who wait
            raise StopAsyncIteration
        self._left -= 1
        if not self._left:
            self._downs.put_nowait(None)
        return self._shape.coordinates(down.ref.rank), down
