"""The network of agents on a simulated one: connections that keep their order, break, and repeat messages."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from asyncpar._proto.asyncpar.v1 import group_pb2 as pb
from asyncpar.hosts.codec import decode_message, encode_message
from asyncpar.hosts.network import AnswerNewcomer, OnDown, OnUp, TakeFrame
from asyncpar.testing.simulation.network import RESET, SimulatedNetwork, SimulatedPipe
from asyncpar.testing.simulation.process import CURRENT, SimulatedProcess

RETRY_SECONDS: Final = 0.1
CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 3.0


def address_of(node: int) -> str:
    """Return the address at which the agent of a node serves."""
    return f"node{node}:1"


def node_at(address: str) -> int:
    """Return the node whose agent serves at ``address``."""
    return int(address.removeprefix("node").partition(":")[0])


def running() -> SimulatedProcess:
    process = CURRENT.get()
    assert process is not None
    return process


class GroupEnd:
    """One end of a connection registered with the network; ``lost`` is set when it breaks."""

    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess, peer: SimulatedProcess) -> None:
        self.process = process
        self.peer = peer
        self._network = network
        self.other: GroupEnd | None = None
        self.lost: asyncio.Future[str] = network.loop.create_future()
        network.lanes[self] = None

    @property
    def peer_node(self) -> int | None:
        return self.peer.node

    def reset(self, cause: str) -> None:
        """See ``ConnectionEnd``."""
        self._network.lanes.pop(self, None)
        if not self.lost.done():
            self.lost.set_result(cause)

    def send_reset(self) -> None:
        """See ``ConnectionEnd``."""
        other = self.other
        if other is not None and self._network.lanes.get(other, 0) is None:
            delay = self._network.loop.now + self._network.conditions.latency
            self._network.loop.schedule(other.process, delay, other.reset, RESET)


class SimulatedPeer:
    """See ``PeerConnection``; the counterpart of ``GroupPeer`` over gRPC."""

    def __init__(
        self, network: SimulatedNetwork, own: tuple[str, str], node: str, address: str, on_up: OnUp, on_down: OnDown
    ) -> None:
        self.address = address
        self._network = network
        self._own, self._node = own, node
        self._on_up, self._on_down = on_up, on_down
        self._waiting: list[bytes] = []
        self._is_closing = False
        self._pipe: SimulatedPipe | None = None
        self._end: GroupEnd | None = None
        self._task = asyncio.create_task(self._run(), name=f"peer {node}")

    def send(self, message: object) -> None:
        if running().is_dead:
            return
        frame = msgspec.msgpack.encode((*self._own, self._node, encode_message(message)))
        if self._pipe is None:
            self._waiting.append(frame)
        else:
            self._write(frame)

    async def close(self) -> None:
        self._is_closing = True  # messages that were sent arrive
        self._task.cancel()
        await asyncio.wait({self._task})

    def _write(self, frame: bytes) -> None:
        assert self._pipe is not None
        target = self._pipe.target
        if target.is_dead and not self._network.is_down(node_at(self.address)) and self._end is not None:
            self._network.loop.call_soon(self._end.reset, RESET)  # its kernel knows no such connection
        self._network.record(self._pipe, frame)
        self._network.send(self._pipe, frame)

    async def _run(self) -> None:
        while True:
            is_gone = await self._talk()
            self._on_down(self._node, is_gone)
            self._waiting.clear()
            await asyncio.sleep(RETRY_SECONDS)

    async def _talk(self) -> bool:
        try:
            end, deliver = await self._network.call(
                node_at(self.address), "group connect", (running(), self._node), timeout=CONNECT_SECONDS
            )
        except ConnectionRefusedError:
            return True
        except (ConnectionError, TimeoutError):
            return False
        own = GroupEnd(self._network, running(), end.process)
        own.other, end.other = end, own
        self._end = own
        self._pipe = self._network.open_pipe(running(), end.process, deliver, is_checked=True)
        try:
            self._on_up(self._node)
            waiting, self._waiting = self._waiting, []
            for frame in waiting:
                self._write(frame)
            await own.lost
            return False  # whether it is gone shows at the next connection attempt
        finally:
            if not self._is_closing:
                self._network.close_pipe(self._pipe)
            self._pipe = None
            own.reset("closed")
            own.send_reset()


class SimulatedGroupNetwork:
    """See ``GroupNetwork``; for the running process."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network
        self._node = ""
        self._take: TakeFrame | None = None

    @property
    def address(self) -> str:
        node = running().node
        assert node is not None
        return address_of(node)

    def serve(self, node: str, take: TakeFrame, answer: AnswerNewcomer) -> None:
        self._node, self._take = node, take
        self._network.serve("group connect", self._accept)
        self._network.serve("group enter", answer)

    def connect(self, own: tuple[str, str], node: str, address: str, *, on_up: OnUp, on_down: OnDown) -> SimulatedPeer:
        return SimulatedPeer(self._network, own, node, address, on_up, on_down)

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        try:
            reply: pb.EnterReply = await self._network.call(
                node_at(address), "group enter", request, timeout=ANSWER_SECONDS
            )
        except TimeoutError as error:
            raise ConnectionError(str(error)) from error
        return reply

    async def _accept(self, asked: tuple[SimulatedProcess, str]) -> tuple[GroupEnd, Any]:
        dialer, wanted = asked
        if wanted != self._node:
            raise ConnectionRefusedError("another start of that agent serves here")
        return GroupEnd(self._network, running(), dialer), self._deliver

    def _deliver(self, piece: bytes | str) -> None:
        assert isinstance(piece, bytes)
        sender, address, receiver, content = msgspec.msgpack.decode(piece)
        if receiver == self._node and self._take is not None:
            self._take(sender, address, decode_message(content))
