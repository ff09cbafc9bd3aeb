"""Workers that keep a journal, and supervisors over them, on virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.supervision.child import Child
from asyncpar.node import Node
from asyncpar.testing import local_world, run_virtual

T = TypeVar("T")


class Journal:
    """What happened to the workers, in order: ``+a`` started, ``!a`` did not start, ``-a`` stopped.

    ``faults`` says how many starts of a worker fail, ``slow`` how long its hooks take.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.lives: Counter[str] = Counter()
        self.started_at = 0.0
        self.faults: Counter[str] = Counter()
        self.slow_start: dict[str, float] = {}
        self.slow_stop: dict[str, float] = {}

    def take(self) -> str:
        """Return what happened since the last time."""
        lines, self.lines = self.lines, []
        return " ".join(lines)


class Worker(Actor):
    """Does what its journal says, and fails when it is ordered to."""

    def __init__(self, journal: Journal, label: str) -> None:
        self._journal = journal
        self._label = label

    async def on_start(self) -> None:
        await asyncio.sleep(self._journal.slow_start.get(self._label, 0.0))
        if self._journal.faults[self._label]:
            self._journal.faults[self._label] -= 1
            self._journal.lines.append(f"!{self._label}")
            raise OSError(f"{self._label} cannot start")
        self._journal.lives[self._label] += 1
        self._journal.started_at = asyncio.get_running_loop().time()
        self._journal.lines.append(f"+{self._label}")

    async def on_stop(self) -> None:
        await asyncio.sleep(self._journal.slow_stop.get(self._label, 0.0))
        self._journal.lines.append(f"-{self._label}")

    @endpoint
    async def life(self) -> int:
        """Say which life of this worker answers."""
        return self._journal.lives[self._label]

    @endpoint
    async def crash(self) -> None:
        raise ValueError(f"{self._label} is broken")

    @endpoint
    async def hang(self) -> None:
        await asyncio.sleep(3600.0)

    @endpoint
    async def leave(self) -> None:
        self.stop_self()


class Stage:
    """A node, the journal of its workers, and words to shorten tests."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.journal = Journal()

    def child(self, label: str, **options: Any) -> Child:
        return Child(Worker, self.journal, label, name=label, **options)

    def worker(self, label: str) -> Worker:
        return self.node.ref(label, actor_class=Worker)

    async def crash(self, *labels: str) -> None:
        """Let workers fail, all at once, and whatever follows from it at once happen."""
        for label in labels:
            self.worker(label).crash.tell()
        await self.settle()

    async def settle(self) -> None:
        """Return when nothing more happens without time passing."""
        await asyncio.sleep(1e-6)


Play = Callable[[Callable[[Stage], Awaitable[T]]], T]


def _play(scene: Callable[[Stage], Awaitable[T]]) -> T:
    async def main() -> T:
        async with local_world(1) as (node,):
            before = asyncio.all_tasks()
            result = await scene(Stage(node))
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        assert not left, f"tasks were left behind: {left}"
        return result

    return run_virtual(main())


@pytest.fixture(scope="session")
def play() -> Play[Any]:
    """Run a scene on a node of its own, on virtual time; at its end nothing may be left behind."""
    return cast(Play[Any], _play)
