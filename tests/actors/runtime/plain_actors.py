"""Actors for tests that are about everything but what actors do."""

from __future__ import annotations

import asyncio

from asyncpar.actors.runtime.actor import Actor, endpoint


class Plain(Actor):
    """Waits, counts, and starts children."""

    def __init__(self, seen: list[str] | None = None) -> None:
        self.seen = [] if seen is None else seen
        self.gate = asyncio.Event()

    @endpoint
    async def wait(self) -> None:
        await self.gate.wait()

    @endpoint(concurrency=1)
    async def open(self) -> None:
        self.gate.set()

    @endpoint
    async def note(self, text: str) -> None:
        self.seen.append(text)

    @endpoint
    async def fail(self) -> None:
        raise ValueError("it failed")

    @endpoint
    async def name_of(self) -> str:
        return self.name


class Careless(Plain):
    """Its ``on_stop`` raises."""

    async def on_stop(self) -> None:
        raise LookupError("nothing to stop")

    @endpoint
    async def leave(self) -> None:
        self.stop_self()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
