"""Watching a mesh comes to an end for everyone who reads it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

from asyncpar.actors.meshes.mesh_ref import MeshWatch
from asyncpar.actors.meshes.shape import MeshShape
from asyncpar.actors.runtime.ending import Down, DownReason
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.actors.runtime.watches import Watch


class Watcher:
    """Keeps the callbacks of watches."""

    def __init__(self) -> None:
        self.on_down: list[Callable[[Down], None]] = []

    def watch(self, ref: ActorRef[Any], on_down: Callable[[Down], None]) -> Watch:
        self.on_down.append(on_down)
        return Watch(lambda: None)


def watch_two(watcher: Watcher) -> tuple[MeshWatch, list[ActorRef[Any]]]:
    refs = [ActorRef[Any](cast(Any, None), name="a", rank=rank) for rank in range(2)]
    return MeshWatch(cast(ActorSystem, watcher), MeshShape.line(range(2)), refs), refs


async def read(watch: MeshWatch) -> list[int]:
    return [down.ref.rank async for _, down in watch]


async def test_cancelling_ends_the_loop_of_who_waits() -> None:
    watch, _ = watch_two(Watcher())
    reading = asyncio.ensure_future(read(watch))
    await asyncio.sleep(0)
    watch.cancel()
    async with asyncio.timeout(30):
        assert await reading == []


async def test_what_had_ended_before_is_still_read_after_cancelling() -> None:
    watcher = Watcher()
    watch, refs = watch_two(watcher)
    watcher.on_down[1](Down(refs[1], DownReason.STOPPED))
    watch.cancel()
    assert await read(watch) == [1]


async def test_two_readers_share_the_ends_and_both_come_to_theirs() -> None:
    watcher = Watcher()
    watch, refs = watch_two(watcher)
    readers = [asyncio.ensure_future(read(watch)) for _ in range(3)]
    await asyncio.sleep(0)
    for ref, on_down in zip(refs, watcher.on_down, strict=True):
        on_down(Down(ref, DownReason.STOPPED))
    async with asyncio.timeout(30):
        assert sorted(itertools.chain(*await asyncio.gather(*readers))) == [0, 1]
