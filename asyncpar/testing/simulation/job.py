"""A job of fixed size in a simulation: ranks that meet, run the program on their nodes, and restart together."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from random import Random
from typing import Any, Final

from asyncpar.bootstrap import WorldBootstrap
from asyncpar.core.config.world import Member, World
from asyncpar.errors import PeerLost, PeerTimeout
from asyncpar.node import Node, start_node
from asyncpar.testing.simulation.cluster import SimulatedCluster
from asyncpar.testing.simulation.connector import SimConnector
from asyncpar.testing.simulation.process import SimulatedProcess

Main = Callable[[Node], Awaitable[Any]]

MEET_SECONDS: Final = 60.0
"""Seconds for which ranks wait for each other in the beginning."""

_EXITED = "it exited before the world was complete"


class JobRecord:
    """The ends of the processes of a job."""

    def __init__(self) -> None:
        self.ranks: list[SimulatedProcess] = []
        """The newest process of each node."""
        self.results: dict[SimulatedProcess, Any] = {}
        self.errors: dict[SimulatedProcess, BaseException] = {}
        self.changed = asyncio.Event()

    def has_ended(self, process: SimulatedProcess) -> bool:
        """Return whether ``process`` is dead, or its program has ended."""
        return process.is_dead or process in self.results or process in self.errors

    def excuses(self, process: SimulatedProcess, error: BaseException) -> bool:  # noqa: ARG002
        """Return whether it is right that the program of ``process`` ended with ``error``."""
        return False

    def failure(self) -> BaseException | None:
        """Return the failure of the job as a whole, None if there is none."""
        return None

    def is_over(self, nodes: frozenset[int]) -> bool:
        """Return whether the newest processes on ``nodes`` have all ended."""
        return all(self.has_ended(process) for process in self.ranks if process.node in nodes)

    async def record(self, process: SimulatedProcess, main: Coroutine[Any, Any, Any]) -> None:
        """Run the program of ``process`` and record its result or error."""
        try:
            self.results[process] = await main
        except BaseException as error:  # the caller of the simulation judges it
            if process.is_dead:
                raise
            self.errors[process] = error
            traceback.clear_frames(error.__traceback__)
        finally:
            self.changed.set()


class SimulatedJob(JobRecord):
    """Runs ``main(node)`` on ``size`` ranks, one on each node of ``cluster``.

    When a node is started again, all reachable ranks are killed and the job begins anew in the next
    generation, as with a launcher; a paused rank lives on, and wakes in an old world.
    """

    def __init__(self, cluster: SimulatedCluster, main: Main, *, seed: object, pin: str | None = None) -> None:
        super().__init__()
        self._cluster = cluster
        self._main = main
        self._pin = pin
        self._dice = Random(f"{seed} lanes")
        self._met: dict[int, asyncio.Future[None]] = {}
        self._here: dict[int, set[int]] = {}
        self.generation = 0

    def installed(self) -> AbstractContextManager[None]:
        """Do nothing: no patches are needed."""
        return nullcontext()

    def begin(self) -> None:
        """Start a generation on all nodes."""
        generation = self.generation
        self._met[generation] = self._cluster.loop.create_future()
        self._here[generation] = set()
        self.ranks = [
            self._cluster.launch(node, lambda process, rank=node: self._run(process, rank, generation))  # type: ignore[misc]
            for node in range(self._cluster.size)
        ]

    def begin_anew(self, node: int) -> None:
        """Run the rank of ``node`` again: begin the next generation."""
        for process in self.ranks:
            if process.health.name != "PAUSED":
                self._cluster.kill(process)
        del node
        self.generation += 1
        self.begin()
        self.changed.set()

    def ended(self, process: SimulatedProcess) -> None:
        """Handle the death of a process from a fault."""
        for generation, met in self._met.items():
            if process.node not in self._here[generation] and not met.done():
                met.set_exception(PeerLost(f"rank {process.node}: {_EXITED}", rank=process.node, cause=_EXITED))
                met.exception()
        self.changed.set()

    async def _run(self, process: SimulatedProcess, rank: int, generation: int) -> None:
        await self.record(process, self._live(process, rank, generation))

    async def _live(self, process: SimulatedProcess, rank: int, generation: int) -> Any:
        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            connector = SimConnector(self._cluster.network, process, self._dice, node_of=lambda peer: peer)
            connector.serve()
            stack.callback(connector.leave)
            await self._meet(rank, generation)
            world = World(members=self._members(), generation=generation, job="simulated")
            return WorldBootstrap(world=world, rank=rank, connector=connector, join=connector.join, pin=self._pin)

        node = await start_node(attach)
        try:
            return await self._main(node)
        finally:
            await node.stop()

    async def _meet(self, rank: int, generation: int) -> None:
        """Wait until all ranks of the generation are there; a launcher that never fails keeps the list."""
        here, met = self._here[generation], self._met[generation]
        here.add(rank)
        if len(here) == self._cluster.size and not met.done():
            met.set_result(None)
        try:
            async with asyncio.timeout(MEET_SECONDS):
                await asyncio.shield(met)
        except TimeoutError:
            missing = min(set(range(self._cluster.size)) - here, default=None)
            raise PeerTimeout(f"rank {missing} did not join in {MEET_SECONDS:.0f} s", rank=missing) from None

    def _members(self) -> tuple[Member, ...]:
        return tuple(
            Member(rank=rank, host=f"host-{rank}", host_id=f"host-{rank}", address=f"host-{rank}:1")
            for rank in range(self._cluster.size)
        )
