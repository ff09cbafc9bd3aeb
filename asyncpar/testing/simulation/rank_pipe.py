"""The pipe of a simulated rank to its agent, and the services of the rank for others: see ``RankPipe``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import Any, Final

from asyncpar.bootstrap import WorldBootstrap
from asyncpar.core.config.world import World
from asyncpar.elasticity.donors import SnapshotDescription, SnapshotShelf, StepUpdate
from asyncpar.elasticity.pipe import Served
from asyncpar.errors import PeerLost
from asyncpar.hosts.lineage import Lineage
from asyncpar.hosts.pipe_messages import AgentMessage, RankMessage, decode_rank_line, encode_line
from asyncpar.testing.simulation.connector import SimConnector
from asyncpar.testing.simulation.group_network import address_of, node_at
from asyncpar.testing.simulation.network import SimulatedNetwork
from asyncpar.testing.simulation.process import SimulatedProcess

PIPE_SECONDS: Final = 50e-6
"""Seconds that a message takes between a rank and its agent."""
_INSTANT: Final = 1e-9
_DONOR_SECONDS: Final = 6.0


class PipeDirection:
    """One direction of a pipe between two processes of a node: it keeps its order, and its content."""

    def __init__(self, network: SimulatedNetwork, target: SimulatedProcess) -> None:
        self._network = network
        self._target = target
        self._last = -math.inf

    def call(self, take: Callable[..., object], *content: Any) -> None:
        """Make the target call ``take`` with ``content``, behind all earlier calls; a dead one takes nothing."""
        loop = self._network.loop
        self._last = max(self._last + _INSTANT, loop.now + PIPE_SECONDS)
        loop.schedule(self._target, self._last, take, *content)


class SimulatedRankPipe:
    """See ``RankPipe``; ``received`` takes the messages of the rank in ``process`` on the side of its agent."""

    def __init__(
        self,
        network: SimulatedNetwork,
        process: SimulatedProcess,
        dice: Random,
        *,
        member: str,
        to_agent: PipeDirection,
        received: Callable[[RankMessage], None],
    ) -> None:
        self.to_rank = PipeDirection(network, process)
        self._network = network
        self._process = process
        self._dice = dice
        self._member = member
        self._to_agent = to_agent
        self._received = received
        self._take: Callable[[AgentMessage], None] | None = None
        self._early: list[AgentMessage] = []
        self._shelf: SnapshotShelf | None = None

    def deliver(self, message: AgentMessage) -> None:
        """Take a message of the agent; it waits until the pipe is open."""
        if self._take is None:
            self._early.append(message)
        else:
            self._take(message)

    @property
    def is_open(self) -> bool:
        return self._take is not None

    async def open(self, take: Callable[[AgentMessage], None], end: Callable[[Exception], None]) -> None:
        del end  # a rank ends with its agent
        self._take = take
        early, self._early = self._early, []
        for message in early:
            take(message)

    def write(self, message: RankMessage) -> None:
        if self._take is not None:
            self._to_agent.call(self._received, decode_rank_line(encode_line(message)))

    async def serve_snapshots(self, shelf: SnapshotShelf) -> str:
        self._shelf = shelf
        self._network.serve(f"shelf {self._member}", self._give)
        assert self._process.node is not None
        return address_of(self._process.node)

    def donor(self, name: str, address: str) -> SimulatedDonor:
        return SimulatedDonor(self._network, name, node_at(address))

    async def serve_links(self, stack: AsyncExitStack, certified: Sequence[int] | None) -> Served:
        del certified
        nodes: list[int] = []
        connector = SimConnector(self._network, self._process, self._dice, node_of=nodes.__getitem__)
        connector.serve()
        stack.callback(connector.leave)

        def bootstrap(world: World, rank: int) -> WorldBootstrap:
            nodes[:] = [node_at(member.address) for member in world.members]
            return WorldBootstrap(world=world, rank=rank, connector=connector, join=connector.join)

        assert self._process.node is not None
        return address_of(self._process.node), bootstrap

    async def close(self) -> None:
        self._take = lambda _: None
        if self._shelf is not None:
            self._network.withdraw(f"shelf {self._member}", self._process)

    async def _give(self, request: tuple[str, tuple[Any, ...]]) -> Any:
        """Give a joining rank something from the shelf, as a copy."""
        verb, arguments = request
        if self._shelf is None:
            raise PeerLost(f"{self._member} has no state yet", cause="no state")
        given = await getattr(self._shelf, verb)(*arguments)
        if isinstance(given, memoryview):
            return bytes(given)
        return given.copied() if isinstance(given, StepUpdate) else given


class SimulatedDonor:
    """A member on another node that gives the state to joining ranks."""

    def __init__(self, network: SimulatedNetwork, name: str, node: int) -> None:
        self.name = name
        self._network = network
        self._node = node

    async def position(self) -> int:
        return int(await self._ask("position"))

    async def pin(self, step: int) -> SnapshotDescription:
        found = await self._ask("pin", step)
        assert isinstance(found, SnapshotDescription)
        return found

    async def block(self, pin: int, name: str, number: int) -> bytes | memoryview:
        return bytes(await self._ask("block", pin, name, number))

    async def update(self, pin: int, number: int) -> StepUpdate:
        found = await self._ask("update", pin, number)
        assert isinstance(found, StepUpdate)
        return found

    async def lineage(self, pin: int, step: int) -> Lineage:
        found = await self._ask("lineage", pin, step)
        assert isinstance(found, Lineage)
        return found

    async def unpin(self, pin: int) -> None:
        await self._ask("unpin", pin)

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    async def _ask(self, verb: str, *arguments: Any) -> Any:
        try:
            await self._network.reach(self._node, f"shelf {self.name}", timeout=_DONOR_SECONDS)
            return await self._network.call(
                self._node, f"shelf {self.name}", (verb, arguments), timeout=10 * _DONOR_SECONDS
            )
        except OSError as error:
            raise PeerLost(f"{self.name} does not answer: {error}", cause=str(error)) from error
