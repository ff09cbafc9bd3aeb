"""A group of agents in one process, on a network on which anybody who has the secret can say anything to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from asyncpar import __version__
from asyncpar._proto.asyncpar.v1 import group_pb2 as pb
from asyncpar.hosts.codec import decode_message, encode_message
from asyncpar.hosts.consensus_messages import DurableState, Entry
from asyncpar.hosts.messages import WorldStatus
from asyncpar.hosts.network import AnswerNewcomer, OnDown, OnUp, TakeFrame
from asyncpar.hosts.service import WorldService
from asyncpar.hosts.votes import VoteFile

DELAY = 0.001
RETRY = 0.1


class MemoryDisk:
    """Keeps what is stored."""

    def __init__(self) -> None:
        self.content: bytes | None = None

    def read(self, name: str) -> bytes:
        if self.content is None:
            raise FileNotFoundError(name)
        return self.content

    def replace(self, name: str, data: bytes) -> None:
        self.content = data


class Wire:
    """The way from one agent to another, or to an address where nobody is: then it is down every ``RETRY`` seconds."""

    def __init__(self, network: Network, own: tuple[str, str], node: str, address: str, up: OnUp, down: OnDown) -> None:
        self.address = address
        self._network, self._own, self._node = network, own, node
        self._task = asyncio.create_task(self._run(up, down))

    async def _run(self, up: OnUp, down: OnDown) -> None:
        await asyncio.sleep(DELAY)
        while self.address not in self._network.agents:
            down(self._node, True)
            await asyncio.sleep(RETRY)
        up(self._node)

    def send(self, message: object) -> None:
        self._network.sent.append((self._own[0], self._node, message))
        content = encode_message(message)
        asyncio.get_running_loop().call_later(DELAY, self._network.bring, self.address, self._node, self._own, content)

    async def close(self) -> None:
        self._network.wires.remove(self)
        self._task.cancel()
        await asyncio.wait({self._task})


class Network:
    """Who serves where, and all connections that are open."""

    def __init__(self) -> None:
        self.agents: dict[str, Door] = {}
        self.wires: list[Wire] = []
        self.sent: list[tuple[str, str, object]] = []

    def bring(self, address: str, node: str, sender: tuple[str, str], content: bytes) -> None:
        door = self.agents.get(address)
        if door is not None and door.node == node and door.take is not None:
            door.take(*sender, decode_message(content))


class Door:
    """The place of one agent on the network: see ``GroupNetwork``."""

    def __init__(self, network: Network, address: str) -> None:
        self.address = address
        self.node = ""
        self.take: TakeFrame | None = None
        self.answer: AnswerNewcomer | None = None
        self._network = network

    def serve(self, node: str, take: TakeFrame, answer: AnswerNewcomer) -> None:
        self.node, self.take, self.answer = node, take, answer
        self._network.agents[self.address] = self

    def connect(self, own: tuple[str, str], node: str, address: str, *, on_up: OnUp, on_down: OnDown) -> Wire:
        wire = Wire(self._network, own, node, address, on_up, on_down)
        self._network.wires.append(wire)
        return wire

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        door = self._network.agents.get(address)
        if door is None or door.answer is None:
            raise ConnectionError("refused")
        return await door.answer(request)


class Group:
    """Agents ``a``, ``b``, ...; ``async with``.  The first one leads."""

    def __init__(self, names: str = "abc") -> None:
        self.network = Network()
        self.doors = {name: Door(self.network, f"{name}:1") for name in names}
        self.disks = {name: MemoryDisk() for name in names}
        self.services = {name: self._make(name, "a:1" if name != "a" else "") for name in names}
        self.commands: list[object] = []
        """What all agents have been told to do."""
        self._readers: list[asyncio.Task[None]] = []

    def _make(self, name: str, join: str) -> WorldService:
        votes = VoteFile(Path("votes"), job="agents", disk=self.disks[name])
        return WorldService(name=name, network=self.doors[name], join=(join,) if join else (), votes=votes)

    async def __aenter__(self) -> Group:
        for service in self.services.values():
            await service.start()
            self._readers.append(asyncio.create_task(self._read(service)))
            await asyncio.sleep(1.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(service.stop() for service in self.services.values()))
        await asyncio.gather(*self._readers)

    async def _read(self, service: WorldService) -> None:
        async for command in service.commands:
            self.commands.append(command)

    def node(self, name: str) -> str:
        """The start of the agent of a host."""
        return self.doors[name].node

    def votes(self, name: str) -> DurableState:
        """What an agent has stored."""
        state = VoteFile(Path("votes"), job="agents", disk=self.disks[name]).read()
        assert state is not None
        return state

    @property
    def decided(self) -> Entry:
        return self.votes("a").decided

    async def say(self, sender: str, message: object, address: str = "nowhere:1") -> None:
        """Bring a message of somebody to all agents, one after another."""
        for door in list(self.doors.values()):
            self.network.bring(door.address, door.node, (sender, address), encode_message(message))
        await asyncio.sleep(0.01)

    async def enter(self, name: str, **fields: Any) -> pb.EnterReply:
        """Ask the leader for a place."""
        answer = self.doors["a"].answer
        assert answer is not None
        given = {"version": __version__, "node": f"{name}#0", "name": name, "address": f"{name}:1", **fields}
        return await answer(pb.EnterRequest(**given))

    async def views(self) -> list[WorldStatus]:
        """What each agent says of the group."""
        return [await service.status() for service in self.services.values()]
