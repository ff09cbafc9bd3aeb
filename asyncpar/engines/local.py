"""Ranks on this machine, as children of this process: one place, whose agent runs on the caller's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from asyncpar.core.addresses import loopback
from asyncpar.engines.elastic_place import make_agent
from asyncpar.engines.interface import (
    GrowingEngine,
    Handle,
    JobSpec,
    Place,
    PlaceCommand,
    PlaceEvent,
    PlaceLost,
    PlaceOrder,
)
from asyncpar.engines.place_agent import PlaceRun
from asyncpar.errors import UsageError
from asyncpar.net.membership.host import host_name


class LocalEngine(GrowingEngine):
    """Any number of ranks on this machine; processes are spawned, never forked.

    They share a place, whose agent is the launcher; those of an elastic job have a place each.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._given = 0

    @property
    def caller_address(self) -> str:
        return loopback()

    async def grow(self, spec: JobSpec, count: int) -> Sequence[Place]:  # noqa: ARG002
        self._given += count
        numbers = range(self._given - count, self._given)
        return [Place(name=f"place {n} here", host=host_name(), address=loopback(), slots=1) for n in numbers]

    async def allocate(self, spec: JobSpec) -> Sequence[Place]:
        if spec.least is not None:
            return await self.grow(spec, spec.least)
        if spec.per_place is not None and spec.per_place < spec.ranks:
            raise UsageError(
                f"per_place: expected at least {spec.ranks}, as this machine is the only place, got {spec.per_place}"
            )
        return [Place(name="this machine", host=host_name(), address=loopback(), slots=spec.ranks)]

    async def start(self, place: Place, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> Handle:  # noqa: ARG002
        agent = make_agent(order, take)
        task = asyncio.create_task(agent.run(), name="asyncpar local place")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return LocalHandle(agent)

    async def failures(self) -> AsyncIterator[PlaceLost]:
        """Yield nothing: this process cannot outlive its own place."""
        losses: tuple[PlaceLost, ...] = ()
        for lost in losses:
            yield lost

    async def release(self) -> None:
        running = tuple(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


class LocalHandle(Handle):
    """An agent in this process."""

    def __init__(self, agent: PlaceRun) -> None:
        self._agent = agent

    async def send(self, command: PlaceCommand) -> None:
        self._agent.obey(command)
