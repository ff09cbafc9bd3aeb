"""A node inside somebody else's event loop, and whether it leaves that loop and its process as they were."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np

import asyncpar as ap


def surroundings() -> list[object]:
    """What a node must leave alone: signal handlers and the loop policy."""
    handlers: list[object] = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    return [*handlers, asyncio.get_event_loop_policy()]


class Lodger:
    """Rank 1 of a world of two, in a service."""

    def __init__(self, node: ap.Node, found: list[object]) -> None:
        self.node = node
        self.found = found

    @classmethod
    async def move_in(cls) -> Lodger:
        found = surroundings()
        return cls(await ap.Node.start(), found)

    async def describe(self) -> dict[str, object]:
        """Have rank 0 double a number, and tell of it."""
        await self.node.world.send(np.full(1, 21), 0)
        doubled = await self.node.world.recv(0)
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        return {"doubled": int(doubled[0]), "loop": loop, "is_untouched": surroundings() == self.found}

    async def move_out(self) -> None:
        await self.node.stop()
        Path(os.environ["AFTERWARDS"]).write_text("untouched" if surroundings() == self.found else "touched")
